"""Perplexity, KL and intervals against loops over tokens and windows."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from crosslayer.corpus.windows import Windows, split
from crosslayer.judge.damage import NO_TARGET, compare, logits_of, losses
from crosslayer.judge.report import Against
from crosslayer.judge.rows import NEW, WINDOW_QUANTITIES, window_rows
from crosslayer.probe.what_if import what_if
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.verbs.retrofit.convert import convert
from tests.helpers.daily import daily
from tests.helpers.losses import losses_of
from tests.helpers.text import tokenizer, words
from tests.helpers.tiny import tiny


def test_losses_are_what_a_loop_over_tokens_gives():
    one, two = tiny("llama"), tiny("llama", num_hidden_layers=2)
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    found = losses(logits_of(one), {"b": logits_of(two)}, Windows(ids, (0, 0, 1)))["b"]
    for window in range(3):
        with torch.no_grad():
            p, q = (m(ids[window : window + 1]).logits[0].softmax(-1) for m in (one, two))
        before = after = kl = changed = 0.0
        for t in range(8):
            token = int(ids[window, t + 1])
            before -= math.log(float(p[t, token]))
            after -= math.log(float(q[t, token]))
            kl += sum(float(a) * (math.log(float(a)) - math.log(float(b))) for a, b in zip(p[t], q[t], strict=True))
            changed += max(range(64), key=lambda v: p[t, v]) != max(range(64), key=lambda v: q[t, v])
        # 1e-5: log-softmax is taken in float32
        assert found.means["before"][window] == pytest.approx(before / 8, rel=1e-5)
        assert found.means["after"][window] == pytest.approx(after / 8, rel=1e-5)
        assert found.means["kl"][window] == pytest.approx(kl / 8, rel=1e-4)
        assert found.means["changed"][window] == changed / 8 > 0


def planted(gain, spread, count=64, documents=4, seed=0):
    generator = np.random.default_rng(seed)
    level = generator.normal(3, 1, count)  # windows differ far more than the change does
    change = gain + spread * generator.normal(size=count)
    return losses_of(level, level + change, np.abs(change), (i % documents for i in range(count)))


def change(found, quantity="KL", scope="all", **options):
    """The change of a quantity in the rows of losses."""
    rows = window_rows("small", found, **options)
    return next(row.change for row in rows if row.quantity == quantity and row.scope == scope)


def test_intervals_are_paired_and_cover():
    found = planted(0.1, 0.05)
    ratio = change(found, "perplexity")
    low, high = ratio.interval
    assert low < math.exp(0.1) < high and high - low < 0.05  # unpaired, the spread of 1 would give ± 0.25
    assert change(found).n == ratio.n == 64
    gap = change(planted(0.3, 0.05), other=found, against=Against.BEFORE)
    assert 0 < gap.low < gap.value < gap.high and gap.verdict == "higher"


@pytest.mark.parametrize("documents", daily([1, 4, 32, 64], 64))
def test_intervals_cover_however_many_windows_a_document_has(documents):
    """A document of one window must not make the interval a point: 120 draws of 95 %, at least 104 hits."""
    hits = 0
    for seed in range(120):
        low, high = change(planted(0.1, 0.05, documents=documents, seed=seed), "perplexity").interval
        hits += low < math.exp(0.1) < high
    assert hits >= 104  # 114 expected; fewer than 104 has a chance of 1e-4


def test_intervals_of_a_domain_of_sixteen_windows_cover():
    """Plain percentiles of so few cover 93 %: Student's t corrects that. 400 draws, 380 expected."""
    hits = 0
    for seed in range(400):
        low, high = change(planted(0.1, 0.05, count=16, documents=1, seed=seed), "perplexity").interval
        hits += low < math.exp(0.1) < high
    assert 374 <= hits <= 390  # a spread of 4.4; without Student's t 370


