"""Both sides run in turns, with the same attention and from caches that hold the same."""

import pytest
import torch
from transformers import DynamicCache

import crosslayer
from crosslayer.cache.kv_cache import held_bytes
from crosslayer.core.transformers_versions import CACHE
from crosslayer.judge import clock
from crosslayer.judge.clock import Load
from crosslayer.output.progress import metered_by
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.bench import run as module
from crosslayer.wiring.kv_bits import KINDS
from tests.helpers.benches import UNIATTN, short
from tests.helpers.meters import Recorder
from tests.helpers.tiny import tiny, tokens


@torch.no_grad()
def test_a_static_cache_filled_by_copying_decodes_alike():
    for methods in ([], UNIATTN, [{"name": "svformer"}]):
        model, ids = build(config_of(methods)), tokens(length=12)
        cache = DynamicCache(config=model.config)
        model(ids[:, :11], **{CACHE: cache}, use_cache=True)
        static = clock.static_cache(model, Load(11, 2, 1), ids, cache)
        static_logits = model(ids[:, 11:], **{CACHE: static}, use_cache=True).logits
        dynamic_logits = model(ids[:, 11:], **{CACHE: cache}, use_cache=True).logits
        torch.testing.assert_close(static_logits, dynamic_logits, rtol=0, atol=1e-10)
        assert held_bytes(static).allocated == held_bytes(cache).allocated


def test_sides_take_turns_and_the_order_alternates():
    models, calls = {"candidate": tiny("llama"), "baseline": tiny("llama")}, []
    for side, model in models.items():

        def note(_, args, kwargs, side=side):
            assert not torch.is_grad_enabled()
            calls.append((side, args[0].shape[1], type(kwargs.get(CACHE)).__name__[:6]))

        model.register_forward_pre_hook(note, with_kwargs=True)
    meter = Recorder()
    with metered_by(meter):
        short(models["candidate"], models["baseline"], 9, new_tokens=2, repeats=3)
    assert meter.works == [("benchmarking", 4)] and [step[:2] for step in meter.steps] == [(i, 4) for i in range(1, 5)]
    prompts = [side for side, length, _ in calls if length == 9]
    odd, even = ["baseline", "candidate"], ["candidate", "baseline"]
    assert prompts[:2] == even  # the warm-up
    assert prompts[2:] == [*odd, *even, *odd]
    assert [call[0] for call in calls[-10:]] == ["baseline"] * 5 + ["candidate"] * 5
    assert [call[2] for call in calls[-10:]] == (["Dynami"] * 3 + ["Static"] * 2) * 2  # the prompt runs once


def test_the_time_of_a_step_runs_each_prompt_once():
    models, calls = {"candidate": tiny("llama"), "baseline": tiny("llama")}, []
    for side, model in models.items():
        model.register_forward_pre_hook(lambda _, args, side=side: calls.append((side, args[0].shape[1])))
    load = Load(9, 2, 7)
    with torch.no_grad():
        step = clock.steps_in_turns([*models.values()], load, clock.random_ids([*models.values()], load))
    assert [length for _, length in calls].count(9) == 2
    assert [side for side, length in calls[-4:]] == ["candidate", "baseline", "baseline", "candidate"]
    assert step.change.n == 5 and step.change.low <= step.change.value <= step.change.high


def test_the_attention_of_a_model_comes_back(monkeypatch):
    models = (tiny("llama", "eager"), tiny("llama"))
    seen = []
    config = models[0].config
    models[0].register_forward_pre_hook(lambda *_: seen.append(config._attn_implementation))
    short(*models, 4, attention=["sdpa", "eager"])
    assert {"sdpa", "eager"} <= set(seen)
    assert [model.config._attn_implementation for model in models] == ["eager", "sdpa"]
    monkeypatch.setattr(module, "too_large", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        short(*models, 4)
    assert [model.config._attn_implementation for model in models] == ["eager", "sdpa"]


def test_a_candidate_may_evict_beside_a_full_cache():
    candidate, baseline = build(config_of("cla")), build(config_of(None))
    benchmark = short(candidate, baseline, 48, new_tokens=4, evict="h2o:32")
    (dynamic,), (static,) = benchmark.rows_of("bytes"), benchmark.rows_of("bytes, static cache")
    states, heads, text = 2 * 8 * 8, 2, 52
    assert dynamic.details["original_stored"] == 6 * states * heads * text == 4 * dynamic.original  # in float64
    known = 3 * heads * 20 * 8  # of each pair of layers: a position and a sum for 16 tokens and 4 new ones
    assert dynamic.details["stored"] == 3 * states * heads * 32 + known
    assert static.value == dynamic.value == 3 * states * heads * 32 // 4 + known  # a single kind of cache
    assert not benchmark.rows_of("reads of a step")
    assert "(h2o:32)" in " ".join(benchmark.sentences())
    with pytest.raises(ValueError, match="did.*mean .h2o."):
        short(candidate, baseline, 48, evict="h20:32")


@pytest.mark.parametrize("bits", ["4", "8", "fp8"])
def test_a_candidate_may_have_a_quantized_cache(bits):
    candidate, baseline = build(config_of("cla")), build(config_of(None))
    benchmark = short(candidate, baseline, 48, new_tokens=4, kv_bits=bits)
    (dynamic,), (static,) = benchmark.rows_of("bytes"), benchmark.rows_of("bytes, static cache")
    kind = KINDS[bits]
    planned = crosslayer.plan(candidate, length=52, dtype="float64", kv_dtype=kind).stored_bytes
    assert dynamic.details["stored"] == static.details["stored"] == planned
    assert not benchmark.rows_of("reads of a step")
    counted = [crosslayer.plan(candidate, length=52, dtype="bfloat16", kv_dtype=kind).stored_bytes]
    counted.append(crosslayer.plan(baseline, length=52, dtype="bfloat16").stored_bytes)
    assert [dynamic.value, dynamic.original] == counted and dynamic.change.value == counted[0] / counted[1]
    assert any("is quantized" in line for line in benchmark.sentences())
    headline, label = benchmark.headline(), bits if bits == "fp8" else f"{bits} bits"
    assert headline["candidates"] == [f"{headline['original']}, {label}"]
    alone = short(baseline, baseline, 48, new_tokens=4, kv_bits=bits)  # one model can be both
    assert alone.rows_of("bytes")[0].original == counted[1]


def test_softmax_s_share_of_the_prompt_is_measured_with_eager_attention():
    candidate, baseline = build(config_of(UNIATTN)), build(config_of(None))
    (eager,) = short(candidate, baseline, 48, attention=["sdpa", "eager"]).rows_of("softmax share")
    assert eager.scope.endswith("eager") and 0 < eager.value < 1 and 0 < eager.original < 1
