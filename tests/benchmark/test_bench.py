"""Costs against hand counts, the statistics against naive ones, and a bench of tiny models from end to end."""

import itertools
import json
import math
import random
import statistics

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from crosslayer import load_model
from crosslayer.benchmark import compare as module
from crosslayer.benchmark import page as report
from crosslayer.benchmark.compare import Settings, bench, static_copy
from crosslayer.benchmark.costs import Attention, Load, Rates, predict, structure
from crosslayer.benchmark.machine import free_memory, measure_rates, operators, peak_memory
from crosslayer.benchmark.record import BenchRecord
from crosslayer.benchmark.summary import SIDES, TIMES, coverage, explain, paired_ratio, unsteadiest, verdict
from crosslayer.decoder.caches import cache_bytes
from crosslayer.testing import SHAPE, build, config_of
from tests.cli.test_cli import run
from tests.helpers.tiny import VOCABULARY, tiny, tokens

SMALL = Settings(contexts=(12,), batches=(2,), new_tokens=3, repeats=3)
UNIATTN = [{"name": "uniattn", "superblocks": [[1, 2, 3]]}]
DROP = [{"name": "drop", "attention": [4, 5], "mlp": [0]}]
# a layer of crosslayer.testing.SHAPE: q and o 32·32, k and v 32·16, three MLP matrices 32·48
Q = OUT = 32 * 32
K = V = 32 * 16
MLP = 3 * 32 * 48
LAYER = Q + K + V + OUT + MLP
STATE = 2 * 8  # elements of the keys, or the values, of one token: H_kv · D
BYTES = 8  # float64


@pytest.fixture(scope="module")
def found():
    return bench(build(config_of(UNIATTN)), build(config_of([])), SMALL)


def test_costs_of_a_stock_llama_by_hand():
    model = structure(tiny("llama"))
    assert model.matrices == 3 * LAYER and model.head == VOCABULARY * 32 and model.shape == (48, 32)
    assert model.attention == (Attention(4, 2, 8, 8),) * 3 and model.itemsize == BYTES
    pairs = 10 * 11 // 2
    assert model.prefill_flops(2, 10) == (2 * 3 * LAYER * 20, 2 * 3 * pairs * 4 * (2 * 8 + 2 * 8))
    assert model.weight_bytes() == (3 * LAYER + VOCABULARY * 32) * BYTES
    assert model.state_bytes(2, 12) == model.cache_bytes(2, 12) == 2 * 12 * 3 * 2 * STATE * BYTES
    assert model.copied_bytes(2, 12) == 2 * model.cache_bytes(2, 12)


@pytest.mark.parametrize(
    ("methods", "matrices", "stored", "attending"),
    [
        ([], 6 * LAYER, 12, 6),
        (UNIATTN, 6 * LAYER - 2 * (Q + K) + 2 * 32 * 32, 10, 6),
        ([{"name": "cla", "group": 2}], 6 * LAYER - 3 * (K + V), 6, 6),
        ([{"name": "svformer"}], 6 * LAYER - 5 * V, 7, 6),
        (DROP, 6 * LAYER - 2 * (Q + K + V + OUT) - MLP, 8, 4),
    ],
)
def test_costs_of_our_plans_by_hand(methods, matrices, stored, attending):
    config = config_of(methods)
    model = structure(build(config))
    assert model.matrices == matrices and model.head == VOCABULARY * 32
    assert model.cache_bytes(3, 7) == 3 * 7 * stored * STATE * BYTES
    assert model.state_bytes(3, 7) == 3 * 7 * attending * 2 * STATE * BYTES  # what is borrowed is read again
    assert model.prefill_flops(1, 5)[1] == attending * 15 * 4 * 32
    assert config.plan.bytes_per_token(STATE * BYTES) == (model.cache_bytes(1, 1), model.state_bytes(1, 1))


def test_windows_bound_what_is_read_and_kept():
    layer = Attention(4, 2, 8, 6, window=5, stored=("values",))
    assert layer.read(9) == 5 * 2 * 14 and layer.read(3) == 3 * 2 * 14
    assert layer.kept(9) == 5 * 2 * 6
    assert layer.flops(4) == 2 * 10 * 4 * 14 and layer.flops(6) == 2 * 36 * 4 * 14


