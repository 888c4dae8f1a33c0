"""Candidates of every kind are judged against naive loops; one that fails keeps its row, and the others theirs."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import crosslayer
from crosslayer.cache.kv_cache import held_bytes
from crosslayer.cache.running import smaller_cache
from crosslayer.cli.command import print_table
from crosslayer.core.transformers_versions import CACHE
from crosslayer.judge.candidate import read_candidates
from crosslayer.judge.rows import retrieval_rows, window_rows
from crosslayer.testing.tiny import tokens
from tests.helpers.tiny import tiny
from tests.verbs.needles.oracle import TOKENIZER, random_model

TEXT = {"a": tokens(20, 20, 0), "b": tokens(20, 20, 1), "c": tokens(20, 20, 2)}
SAMPLES = [SimpleNamespace(length=512)] * 20  # of which only the length matters to a row
OPTIONS = {"text": TEXT, "windows": 48, "length": 20, "context": 24, "repeats": 5}


class Coarse(DynamicCache):
    """Rounds values to eighths."""

    def __init__(self, config=None):
        super().__init__(config=config)

    def update(self, keys, values, *args, **options):
        return super().update(keys, (8 * values).round() / 8, *args, **options)


class Growing(Coarse):
    """Holds more than it needs."""

    def __init__(self, config=None):
        super().__init__(config)
        self.extra = [torch.zeros(10_000, dtype=torch.float16)]


@contextmanager
def louder(model):
    """Scales the output of the last MLP, without a cache of its own."""
    hook = model.model.layers[-1].mlp.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    yield
    hook.remove()


@contextmanager
def broken(model):
    raise RuntimeError("this one cannot run")
    yield


def nan(model):
    """Gives logits that are no numbers."""

    @contextmanager
    def around():
        hook = model.lm_head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        yield
        hook.remove()

    return around()


@pytest.fixture(scope="module")
def model():
    return tiny("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def measured(model):
    given = {
        "int8": "int8",
        "h2o": "h2o:0.5",
        "coarse": Coarse,
        "louder": louder,
        "plan": replace(crosslayer.DepthPlan.identity(4), keys=(0, 1, 2, 2), values=(0, 1, 2, 2)),
        "growing": Growing,
        "model": tiny("llama", num_hidden_layers=3),
        "broken": broken,
        "nan": nan,
        "vocabulary": tiny("llama", num_hidden_layers=4, vocab_size=400),
    }
    return crosslayer.measure(model, candidates=given, only=("bytes", "kl", "time"), **OPTIONS)


def naive_kl(model, windows, run):
    """KL to the original of each window's tokens but the last, by a loop over tokens."""
    found = []
    for window in windows:
        with torch.no_grad():
            before = model(window[None]).logits[0].float().log_softmax(-1)
            after = run(window[None])[0].float().log_softmax(-1)
        found.append(np.mean([float((before[t].exp() * (before[t] - after[t])).sum()) for t in range(len(window) - 1)]))
    return float(np.mean(found))


def token_by_token(model, new_cache):
    def run(window):
        cache = new_cache()
        return torch.cat([model(window[:, t : t + 1], **{CACHE: cache}).logits for t in range(window.shape[1])], 1)

    return run


def test_kl_is_that_of_a_loop(model, measured):
    windows = torch.cat([rows[:16] for rows in TEXT.values()])
    coarse = naive_kl(model, windows, token_by_token(model, lambda: Coarse(model.config)))
    assert measured.row("coarse", "KL").value == pytest.approx(coarse, rel=1e-4)


@pytest.mark.slow
def test_kl_of_quantized_tokens_is_that_of_a_loop(model, measured):
    windows = torch.cat([rows[:16] for rows in TEXT.values()])
    with smaller_cache(model, bits="8") as new_cache:
        run = token_by_token(model, new_cache)
        quantized = iter([run(window[None]) for window in windows])
    int8 = naive_kl(model, windows, lambda _: next(quantized))
    assert measured.row("int8", "KL").value == pytest.approx(int8, rel=1e-3)


