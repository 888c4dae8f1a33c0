"""transformers' own tests of a causal language model, run on ten wirings, with stock Llama as the control.

They are not installed with transformers: `make test-transformers` unpacks them from its source distribution and names
the folder in CROSSLAYER_TRANSFORMERS_TESTS. That distribution lacks the tests of generation and export, which run too
where the folder is `tests` of a whole checkout.
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import tests
from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM, CrossLayerModel

FOLDER = os.environ.get("CROSSLAYER_TRANSFORMERS_TESTS")
if not FOLDER:
    pytest.skip("transformers' tests are not here; `make test-transformers` gets them", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

tests.__path__.append(str(Path(FOLDER).resolve()))  # its modules call their package `tests`, too
for name, mixin in {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}.items():
    package, file = name.split(".")
    if not (Path(FOLDER) / package / f"{file}.py").is_file():
        sys.modules[f"tests.{package}"] = types.ModuleType(f"tests.{package}")
        sys.modules[f"tests.{name}"] = types.ModuleType(f"tests.{name}")
        setattr(sys.modules[f"tests.{name}"], mixin, type(mixin, (), {}))
common = importlib.import_module("tests.test_modeling_common")
training = importlib.import_module("tests.test_training_mixin")

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNIATTN = {"name": "uniattn", "superblocks": ((2, 3),)}
WIRINGS = {
    "Plain": [],
    "Resformer": ["resformer"],
    "Svformer": ["svformer"],
    "Cla": ["cla"],
    "Uniattn": [UNIATTN],
    "Drop": [{"name": "drop", "attention": (1,), "mlp": (2,)}],
    "Attnres": ["attnres"],
    "AttnresBlocks": [{"name": "attnres", "block": 3}],
    "Composition": ["resformer", UNIATTN, "attnres"],
    "Experts": ["resformer", "cla"],
}
# of the wiring of that name, whose sizes grouped products can take; the MLPs of the others are dense
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40}
# a test's name → why it does not apply to our models; what transformers skips itself says why by itself
REASONS = {
    "test_num_layers_is_small": "it wants two layers at most; a wiring across depth needs four to be one",
    "test_attention_outputs": "maps are not returned: sharing never builds them, and asking for them is an error",
    "test_training_gradient_checkpointing_use_reentrant_true": "refused: it loses the gradients of what layers lend",
}
# these ask our class whether it may have experts, and then take it that a model has them
OF_EXPERTS = ("test_eager_matches_batched_and_grouped_inference", "test_output_router_logits_from_config")
# these ask for maps only of models that have attentions, and test much else
WITHOUT_MAPS = (
    "dict_output",
    "assisted_decoding",
    "prompt_lookup",
    "all_outputs",
    "outputs_equivalence",
    "retain_grad",
)


class ModelTester:
    """What transformers' tests ask about a model: its config, its inputs, its classes."""

    batch_size, seq_length, is_training = 13, 7, True
    hidden_size, num_hidden_layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    base_model_class, causal_lm_class, sequence_classification_class = CrossLayerModel, CrossLayerForCausalLM, None

    def __init__(self, methods, shape):
        self.methods, self.shape = methods, shape

    def get_config(self):
        return CrossLayerConfig(cross_layer=self.methods, **self.shape)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, SHAPE["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}  # padded


class LlamaModelTester(ModelTester):
    base_model_class, causal_lm_class = LlamaModel, LlamaForCausalLM

    def get_config(self):
        return LlamaConfig(**self.shape)


class Common(common.ModelTesterMixin, common.GenerationTesterMixin, training.TrainingTesterMixin):
    """All of transformers' tests, for the methods of a subclass."""

    methods: list | None
    shape: dict

    @property
    def model_tester(self):
        tester = LlamaModelTester if self.methods is None else ModelTester
        return tester(self.methods, self.shape)

    @property
    def all_model_classes(self):
        return self.model_tester.base_model_class, self.model_tester.causal_lm_class

    @property
    def has_attentions(self):
        return not any(part in self._testMethodName for part in WITHOUT_MAPS)

    def setUp(self):
        if self._testMethodName in REASONS:
            self.skipTest(REASONS[self._testMethodName])
        if self._testMethodName.startswith(OF_EXPERTS) and self.shape == SHAPE:
            self.skipTest("the MLPs of this wiring are dense")

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """A cache of ours holds what the plan says; what a layer stores alone lies in the slot of the keys."""
        if self.methods is None:
            return super()._check_past_key_values_for_generate(batch_size, past_key_values, seq_length, config)
        self.assertEqual(len(past_key_values), config.num_hidden_layers)
        for layer, cache in enumerate(past_key_values.layers):
            stored = len(config.plan.stored(layer))
            for slot, states in enumerate((cache.keys, cache.values)):
                size = config.head_dim if slot < stored else 0
                if stored or states is not None:
                    self.assertEqual(states.shape, (batch_size, config.num_key_value_heads, seq_length, size))


def setup_module():
    """Name our classes where transformers' tests look up which inputs and labels a class takes."""
    common.MODEL_MAPPING_NAMES["crosslayer"] = CrossLayerModel.__name__
    common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["crosslayer"] = CrossLayerForCausalLM.__name__


def teardown_module():
    del common.MODEL_MAPPING_NAMES["crosslayer"], common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["crosslayer"]


for wiring, methods in {"Llama": None, **WIRINGS}.items():
    members = {"methods": methods, "shape": {**SHAPE, **(EXPERTS if wiring == "Experts" else {})}}
    globals()[f"Test{wiring}"] = type(f"Test{wiring}", (Common, unittest.TestCase), members)


def test_every_reason_names_a_test():
    assert set(REASONS) <= set(dir(Common))
    assert all(any(name.startswith(start) for name in dir(Common)) for start in OF_EXPERTS)