def test_experts_are_measured_but_not_predicted():
    model = tiny("mixtral", dtype=torch.float32)
    with pytest.raises(ValueError, match="3 dimensions: experts"):
        structure(model)
    record = bench(model, model, Settings((4,), (1,), 1, 1))
    assert record["no_prediction"].startswith("no prediction") and record["rows"][0]["ttft"]["predicted_ratio"] is None
    assert record["rows"][0]["cache"]["dynamic"]["ratio"] == 1
    words = report.sentences(BenchRecord.model_validate(record))
    assert any(word.startswith("Fewer than three pairs of runs give no interval") for word in words)
    assert any(word.startswith("No prediction: ") for word in words)


def test_prediction_is_the_sum_of_its_terms():
    model, load = structure(tiny("llama")), Load(context=10, batch=2, new_tokens=3)
    rates = Rates(matrices=1e6, attention=2e6, weights=4e6, states=5e6, copies=8e6, operator=1e-3)
    matrices, attention = model.prefill_flops(2, 10)
    head, weights = model.head * BYTES / 4e6, model.weight_bytes() / 4e6
    hand = {
        "ttft": matrices / 1e6 + attention / 2e6 + head + 0.1,
        "tpot_dynamic": weights + model.state_bytes(2, 12) / 5e6 + model.copied_bytes(2, 12) / 8e6 + 0.1,
        "tpot_static": weights + model.state_bytes(2, 13) / 5e6 + 0.2,
    }
    found = predict(model, rates, load, {"dynamic": 100, "static": 200})
    assert {name: terms["seconds"] for name, terms in found.items()} == pytest.approx(hand)
    for name, terms in found.items():
        assert sum(terms.values()) - terms["seconds"] == pytest.approx(terms["seconds"]), name
    assert Rates(1, 1, 1, 1, 1, operator=1e-3).seconds(0.5, 100) == 0.6
    assert Rates(1, 1, 1, 1, 1, operator=1e-3, asynchronous=True).seconds(0.5, 100) == 0.5


def test_the_ratio_is_the_median_of_pairs():
    generator = random.Random(3)
    baseline = [generator.uniform(1, 2) for _ in range(9)]
    candidate = [b * generator.uniform(0.8, 1.0) for b in baseline]
    ratio, interval = paired_ratio(candidate, baseline)
    pairs = sorted(c / b for c, b in zip(candidate, baseline, strict=True))
    assert ratio == pytest.approx(statistics.median(pairs))
    assert interval == pytest.approx([pairs[1], pairs[-2]])
    assert paired_ratio([3, 1], [1, 1]) == (pytest.approx(math.sqrt(3)), None)
    assert paired_ratio([2.0] * 4, [1.0] * 4) == (2.0, [2.0, 2.0])


def coins(pairs):
    """How often the median is between the ends, over every way in which pairs fall above (1) or below (0) it."""
    ratios = [1.5] * pairs
    held = 0
    for sides in itertools.product((0, 1), repeat=pairs):
        _, interval = paired_ratio([r if side else 1 / r for r, side in zip(ratios, sides, strict=True)], [1.0] * pairs)
        assert interval is not None
        held += interval[0] <= 1 <= interval[1]
    return held / 2**pairs


def test_the_coverage_is_what_the_pairs_give():
    assert [coverage(n) for n in (3, 5)] == [0.75, 0.9375]
    assert coverage(1) == coverage(0) == 0
    for pairs in range(3, 13):
        assert coverage(pairs) == pytest.approx(coins(pairs)), pairs
        assert pairs < 6 or coverage(pairs) >= 0.95
    assert 0.95 <= coverage(40) < 0.97
    generator = np.random.default_rng(1)
    found = [paired_ratio([*np.exp(generator.normal(size=5) ** 3)], [1.0] * 5)[1] for _ in range(2000)]
    assert np.mean([low <= 1 <= high for low, high in found]) == pytest.approx(0.9375, abs=0.015)  # type: ignore[misc]


def test_nothing_is_faster_or_slower_without_an_interval_that_supports_it():
    intervals = ([0.8, 0.9], [1.1, 1.2], [0.9, 1.1], [0.9, 1.0], None)
    assert [verdict(x, 5) for x in intervals] == ["faster", "slower", "undecided", "undecided", "undecided"]
    assert {verdict(x, 4) for x in intervals} == {"undecided"}  # 87.5 %


