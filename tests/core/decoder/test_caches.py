"""Caches that allocate early or quantize, for layers that store one state or none."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, QuantizedCache
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache, convert_and_export_with_cache

from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing import tiny as contract
from tests.helpers.cases import CASES
from tests.helpers.daily import daily
from tests.helpers.tiny import tokens

STATIC = {"cache_implementation": "static", "cache_config": {"batch_size": 1, "max_cache_len": 12}}
DROP_FIRST = ([{"name": "drop", "attention": (0, 1)}], {"sliding_window": 16, "layer_types": ["full_attention"] * 6})
NAMES = ("llama", "cla", "svformer", "uniattn", "svformer keys", "attnres + drop", "fusedkv",
         "cross_attention", "yoco, a short window")  # fmt: skip
EARLY = {name: CASES[name] for name in NAMES}
EARLY |= {"drop of the first": DROP_FIRST, "svformer + uniattn": CASES["svformer + uniattn"]}


def exportable(case):
    methods, changes = EARLY[case]
    model = contract.build(contract.config_of(methods, **changes))
    for name, value in STATIC.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("case", EARLY)
def test_a_cache_that_is_allocated_early_equals_none(case):
    model, ids = exportable(case), tokens(batch=1, length=8)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        wrapped = TorchExportableModuleWithStaticCache(model)
        rows = [wrapped(ids[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(8)]
    contract.close(full, torch.cat(rows, 1), "early static cache")


@pytest.mark.filterwarnings("ignore")  # torch.export's own
@pytest.mark.parametrize("case", daily(["svformer + uniattn", "drop of the first"], "drop of the first"))
def test_export_with_a_static_cache(case):
    model, ids = exportable(case), tokens(batch=1, length=6)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        program = convert_and_export_with_cache(copy.deepcopy(model)).module()
        rows = [program(input_ids=ids[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(6)]
    contract.close(full, torch.cat(rows, 1), "exported")


@pytest.mark.parametrize("dropped", [{"attention": (0,)}, {"layers": (0, 1)}], ids=str)
def test_a_cache_made_of_tensors_alone_knows_which_layers_store_nothing(dropped):
    model, ids = contract.build(contract.config_of([{"name": "drop", **dropped}])), tokens(length=12)
    full = model(ids, use_cache=False).logits
    begun, cache = contract.steps(model, ids[:, :8], [1] * 5 + [3], DynamicCache())
    assert cache.get_seq_length() == 8
    ended, cache = contract.steps(model, ids[:, 8:], [1] * 4, DynamicCache([states[:2] for states in cache]))
    assert cache.get_seq_length() == 12
    contract.close(torch.cat([begun, ended], 1), full, "a loop with a cache that was taken apart")


PARTIAL = ["cla", "svformer", "uniattn", "drop", "svformer keys", "fusedkv", "yoco"]


NEEDS_FP8 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="its quantized caches need another package"
)


@NEEDS_FP8
@pytest.mark.parametrize("case", PARTIAL)
def test_quantized_caches_are_refused_by_name(case):
    model, ids = contract.build(contract.config_of(*CASES[case][:1])).float(), tokens(batch=1, length=8)
    names = " + ".join(method.name() for method in model.config.methods)
    line = (
        rf"^{names}: transformers' quantized cache needs keys and values of every layer, and layers \[.+\] store less"
    )
    config = {"backend": "fp8"}
    with pytest.raises(ValueError, match=line):
        model.generate(ids, cache_implementation="quantized", cache_config=config, max_new_tokens=2)
    plain = contract.config_of([])
    with pytest.raises(ValueError, match=line):
        model(ids, **{CACHE: QuantizedCache("fp8", plain)}, use_cache=True)


@NEEDS_FP8
@pytest.mark.parametrize("case", ["llama", "resformer", "attnres", "cross_attention"])
def test_quantized_caches_hold_whole_layers(case):
    model, ids = contract.build(contract.config_of(*CASES[case][:1])).float(), tokens(batch=1, length=8)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    result, _ = contract.steps(model, ids, [7, 1], QuantizedCache("fp8", model.config))
    assert (full - result).abs().max() < 0.2 * full.abs().max()  # float8 has 4 bits
    config = {"backend": "fp8"}
    options = {"cache_implementation": "quantized", "cache_config": config, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, max_new_tokens=3, **options).shape == (1, 11)


@pytest.mark.slow  # threads that wait for one another
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    ["llama", "cla", "svformer", "uniattn", "drop", "attnres blocks", "fusedkv", "yoco"],
)
def test_continuous_batching_equals_generate(case):
    model = contract.build(contract.config_of(*CASES[case][:1])).float()
    prompts = [tokens(batch=1, length=length, seed=length) for length in (6, 4)]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    config = GenerationConfig(**options, eos_token_id=-1)
    memory = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # by default nearly all memory that is free
    outputs = model.generate_batch([prompt[0].tolist() for prompt in prompts], config, memory)
    assert [output.generated_tokens for output in outputs.values()] == expected
