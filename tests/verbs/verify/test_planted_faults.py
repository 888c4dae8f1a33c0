"""Every check fails on a fault that is planted for it."""

import dataclasses

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.models.llama import modeling_llama

from crosslayer import verify
from crosslayer.core.decoder.attention import CrossLayerAttention
from crosslayer.core.transformers_versions import CACHE
from crosslayer.verbs.verify import checks
from crosslayer.verbs.verify import run as module
from crosslayer.verbs.verify.checks import CHECKS
from crosslayer.verbs.verify.subject import subject_of
from tests.helpers.saved import ours
from tests.helpers.tiny import tiny
from tests.helpers.verifications import by_name, only


def lose_one_layer(monkeypatch):
    """One layer of a stock model does without the cache."""
    original = modeling_llama.LlamaAttention.forward

    def forward(self, *args, **kwargs):
        return original(self, *args, **{**kwargs, CACHE: None if self.layer_idx == 1 else kwargs[CACHE]})

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)


def forget_the_past(monkeypatch):
    """One layer of ours stores its states, but reads only the new ones."""
    original = CrossLayerAttention._cached

    def forgetful(self, states, cache):
        cached, new = original(self, states, cache), states[1].shape[2]
        if self.layer_idx == 3:
            cached[1] = torch.cat([torch.zeros_like(cached[1][:, :, :-new]), cached[1][:, :, -new:]], 2)
        return cached

    monkeypatch.setattr(CrossLayerAttention, "_cached", forgetful)


def test_a_layer_that_bypasses_the_cache_fails(monkeypatch):
    lose_one_layer(monkeypatch)
    only(monkeypatch, "cache, token by token", "cache, uneven chunks", "beam search", "cache bytes", "save and load")
    verification = verify(tiny("llama", dtype=torch.float32))
    others = {(check.name, check.dtype): check.status for check in verification.applicable}
    for dtype in ("float32", "bfloat16"):
        assert others.pop(("save and load", dtype)) == "PASS"
    assert set(others.values()) == {"FAIL"}


def test_a_layer_that_forgets_the_past_fails(monkeypatch):
    forget_the_past(monkeypatch)
    only(monkeypatch, "cache, token by token", "cache, uneven chunks", "left-padded batch", "beam search")
    rows = verify(ours("uniattn")).applicable
    assert {row.status for row in rows} == {"FAIL"}
    assert all(row.difference > 3 * row.tolerance for row in rows if row.difference is not None)


def no_reordering(monkeypatch):
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda self, beams: None)


def no_padding_mask(monkeypatch):
    original = modeling_llama.LlamaModel.forward

    def forward(self, *args, attention_mask=None, **kwargs):
        return original(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)


def change_when(monkeypatch, condition):
    """The norms are 1 % larger wherever `condition` holds."""
    original = modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, x: original(self, x) * (1.01 if condition(self) else 1)
    )


def change_when_compiled(monkeypatch):
    change_when(monkeypatch, lambda norm: torch.compiler.is_compiling())


def change_at_every_call(monkeypatch):
    calls = iter(range(10**6))
    change_when(monkeypatch, lambda norm: norm.training and next(calls) % 2)


def scale_eager(monkeypatch):
    original = modeling_llama.eager_attention_forward

    def eager(*args, scaling, **kwargs):
        return original(*args, scaling=scaling * 1.01, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)


def lose_a_weight(monkeypatch):
    original = modeling_llama.LlamaForCausalLM.state_dict

    def state_dict(self, *args, **kwargs):
        weights = original(self, *args, **kwargs)
        return {name: weight * 1.0001 if "layers.1.mlp.up" in name else weight for name, weight in weights.items()}

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "state_dict", state_dict)


def keep_twice(monkeypatch):
    original = DynamicLayer.update

    def update(self, keys, values, *args, **kwargs):
        states = original(self, keys, values, *args, **kwargs)
        self.spare = self.keys.clone()
        return states

    monkeypatch.setattr(DynamicLayer, "update", update)


def static_cache_one_off(monkeypatch):
    original = StaticLayer.update

    def update(self, keys, values, *args, **kwargs):
        return original(self, keys, values * (1.01 if keys.shape[2] == 1 else 1), *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", update)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("static cache", static_cache_one_off),
        ("beam search", no_reordering),
        ("left-padded batch", no_padding_mask),
        ("compiled", change_when_compiled),
        ("checkpointed gradients", change_at_every_call),
        ("save and load", lose_a_weight),
        ("eager and SDPA", scale_eager),
        ("cache bytes", keep_twice),
    ],
)
def test_every_row_can_fail(monkeypatch, name, fault):
    only(monkeypatch, name)
    model = tiny("llama", dtype=torch.float32)
    right = verify(model, dtypes=("float32",), compile_backend="aot_eager").checks[1]
    fault(monkeypatch)
    wrong = verify(model, dtypes=("float32",), compile_backend="aot_eager").checks[1]
    assert (right.status, wrong.status) == ("PASS", "FAIL"), wrong


def test_bfloat16_finds_positions_that_are_off_by_one(monkeypatch):
    """The mildest of the faults: the tolerance adapts to rounding, and must not adapt to it."""
    original = modeling_llama.LlamaModel.forward

    def forward(self, input_ids, **kwargs):
        cache = kwargs.get(CACHE)
        if cache is not None and (seen := cache.get_seq_length()):
            kwargs["position_ids"] = (torch.arange(input_ids.shape[1]) + seen + 1)[None]
        return original(self, input_ids, **kwargs)

    only(monkeypatch, "cache, uneven chunks")
    model = tiny("llama", dtype=torch.float32)
    assert verify(model, dtypes=("bfloat16",)).checks[1].status == "PASS"
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    assert verify(model, dtypes=("bfloat16",)).checks[1].status == "FAIL"


def test_a_tolerance_that_tells_little_is_said_to_be_weak(monkeypatch):
    only(monkeypatch, "cache, uneven chunks", "save and load")
    monkeypatch.setattr(checks, "WEAK", 1e-3)
    rows = by_name(verify(tiny("llama", dtype=torch.float32), dtypes=("bfloat16",)))
    assert rows["cache, uneven chunks"].reason.startswith("weak check")
    assert "weak" not in rows["save and load"].reason


def test_an_exception_and_a_nan_are_rows_that_fail(monkeypatch):
    def breaks(subject):
        raise RuntimeError("out of\nluck")

    broken = {"breaks": breaks, "nan": lambda subject: dataclasses.replace(exact, difference=float("nan"))}
    with subject_of(tiny("llama"), torch.arange(3, 20)[None], "float32", "") as subject:
        exact = CHECKS["cache bytes"](subject)
    monkeypatch.setattr(module, "CHECKS", broken)
    rows = by_name(verify(tiny("llama"), dtypes=("float32",)))
    assert rows["breaks"].status == rows["nan"].status == "FAIL"
    assert rows["breaks"].reason == "RuntimeError: out of luck" and rows["nan"].difference is None