def test_a_prediction_that_is_off_is_explained_by_what_was_seen():
    def side(quartiles, share):
        return {"quartiles": quartiles, "predicted": {"operators": share, "seconds": 1.0}}

    calm = {"candidate": side([1.0, 1.1], 0.1), "baseline": side([1.0, 1.1], 0.1)}
    assert explain("the ratio", 1.15, 1.0, calm, (0.5, "copies")) is None
    assert "no cause was seen" in str(explain("the ratio", 1.3, 1.0, calm, (0.1, "copies")))
    assert "rate of copies varied by 50%" in str(explain("the ratio", 0.7, 1.0, calm, (0.5, "copies")))
    noisy = {**calm, "baseline": side([1.0, 1.5], 0.9)}
    words = str(explain("the ratio", 0.7, 1.0, noisy, (0.1, "copies")))
    assert explain("the ratio", 0.7, 1.0, noisy, (0.1, "copies"))["off"] == pytest.approx(-0.3)
    assert "-30% off" in words and "baseline spread by 50%" in words and "90% of the baseline's prediction" in words
    base = Rates(1, 1, 1, 1, 1, 1)
    spread, name = unsteadiest([base, base, Rates(1, 1, 3, 1, 1, 1)])
    assert name == "weights" and spread == pytest.approx(1.0)


