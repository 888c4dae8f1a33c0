"""What building a deep config and its model costs: everything about the wiring is computed once."""

import gc
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosslayer.core import methods
from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.methods.resformer import ResFormer
from crosslayer.core.methods.uniattn import UniAttn

LAYERS = 80
SHAPE = {
    "vocab_size": 32_000, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": LAYERS,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
UNIATTN = {"name": "uniattn", "superblocks": tuple((layer, layer + 1) for layer in range(40, LAYERS, 2))}
THREE = ["resformer", UNIATTN, "attnres"]


def seconds(build) -> float:
    """Processor time of a call, without the garbage that other tests left, as `timeit` measures it."""
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        build()
        return time.process_time() - started
    finally:
        gc.enable()


def on_meta(cls, config):
    with torch.device("meta"):
        return cls(config)


def test_a_deep_config_takes_under_50_ms():
    def build():
        methods._wire.cache_clear()  # as for methods that were never seen
        CrossLayerConfig(**SHAPE, cross_layer=THREE)

    assert min(seconds(build) for _ in range(7)) < 0.05


def test_plans_and_compensation_are_computed_once(monkeypatch):
    methods._wire.cache_clear()
    calls = []
    for cls, name in ((ResFormer, "plan"), (UniAttn, "plan"), (UniAttn, "compensates")):
        answer = getattr(cls, name)

        def counted(self, *args, cls=cls, name=name, answer=answer):
            calls.append((cls, name, args[1:]))
            return answer(self, *args)

        monkeypatch.setattr(cls, name, counted)
    config = CrossLayerConfig(**SHAPE, cross_layer=THREE)
    on_meta(CrossLayerForCausalLM, config)
    assert config.plan and config.base_model_tp_plan and config.kv_sharing_modes
    assert len(calls) == len(set(calls))
    assert [call[:2] for call in calls].count((UniAttn, "plan")) == 1
    assert [call[:2] for call in calls].count((UniAttn, "compensates")) == LAYERS


def test_initial_values_are_left_out_on_the_meta_device_only():
    config = CrossLayerConfig(**{**SHAPE, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 8})
    torch.manual_seed(0)
    ours = CrossLayerForCausalLM(config).state_dict()
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "head_dim": 1})).state_dict()
    assert all(torch.equal(weight, llama[name]) for name, weight in ours.items())
    before = torch.nn.init.kaiming_uniform_
    assert all(weight.is_meta for weight in on_meta(CrossLayerForCausalLM, config).parameters())
    assert torch.nn.init.kaiming_uniform_ is before


def test_changed_fields_change_the_wiring():
    config = CrossLayerConfig(**{**SHAPE, "num_hidden_layers": 4}, cross_layer=["cla"])
    assert config.wiring is config.wiring and config.plan.keys == (0, 0, 2, 2)
    config.cross_layer = [{"name": "cla", "group": 4}]
    assert config.plan.keys == (0, 0, 0, 0)
    config.num_hidden_layers = 5
    assert config.plan.keys == (0, 0, 0, 0, 4)
    assert "wiring" not in config.to_dict()


@pytest.mark.slow  # eleven pairs of models of 80 layers
@pytest.mark.parametrize("entries", [[], THREE], ids=["no method", "three methods"])
def test_a_deep_model_takes_as_long_as_llamas(entries):
    """Measured by benchmarks/construct.py, too. Other programs only ever add time, so each side's least time counts."""
    ours, llama = CrossLayerConfig(**SHAPE, cross_layer=entries), LlamaConfig(**SHAPE)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(11):
        times[0].append(seconds(lambda: on_meta(CrossLayerForCausalLM, ours)))
        times[1].append(seconds(lambda: on_meta(LlamaForCausalLM, llama)))
    assert min(times[0]) / min(times[1]) < 1.1, times


def test_a_saved_model_says_how_to_load_it(tmp_path):
    """In a process that has not imported crosslayer, transformers suggests to upgrade transformers."""
    config = CrossLayerConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = CrossLayerForCausalLM(config)
    model.save_pretrained(tmp_path)
    readme = tmp_path / "README.md"
    assert "crosslayer" in readme.read_text()
    readme.write_text("card")
    model.save_pretrained(tmp_path)
    assert readme.read_text() == "card"
