"""Formats that hold a model in a folder: a stock class of transformers, and DeciLM.

A stock class is Llama's if it can hold the model, or that of the first other family that can.

DeciLM is a model of vLLM's own: a Llama whose layers may lack attention or MLP, described block by block. vLLM has the
model (`DeciLMForCausalLM`, model type "nemotron-nas") but no class for its config. crosslayer's plugin
provides one, `verbs/serve/configuration_decilm.py`; a copy of that file in the exported folder serves a vLLM without
the plugin, which runs it with `--trust-remote-code`. It is the only code there.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.decoder.convert import SHARED, from_config
from crosslayer.core.transformers_versions import attention_that_caps
from crosslayer.verbs.export.layers import remaining_layers, renumbered
from crosslayer.verbs.serve import configuration_decilm

MODULE = "configuration_decilm"


def stock_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of a stock class with the same logits and weights; `refusal` must accept it."""
    if not isinstance(model, CrossLayerForCausalLM):
        return model
    config = stock_config(model.config)
    if model.config.num_local_experts is not None:
        config._experts_implementation = model.config._experts_implementation
    with no_init_weights():
        stock = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=attention_that_caps(config)
        )
    # Weights are assigned and not copied, so that they are in memory once. Then tied weights must be tied again.
    stock.load_state_dict(renumbered(model.state_dict(), remaining_layers(model.config)), strict=True, assign=True)
    stock.tie_weights()
    stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.to(model.device).eval()


def stock_config(config: CrossLayerConfig) -> PreTrainedConfig:
    """Return the config of the first family that can hold the remaining layers of a model."""
    layers, types = remaining_layers(config), config.layer_types
    assert types is not None
    changes: dict[str, Any] = {
        "cross_layer": [],
        "num_hidden_layers": len(layers),
        "layer_types": [types[layer.number] for layer in layers],
    }
    plain, reasons = CrossLayerConfig(**(config.to_dict() | changes)), []
    for model_type in plain.components.model_types:
        try:
            return from_config(plain, model_type)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"no stock class can hold it: {reasons[0] if reasons else f'family is {plain.family!r}'}")


def write_deci(model: PreTrainedModel, config: CrossLayerConfig, folder: Path) -> None:
    """Write config, its class, generation config and weights in their own dtype into a folder.

    `model` is a crosslayer model or has the same weight names; `refusal` must accept `config`, its crosslayer config.
    """
    layers = remaining_layers(config)
    weights = renumbered(model.state_dict(), layers)
    # A tied head is the embedding itself, which is stored once.
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})

    known = LlamaConfig().to_dict()
    values = {name: value for name, value in config.to_dict().items() if name in SHARED and name in known}
    assert config.num_key_value_heads is not None
    group = config.num_attention_heads // config.num_key_value_heads
    blocks = []
    for layer in layers:
        attends = layer.attention is not None
        attention = {"no_op": not attends, "n_heads_in_group": group if attends else None, "replace_with_linear": False}
        width = config.intermediate_size if layer.mlp else None
        ffn = {"no_op": not layer.mlp, "intermediate_size": width, "replace_with_linear": False}
        blocks.append({"attention": attention, "ffn": ffn})

    qkv = config.attention_bias
    output = config.attention_output_bias
    fields = {
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": f"{MODULE}.DeciLMConfig"},
        "model_type": "nemotron-nas",
        **values,
        "num_hidden_layers": len(layers),
        # In vLLM's class this is only the bias of W_o, if there is a `qkv_bias`.
        "attention_bias": qkv if output is None else output,
        "qkv_bias": qkv,
        "mlp_bias": config.mlp_bias,
        "block_configs": blocks,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(configuration_decilm.__file__, folder / f"{MODULE}.py")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