@torch.no_grad()
def test_a_static_cache_filled_by_copying_decodes_alike():
    for methods in ([], UNIATTN, [{"name": "svformer"}]):
        model, ids = build(config_of(methods)), tokens(length=12)
        cache = DynamicCache(config=model.config)
        model(ids[:, :11], past_key_values=cache, use_cache=True)
        static = static_copy(model, cache, Load(11, 2, 1))
        one = model(ids[:, 11:], past_key_values=static, use_cache=True).logits
        two = model(ids[:, 11:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
        assert cache_bytes(static) == cache_bytes(cache)


def test_allocated_bytes_are_the_plans(found):
    row, plan = found["rows"][0], config_of(UNIATTN).plan
    for kind in ("dynamic", "static"):
        assert row["cache"][kind]["ratio"] == plan.cached_fraction() == row["cache"][kind]["predicted_ratio"]
        assert row["cache"][kind]["baseline"] == 2 * 15 * 12 * STATE * BYTES
    assert row["reads"]["ratio"] == 1


def test_record_is_valid_and_says_what_it_holds(found, tmp_path):
    checked = BenchRecord.model_validate(json.loads(json.dumps(found, allow_nan=False)))
    row = found["rows"][0]
    for name in TIMES:
        for side in SIDES:
            low, high = row[name][side]["quartiles"]
            assert 0 < low <= row[name][side]["median"] <= high and row[name][side]["predicted"]["seconds"] > 0
        assert row[name]["interval"][0] <= row[name]["ratio"] <= row[name]["interval"][1]
        assert row[name]["verdict"] == "undecided"  # three pairs
    rate = row["tokens_per_second"]["static"]["baseline"]
    assert rate == pytest.approx(2 / row["tpot_static"]["baseline"]["median"])
    assert row["eager"]["interval"] is None and row["eager"]["baseline"]["median"] > 0
    words = report.sentences(checked)
    assert "0.833x of the baseline's bytes" in words[0] and "reads 1.00x" in words[0]
    assert any("median of 3 pairs of runs" in word and "covers 75 %: too little" in word for word in words)
    assert report.headline(checked)[0].keys() == {"context", "batch", "cache", *TIMES}
    page = report.write_bench(found, tmp_path / "out").read_text()
    assert "KV cache, static, allocated" in page and "<th>candidate ÷ baseline (75 %)</th>" in page
    assert "random tokens, 3 decoded" in page and "75 % intervals" in page
    assert {p.stem for p in (tmp_path / "out" / "figures").iterdir()} == {"ratios_batch_2", "prediction_batch_2"}


@pytest.fixture
def six(found):
    """Six settings with known times, of five pairs."""
    rows = []
    for context, batch in itertools.product((512, 2048, 8192), (1, 4)):
        row = json.loads(json.dumps({**found["rows"][0], "context": context, "batch": batch}))
        for name in TIMES:
            row[name] |= {"ratio": 1.25, "interval": [1.2, 1.3], "verdict": "slower", "notes": []}
        row["tpot_static"] |= {"ratio": 0.9 + batch / 100, "interval": [0.8, 1.1], "verdict": "undecided"}
        rows.append(row)
    rows[0]["ttft"] |= {"ratio": 0.5, "interval": [0.4, 0.6], "verdict": "faster"}
    for off in (0.3, -0.7):
        rows[1]["ttft"]["notes"].append({"off": off, "words": f"the ratio is {off} off"})
    settings = {**found["settings"], "repeats": 5}
    record = {**found, "rows": rows, "settings": settings, "interval_coverage": coverage(5)}
    return BenchRecord.model_validate(record)


def test_losses_are_said_as_plainly_as_gains_and_briefly(six):
    words = report.sentences(six)
    assert words[1] == (
        "Time to first token: faster at context × batch = 512 × 1 (0.500x of the baseline); slower at context × batch "
        "= 512 × 4, 2048 × 1, 2048 × 4, 8192 × 1, 8192 × 4 (1.250x of the baseline)."
    )
    assert words[2] == "Time per token, dynamic cache: slower in every setting (1.250x of the baseline)."
    assert words[3] == "Time per token, static cache: undecided in every setting (0.910x to 0.940x of the baseline)."
    off = "2 of 54 predictions are more than 20 % off; the farthest, time to first token at 512 × 4: the ratio is -0.7"
    assert f"{off} off." in words and len(words) <= 8
    table = next(row for row in report.table(six) if row[1] == "time to first token" and row[5].endswith("off)"))
    assert table[0] == "context 512, batch 4"
    assert [panel.y_range for panel in report.figures(six)][::2] == [report.figures(six)[0].y_range] * 2


def test_the_printed_table_has_a_row_a_setting_and_cuts_nothing(six, capsys):
    report.show(six)
    lines = capsys.readouterr().out.splitlines()
    assert "median of 5 pairs of runs" in lines[0] and not any("…" in line for line in lines)
    assert sum(line.count("(93.8 % interval)") for line in lines) == 3
    assert sum("(1.200-1.300)" in line for line in lines) == 6 and len({len(line) for line in lines[1:]}) == 1
    starts = [line.replace("│", " ").split()[:2] for line in lines if "0.833x" in line]
    assert starts == [[str(c), str(b)] for c in (512, 2048, 8192) for b in (1, 4)]


def test_sides_take_turns_and_the_order_alternates():
    models, calls = {"candidate": tiny("llama"), "baseline": tiny("llama")}, []
    for side, model in models.items():

        def note(_, args, kwargs, side=side):
            assert not torch.is_grad_enabled()
            calls.append((side, args[0].shape[1], type(kwargs.get("past_key_values")).__name__[:6]))

        model.register_forward_pre_hook(note, with_kwargs=True)
    done = []
    bench(models["candidate"], models["baseline"], Settings((9,), (1,), 2, 3), lambda *now: done.append(now))
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    prompts = [side for side, length, _ in calls if length == 9]
    one, two = ["baseline", "candidate"], ["candidate", "baseline"]
    assert prompts[:2] == two  # the warm-up
    assert prompts[2:] == [
        *one,
        *one,
        *two,
        *two,
        *one,
    ]  # the second pair of the first two: eager
    steps = [call[0] for call in calls[-8:]]
    assert steps == ["baseline", "baseline", "candidate", "candidate"] * 2
    assert [call[2] for call in calls[-8:]] == ["Dynami"] * 4 + ["Static"] * 4


def test_eager_and_what_is_too_large_are_skipped_with_a_word(monkeypatch):
    models = (tiny("llama"), tiny("llama"))
    need = 2 * 2 * 4 * 12**2 * 4
    monkeypatch.setattr(module, "free_memory", lambda device: 2 * need - 1)
    assert module.eager_skip(models[1], Load(12, 2, 1)) is not None
    monkeypatch.setattr(module, "free_memory", lambda device: 2 * need)
    assert module.eager_skip(models[1], Load(12, 2, 1)) is None
    monkeypatch.setattr(module, "free_memory", lambda device: 60_000)
    record = bench(*models, Settings((2, 60), (1,), 1, 1))
    assert [row["context"] for row in record["rows"]] == [2]
    assert record["rows"][0]["eager"].keys() != {"skipped"}
    assert record["skipped"][0]["context"] == 60 and "needs about" in record["skipped"][0]["reason"]
    words = report.sentences(BenchRecord.model_validate(record))
    assert any(word.startswith("context 60, batch 1: skipped, ") for word in words)
    monkeypatch.setattr(module, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="nothing was measured: context 60"):
        bench(*models, Settings((60,), (1,), 1, 1))
    monkeypatch.setattr(module, "free_memory", lambda device: None)  # a system that does not say: run
    assert len(bench(*models, Settings((60,), (1,), 1, 1))["rows"]) == 1


def test_the_attention_of_a_model_comes_back(monkeypatch):
    models = (tiny("llama", "eager"), tiny("llama"))
    seen = []
    config = models[0].config
    models[0].register_forward_pre_hook(lambda *_: seen.append(config._attn_implementation))
    bench(*models, Settings((4,), (1,), 1, 1))
    assert {"sdpa", "eager"} <= set(seen)
    assert [model.config._attn_implementation for model in models] == ["eager", "sdpa"]
    monkeypatch.setattr(module, "_structures", lambda models: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench(*models, Settings((4,), (1,), 1, 1))
    assert [model.config._attn_implementation for model in models] == ["eager", "sdpa"]


def test_windows_and_learned_positions():
    record = bench(tiny("mistral"), tiny("llama"), Settings((20,), (1,), 2, 1))
    assert record["rows"][0]["cache"]["static"]["candidate"] == 3 * 8 * 2 * STATE * BYTES
    assert record["rows"][0]["cache"]["static"]["ratio"] == record["rows"][0]["cache"]["static"]["predicted_ratio"]
    bench(tiny("llama"), tiny("llama"), Settings((64,), (1,), 2, 1))  # rotary: a few tokens further do no harm
    with pytest.raises(ValueError, match=r"context 63 \+ 2 new tokens is above the 64 positions of GPT2LMHeadModel"):
        bench(tiny("gpt2"), tiny("llama"), Settings((63,), (1,), 2, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contexts": (0,)}, "context is 0; it must be at least 1"),
        ({"contexts": ()}, "context is empty"),
        ({"batches": (1, -2)}, "batch is -2"),
        ({"new_tokens": 0}, "new-tokens is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"attention": "flex"}, "attention 'flex' is not measured; use sdpa or eager"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_models_that_are_refused():
    with pytest.raises(ValueError, match="BertModel is an encoder"):
        bench(tiny("llama"), tiny("bert"), SMALL)
    with pytest.raises(ValueError, match="context 65 is above the 64 positions of LlamaForCausalLM"):
        bench(tiny("llama"), tiny("llama"), Settings((65,), (1,), 1, 1))


def test_the_machine_answers():
    model = tiny("llama", dtype=torch.float32)
    rates = measure_rates(structure(model), Load(8, 1, 2), model, "sdpa")
    assert all(0 < value < math.inf for name, value in vars(rates).items() if name != "asynchronous")
    assert not rates.asynchronous and rates.operator < 1e-2
    assert operators(lambda: torch.ones(2) + 1) == 2  # ones, add
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 2**20
    with peak_memory(torch.device("cpu")) as peak:
        held = torch.ones(50 * 2**20 // 4)
        del held
    assert (peak.bytes is None) == (peak.reason is not None)
    assert peak.bytes is None or 45 * 2**20 < peak.bytes < 150 * 2**20


def saved(folder, model):
    """Save a tiny model with a tokenizer, so that the command line can load it."""
    load_model("minilm")[1].save_pretrained(folder)
    model.float().save_pretrained(folder)
    return folder


def test_the_command_line(monkeypatch, tmp_path, capsys):
    ours = saved(tmp_path / "ours", build(config_of([{"name": "cla", "group": 2}])))
    plain = saved(tmp_path / "plain", build(config_of([])))
    words = ["bench", ours, "--baseline", plain, "--context", "6,12", "--new-tokens", 2, "--repeats", 3]
    assert run(monkeypatch, *words, "--out", tmp_path / "out", "--device", "cpu") == 0
    captured = capsys.readouterr()
    last = json.loads(captured.out.strip().splitlines()[-1])
    assert (last["candidate"], last["baseline"]) == ("ours", "plain")
    assert [(row["context"], row["cache"]) for row in last["results"]] == [(6, 0.5), (12, 0.5)]
    assert "benchmarking: 8 of 8" in captured.err and "of the baseline" in captured.out
    assert last["interval_coverage"] == 0.75
    record = BenchRecord.model_validate_json((tmp_path / "out" / "record.json").read_text())
    assert record.settings["command"].startswith("crosslayer bench ours --baseline plain")
    assert str(tmp_path) not in (tmp_path / "out" / "record.json").read_text()
    assert "Bench of ours beside plain" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "512,x"], "--context is '512,x'; it takes whole numbers"),
        (["--batch", "0"], "--batch is '0'; it takes whole numbers of at least 1"),
        (["--context", ""], "--context is ''"),
        (["--new-tokens", "0"], "'--new-tokens': Input should be greater than or equal to 1"),
        (["--attention", "flash"], "attention 'flash' is not measured"),
        (["--context", "4"], "BertModel is an encoder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(monkeypatch, capsys, words, message):
    assert run(monkeypatch, "bench", "minilm", "--baseline", "minilm", *words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading")]
    assert len(lines) == 1 and lines[0].startswith("crosslayer: error: ") and message in lines[0]


def test_shape_is_what_the_hand_counts_assume():
    assert (SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_key_value_heads"]) == (32, 48, 2)