def test_rows_are_by_domain_and_predict_a_new_one():
    changes = {"books": 0.1, "web": 0.4, "code": 0.3}
    parts = [planted(gain, 0.02, count=16, documents=1, seed=seed) for seed, gain in enumerate(changes.values())]
    before, after, kl = (np.concatenate([part.means[key] for part in parts]) for key in ("before", "after", "kl"))
    domains = tuple(name for name in changes for _ in range(16))
    documents = tuple(map(list(changes).index, domains))
    with_fit = losses_of(before, after, kl, documents, domains)
    without = losses_of(before, after, kl + np.repeat([0.2, -0.2, 0.0], 16), documents, domains)
    rows = window_rows("small", with_fit, other=without, against=Against.UNFITTED)
    gains = {row.scope: row for row in rows if row.quantity == "KL"}
    assert [gains[name].change.value for name in changes] == pytest.approx([-0.2, 0.2, 0.0])
    assert [gains[name].verdict for name in ("books", "web")] == ["lower", "higher"] and NEW not in gains
    for name in changes:
        row = gains[name]
        assert row.value - row.original == pytest.approx(row.change.value) and row.against == Against.UNFITTED
    means = [change(with_fit, scope=name).value for name in changes]
    assert change(with_fit).n == 48 and change(with_fit, scope="code").n == 16
    half = stats.t.ppf(0.975, 2) * np.std(means, ddof=1) * math.sqrt(1 + 1 / 3)
    predicted = change(with_fit, scope=NEW)
    assert predicted.value == pytest.approx(np.mean(means)) and half > np.mean(means)
    assert predicted.interval == pytest.approx((0.0, np.mean(means) + half))  # no KL is below 0
    two = losses_of(before[:32], after[:32], kl[:32], documents[:32], domains[:32])
    assert change(two, scope=NEW).interval is None


def test_without_w_c_is_the_conversion_alone():
    """Against `what_if` on the original; the model with W_c is the same afterwards."""
    model, ids = tiny("llama", num_hidden_layers=4), torch.arange(3, 15)[None]
    converted = convert(model, {"name": "cla", "groups": [[2, 3]], "compensation": "attention"}, fit="zero")
    made = converted.model
    torch.nn.init.normal_(made.model.layers[3].compensation.weight)
    with torch.no_grad():
        before = made(ids).logits
        with converted.uncompensated(made):
            alone = made(ids).logits
        with what_if(model, made.config.plan):
            assert torch.allclose(alone, model(ids).logits, atol=1e-6)
        assert torch.equal(made(ids).logits, before) and not torch.allclose(before, alone, atol=1e-3)


def test_strata_are_documents():
    """Two documents of constant, different change: drawn within documents, the mean cannot move."""
    shift = np.array([0.0] * 20 + [1.0] * 20)
    documents = (0,) * 20 + (1,) * 20
    found = losses_of(np.zeros(40), shift, shift, documents)
    assert change(found, "perplexity").interval == pytest.approx((math.exp(0.5),) * 2)
    assert len(Bootstrap(documents).strata) == 2
    assert len(Bootstrap(planted(0.1, 0.05, count=32, documents=8).documents).strata) == 1  # of four windows each


@pytest.mark.parametrize("windows", [32, 400])
def test_of_a_single_stratum_the_interval_is_scipys(windows):
    """Percentiles of scipy's draws of n of n windows, spread by Student's t as ours are, and n − 1 for n."""
    values = np.random.default_rng(1).gamma(2.0, size=windows)
    low, high = Bootstrap((0,) * windows).mean(values).interval
    plain = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=2).confidence_interval
    spread = stats.t.ppf(0.975, windows - 1) / stats.norm.ppf(0.975) * (windows / (windows - 1)) ** 0.5
    expected = [values.mean() + spread * (end - values.mean()) for end in plain]
    assert [low, high] == pytest.approx(expected, abs=0.04 * (high - low))


def test_a_single_window_has_no_interval():
    found = planted(0.1, 0.1, count=1)
    assert change(found).interval is None and change(found, "perplexity").interval is None
    assert change(found).verdict is None and change(planted(0.1, 0.1, count=2)).interval is not None


