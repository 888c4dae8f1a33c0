"""Which layers share a cache in vLLM, over every wiring of the contract; nothing here needs vLLM."""

from types import SimpleNamespace as Space

import pytest
import torch

from crosslayer.core.plan import CACHED
from crosslayer.testing import tiny as contract
from crosslayer.verbs.serve.caches import (
    TENSOR_PARALLEL,
    bytes_per_token,
    cache_item,
    cache_source,
    flags_of,
    not_saved,
    not_servable,
    untested,
)
from tests.helpers.cases import CASES, each


def config_of(case):
    return contract.config_of(CASES[case][0], **CASES[case][1])


def sources(case):
    config = config_of(case)
    return [cache_source(config, layer) for layer in range(config.num_hidden_layers)]


@pytest.mark.parametrize("case", each(CASES))
def test_a_layer_reads_another_cache_only_if_that_holds_just_what_it_reads(case):
    config = config_of(case)
    plan = config.plan
    for layer, source in enumerate(sources(case)):
        assert (source is None) == (not plan.attends(layer))
        if source in (None, layer):
            continue
        assert source < layer and cache_source(config, source) == source
        for state in CACHED:
            assert plan.reads(state, layer) == plan.reads(state, source) == (source,)


def whole(case):
    return not_saved(config_of(case)) is None and not config_of(case).linear_layers


@pytest.mark.parametrize("case", each(CASES))
def test_a_plan_of_whole_layers_is_saved_in_full(case):
    if not whole(case):
        return
    config = config_of(case)
    caches = sum(
        len(states) == 2 for states in (config.plan.stored(layer) for layer in range(config.num_hidden_layers))
    )
    assert caches == sum(source == layer for layer, source in enumerate(sources(case)))
    assert bytes_per_token(config, 4) == caches * 2 * config.num_key_value_heads * config.head_dim * 4


def test_most_wirings_are_of_whole_layers():
    assert len(CASES) / 2 < sum(map(whole, CASES)) < len(CASES)


def test_what_is_shared_by_known_wirings():
    assert sources("llama") == [0, 1, 2, 3, 4, 5]
    assert sources("cla") == [0, 0, 2, 2, 4, 4]
    assert sources("drop of all kinds") == [None, 1, 2, None, None, 5]
    assert sources("svformer") == sources("uniattn") == sources("resformer") == [0, 1, 2, 3, 4, 5]
    assert sources("attnres + cla") == [0, 0, 2, 2, 4, 4]


def test_what_is_not_saved_is_said():
    assert not_saved(config_of("cla")) is None and not_saved(config_of("drop")) is None
    assert not_saved(config_of("resformer")) is None
    words = not_saved(config_of("svformer"))
    assert words is not None and "layers 1-5" in words


def test_what_cannot_be_served_is_named():
    assert not_servable(config_of("cla")) is None
    reason = not_servable(config_of("cross_attention"))
    assert reason is not None and reason.startswith("with cross_attention, layer ")
    assert "linear attention" in str(not_servable(config_of("linear attention")))
    assert not_servable(config_of("gpt2")) and not_servable(config_of("mixture of experts"))


def test_what_processes_cannot_share_is_named():
    split = ("cla", "drop compensated", "uniattn heads", "resformer", "attnres", "fusedkv lite", "yoco", "gemma2")
    two = {TENSOR_PARALLEL: "2"}
    assert not any(untested(config_of(case), two) for case in split)
    for case, words in (("fusedkv", "layer 3"), ("fusedkv, MQA", "its 1 key-value heads")):
        refused = untested(config_of(case), two)
        assert refused is not None and refused[0] == TENSOR_PARALLEL and words in refused[1]
    assert not untested(config_of("fusedkv"), {TENSOR_PARALLEL: "1"})


def test_a_number_in_a_cache_of_8_bits_has_a_byte():
    assert cache_item({}, torch.float32) == 4 and cache_item({"kv-cache-dtype": "auto"}, torch.bfloat16) == 2
    assert cache_item({"kv-cache-dtype": "fp8_e5m2"}, torch.float32) == 1
    assert cache_item({"kv-cache-dtype": "bfloat16"}, torch.float32) == 2


@pytest.mark.parametrize(
    ("set_otherwise", "refused"),
    [
        ({}, None),
        ({"cache_dtype": "fp8", "quantization": "compressed-tensors"}, None),
        ({"tensor_parallel_size": 3}, "tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "pipeline-parallel-size"),
        ({"cache_dtype": "int4"}, "kv-cache-dtype"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv-cache-dtype-skip-layers"),
        ({"kv_sharing_fast_prefill": True}, "kv-sharing-fast-prefill"),
        ({"quantization": "gptq"}, "quantization"),
        ({"lora_config": Space()}, "enable-lora"),
    ],
    ids=str,
)
def test_options_of_a_running_vllm_are_refused_as_flags_are(set_otherwise, refused):
    usual = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    usual |= {"cache_dtype": "auto", "kv_cache_dtype_skip_layers": [], "kv_sharing_fast_prefill": False}
    usual |= {"quantization": None, "hf_overrides": {}, "speculative_config": None, "lora_config": None}
    options = Space(**usual | set_otherwise)  # each part of the config has all options here
    vllm_config = Space(
        parallel_config=options,
        model_config=options,
        cache_config=options,
        speculative_config=options.speculative_config,
        lora_config=options.lora_config,
    )
    found = untested(config_of("cla"), flags_of(vllm_config))
    assert (None if found is None else found[0]) == refused
