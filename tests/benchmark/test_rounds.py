"""Both sides run in turns, with the same attention and from caches that hold the same."""

import pytest
import torch
from transformers import DynamicCache

from crosslayer.benchmark import run as module
from crosslayer.benchmark.prediction import Load
from crosslayer.benchmark.rounds import static_copy
from crosslayer.decoder.caches import cache_bytes
from crosslayer.testing import build, config_of
from tests.helpers.benches import UNIATTN, short
from tests.helpers.meters import Recorder
from tests.helpers.tiny import tiny, tokens


@torch.no_grad()
def test_a_static_cache_filled_by_copying_decodes_alike():
    for methods in ([], UNIATTN, [{"name": "svformer"}]):
        model, ids = build(config_of(methods)), tokens(length=12)
        cache = DynamicCache(config=model.config)
        model(ids[:, :11], past_key_values=cache, use_cache=True)
        static = static_copy(model, cache, Load(11, 2, 1))
        static_logits = model(ids[:, 11:], past_key_values=static, use_cache=True).logits
        dynamic_logits = model(ids[:, 11:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(static_logits, dynamic_logits, rtol=0, atol=1e-10)
        assert cache_bytes(static) == cache_bytes(cache)


def test_sides_take_turns_and_the_order_alternates():
    models, calls = {"candidate": tiny("llama"), "baseline": tiny("llama")}, []
    for side, model in models.items():

        def note(_, args, kwargs, side=side):
            assert not torch.is_grad_enabled()
            calls.append((side, args[0].shape[1], type(kwargs.get("past_key_values")).__name__[:6]))

        model.register_forward_pre_hook(note, with_kwargs=True)
    meter = Recorder()
    short(models["candidate"], models["baseline"], 9, new_tokens=2, repeats=3, progress=meter)
    assert meter.works == [("benchmarking", 4)] and [step[:2] for step in meter.steps] == [(i, 4) for i in range(1, 5)]
    prompts = [side for side, length, _ in calls if length == 9]
    odd, even = ["baseline", "candidate"], ["candidate", "baseline"]
    assert prompts[:2] == even  # the warm-up
    assert prompts[2:] == [*odd, *odd, *even, *even, *odd]  # the second pair of the first two rounds: eager
    steps = [call[0] for call in calls[-8:]]
    assert steps == ["baseline", "baseline", "candidate", "candidate"] * 2
    assert [call[2] for call in calls[-8:]] == ["Dynami"] * 4 + ["Static"] * 4


def test_the_attention_of_a_model_comes_back(monkeypatch):
    models = (tiny("llama", "eager"), tiny("llama"))
    seen = []
    config = models[0].config
    models[0].register_forward_pre_hook(lambda *_: seen.append(config._attn_implementation))
    short(*models, 4)
    assert {"sdpa", "eager"} <= set(seen)
    assert [model.config._attn_implementation for model in models] == ["eager", "sdpa"]
    monkeypatch.setattr(module, "_structures", lambda models: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        short(*models, 4)
    assert [model.config._attn_implementation for model in models] == ["eager", "sdpa"]