def test_changed_tokens_are_a_share_that_differs_between_two_candidates():
    generator = np.random.default_rng(0)
    zeros, often, seldom = np.zeros(32), generator.uniform(0.1, 0.3, 32), generator.uniform(0, 1e-3, 32)
    often, seldom = (losses_of(zeros, zeros, zeros, (0,) * 32, changed=share) for share in (often, seldom))
    low, high = change(often, "changed tokens").interval
    assert 0.1 < low < often.means["changed"].mean() < high < 0.3
    assert change(seldom, "changed tokens").low >= 0
    row = next(row for row in window_rows("a", often, other=seldom) if row.quantity == "changed tokens")
    assert row.unit == "share" and row.verdict == "higher" and row.is_better is False
    assert row.change.value == pytest.approx((often.means["changed"] - seldom.means["changed"]).mean())


def test_parts_of_a_text_are_disjoint():
    documents = [words(start, start + 160) for start in (0, 160, 320)]
    parts = split(documents, tokenizer(), parts={"evaluation": 4, "calibration": 6}, length=10, seed=3)
    assert [len(parts[name]) for name in ("evaluation", "calibration")] == [4, 6]
    seen = torch.cat([part.ids for part in parts.values()]).flatten().tolist()
    assert len(seen) == len(set(seen)) == 100  # each word occurs once in the text
    for part in parts.values():
        for ids, document in zip(part.ids, part.documents, strict=True):
            first = tokenizer()(documents[document]).input_ids
            assert ids[0] in first and ids[-1] in first
    again = split(documents, tokenizer(), parts={"evaluation": 4, "calibration": 6}, length=10, seed=3)
    assert torch.equal(again["evaluation"].ids, parts["evaluation"].ids)
    with pytest.raises(ValueError, match=r"\d+.*10 tokens.*900.*\(900.*all\)"):
        split(documents, tokenizer(), parts={"all": 900}, length=10)


def test_short_documents_are_joined():
    parts = split([words(8 * i, 8 * i + 8) for i in range(60)], tokenizer(), parts={"all": 8}, length=50)
    assert set(parts["all"].documents) == {-1}


def test_vocabularies_of_different_sizes_are_compared_over_their_common_tokens():
    """As Qwen2.5 pads its matrices: 151,936 rows and 152,064."""
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(300, size, generator=generator) for size in (40, 33))
    ids = torch.randint(0, 33, (300,), generator=generator)
    for before, after in ((large, small), (small, large)):
        found = compare(before[:-1].log_softmax(-1), after[:-1], ids[1:])
        own, other = (logits[:-1, :33].log_softmax(-1) for logits in (before, after))
        kl = (own.exp() * (own - other)).sum(-1).mean()
        losses = [-one[torch.arange(299), ids[1:]].mean() for one in (own, other)]
        changed = (own.argmax(-1) != other.argmax(-1)).float().mean()
        expected = dict(zip(("before", "after", "kl", "changed"), map(float, (*losses, kl, changed)), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_token_without_a_known_next_one_counts_for_all_but_the_losses():
    generator = torch.Generator().manual_seed(1)
    before, after = (torch.randn(200, 12, generator=generator) for _ in range(2))
    targets = torch.randint(0, 12, (200,), generator=generator)
    whole, fewer = compare(before.log_softmax(-1), after, targets), targets.clone()
    fewer[-1] = NO_TARGET
    found, known = (
        compare(before.log_softmax(-1), after, fewer),
        compare(before[:-1].log_softmax(-1), after[:-1], targets[:-1]),
    )
    assert found["kl"] == whole["kl"] and found["changed"] == whole["changed"]
    assert [found[name] for name in ("before", "after")] == pytest.approx([known["before"], known["after"]])
    assert list(WINDOW_QUANTITIES) == ["KL", "perplexity", "changed tokens"]