def test_the_seed_is_that_of_the_bootstrap(model):
    """Other windows are drawn with another seed, too, so the judge's losses are kept and estimated again."""
    kept = {}

    def keep(name, found, seed):
        kept[name] = window_rows(name, found, 0), window_rows(name, found, seed)
        return kept[name][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosslayer.judge.judge.window_rows", keep)
        report = crosslayer.measure(model, candidates=["fp8"], text=TEXT, windows=48, length=20, only=("kl",), seed=5)
    unseeded, own = kept["fp8"]
    assert list(report.rows) == own and own[0].change != unseeded[0].change


def test_bytes_are_those_of_tensors(model, measured):
    whole = 2 * 2 * 8 * 40 * 4 * 2  # keys and values, two heads of 8, 24 + 16 tokens, 4 layers, 16 bits
    assert measured.row("coarse", "bytes").original == pytest.approx(whole, rel=0.4)  # allocated in blocks
    assert measured.row("growing", "bytes").value == measured.row("coarse", "bytes").value + 20_000
    assert measured.row("growing", "bytes").change.value > 1
    with torch.no_grad(), smaller_cache(model, "h2o:0.5") as new_cache:
        cache = new_cache()
        model(tokens(1, 24, 5), **{CACHE: cache})
        for token in tokens(1, 16, 6).split(1, dim=1):
            model(token, **{CACHE: cache})
    assert measured.row("h2o", "bytes").value == held_bytes(cache).sixteen
    assert any("Not smaller" in line and "growing" in line for line in measured.sentences())


def test_what_fails_keeps_its_row(measured):
    failed = {one.name: one.failed for one in measured.candidates if one.failed}
    assert set(failed) == {"broken", "nan"} and measured.exit_status == 1
    common = {one.name: one.details.get("common_tokens") for one in measured.candidates}
    assert common["vocabulary"] and not common["coarse"]  # of vocabularies that differ in size
    assert any("vocabular" in line for line in measured.sentences())
    assert failed["broken"] == "RuntimeError: this one cannot run" and "NaN" in failed["nan"]
    assert {row.candidate for row in measured.rows}.isdisjoint(failed)
    lines = {(line[0], line[1]): line[2] for line in measured.tables()[0][2]}
    assert lines["broken", "failed"] == failed["broken"] and lines["nan", "failed"] == failed["nan"]


def test_what_is_printed_fits_into_a_terminal(measured, capsys):
    (table,) = measured.tables()
    print_table(*table)
    lines = [line for line in capsys.readouterr().out.splitlines() if "cannot run" not in line]
    assert max(map(len, lines)) <= 80 and sum("int8" in line for line in lines) == 1


def test_a_candidate_that_lost_hidden_numbers_is_not_recommended(measured):
    best = measured.least()
    assert best is not None
    found = retrieval_rows(best, SAMPLES, [True] * 18 + [False] * 2, [True] * 19 + [False])[0]
    report = measured.model_copy(update={"rows": (*measured.rows, found)})
    assert report.least() is None  # no other is within the KL
    assert not any(f": {best}," in line for line in report.sentences())
    assert any(line.startswith(f"{best} lost hidden numbers") for line in report.sentences())
    same = retrieval_rows(best, SAMPLES, [True] * 19 + [False], [True] * 19 + [False])[0]
    assert measured.model_copy(update={"rows": (*measured.rows, same)}).least() == best


def test_rows_come_back(measured, tmp_path):
    measured.save(tmp_path / "out")
    assert crosslayer.load_result(tmp_path / "out") == measured
    columns = measured.frame()
    assert {len(column) for column in columns.values()} == {len(measured.rows)}
    row = measured.rows[0]
    assert columns["change_value"][0] == row.change.value and columns["quantity"][0] == row.quantity


def test_the_new_domain_is_a_prediction_over_domain_means(measured):
    means = [measured.row("coarse", "KL", name).value for name in TEXT]
    found = measured.row("coarse", "KL", "a new domain").change
    half = 4.302653 * np.std(means, ddof=1) * np.sqrt(4 / 3)  # t(0.975, 2)
    assert (found.low, found.high) == pytest.approx((np.mean(means) - half, np.mean(means) + half), rel=1e-5)


def test_numbers_are_hidden_in_three_phrasings():
    model = random_model(torch.float32)
    found = crosslayer.measure(
        model, TOKENIZER, candidates=["int8"], only=["needles"], lengths=[512], samples=1, windows=16, length=8,
        text=torch.arange(16 * 8).view(16, 8) + 5,
    )  # fmt: skip
    assert found.row("int8", "retrieval").original == 0 and found.row("int8", "retrieval", "512 tokens").change.n == 5


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["int5"], "a candidate must be a model .*int8, int4, .* h2o:0.5.*got 'int5'"),
        (["9"], "KV bits '9'"),
        (["h2o:1.5"], "the evicted share must be"),
        ([], "`candidates` is empty; name at least one"),
        (["int4", "int4"], "two candidates are named 'int4'"),
        ([3], "a candidate must be .* got int"),
    ],
)
def test_what_is_no_candidate_is_refused_in_one_line(given, text):
    with pytest.raises(ValueError, match=text) as refused:
        read_candidates(given)
    assert "\n" not in str(refused.value)


def test_options_are_refused(model):
    with pytest.raises(ValueError, match="`windows`.*48"):
        crosslayer.measure(model, **{**OPTIONS, "windows": 47}, only=["kl"])
    with pytest.raises(ValueError, match="`context`.*48"):
        crosslayer.measure(model, **{**OPTIONS, "context": 60}, only=["bytes"])
    with pytest.raises(ValueError, match="tokenizer="):
        crosslayer.measure(model, **OPTIONS)
