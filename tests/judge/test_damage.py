"""Perplexity, KL and intervals against loops over tokens and windows."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from crosslayer.corpus.windows import Windows, split
from crosslayer.judge.damage import (
    Damage,
    DomainDamage,
    Gain,
    Losses,
    by_domain,
    compare,
    damage,
    difference,
    logits_of,
    losses,
)
from crosslayer.judge.rows import damage_rows, kl_rows
from crosslayer.probe.what_if import what_if
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.estimate import Estimate
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.page import gain_sentence, sampling
from tests.helpers.daily import daily
from tests.helpers.text import tokenizer, words
from tests.helpers.tiny import tiny


def test_losses_are_what_a_loop_over_tokens_gives():
    one, two = tiny("llama"), tiny("llama", num_hidden_layers=2)
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    found = losses(logits_of(one), {"b": logits_of(two)}, Windows(ids, (0, 0, 1)))["b"]
    for window in range(3):
        with torch.no_grad():
            p, q = (m(ids[window : window + 1]).logits[0].softmax(-1) for m in (one, two))
        before = after = kl = 0.0
        for t in range(8):
            token = int(ids[window, t + 1])
            before -= math.log(float(p[t, token]))
            after -= math.log(float(q[t, token]))
            kl += sum(float(a) * (math.log(float(a)) - math.log(float(b))) for a, b in zip(p[t], q[t], strict=True))
        # 1e-5: log-softmax is taken in float32
        assert found.before[window] == pytest.approx(before / 8, rel=1e-5)
        assert found.after[window] == pytest.approx(after / 8, rel=1e-5)
        assert found.kl[window] == pytest.approx(kl / 8, rel=1e-4)


def planted(gain, spread, count=64, documents=4, seed=0):
    generator = np.random.default_rng(seed)
    level = generator.normal(3, 1, count)  # windows differ far more than the change does
    change = gain + spread * generator.normal(size=count)
    return Losses(level, level + change, np.abs(change), tuple(i % documents for i in range(count)))


def test_intervals_are_paired_and_cover():
    found = damage(planted(0.1, 0.05))
    low, high = found.ratio.interval
    assert low < math.exp(0.1) < high and high - low < 0.05  # unpaired, the spread of 1 would give ± 0.25
    assert (found.kl.n, found.ratio.n, found.documents) == (64, 64, 4)
    gap = difference(planted(0.3, 0.05), planted(0.1, 0.05))
    assert 0 < gap.low < gap.value < gap.high and gap.verdict == "higher"


@pytest.mark.parametrize("documents", daily([1, 4, 32, 64], 64))
def test_intervals_cover_however_many_windows_a_document_has(documents):
    """A document of one window must not make the interval a point: 120 draws of 95 %, at least 104 hits."""
    hits = 0
    for seed in range(120):
        low, high = damage(planted(0.1, 0.05, documents=documents, seed=seed)).ratio.interval
        hits += low < math.exp(0.1) < high
    assert hits >= 104  # 114 expected; fewer than 104 has a chance of 1e-4


def test_intervals_of_a_domain_of_sixteen_windows_cover():
    """Plain percentiles of so few cover 93 %: Student's t corrects that. 400 draws, 380 expected."""
    hits = 0
    for seed in range(400):
        low, high = damage(planted(0.1, 0.05, count=16, documents=1, seed=seed)).ratio.interval
        hits += low < math.exp(0.1) < high
    assert 374 <= hits <= 390  # a spread of 4.4; without Student's t 370


def test_the_worst_unseen_domain_comes_first():
    changes = {"books": 0.1, "web": 0.4, "code": 0.3}
    parts = [planted(gain, 0.02, count=16, documents=1, seed=seed) for seed, gain in enumerate(changes.values())]
    joined = [np.concatenate([getattr(part, key) for part in parts]) for key in ("before", "after", "kl")]
    domains = tuple(name for name in changes for _ in range(16))
    after = Losses(*joined, tuple(map(list(changes).index, domains)), domains)
    without = Losses(joined[0], joined[1], joined[2] + np.repeat([0.2, -0.2, 0.0], 16), after.documents, domains)
    measured = by_domain(after, without, frozenset(["books", "web"]))
    code, web, books = measured.domains
    assert [domain.name for domain in measured.domains] == ["code", "web", "books"]
    assert [domain.gain.kl.value for domain in measured.domains] == pytest.approx([0.0, 0.2, -0.2])
    assert (books.gain.kl.verdict, web.gain.kl.verdict) == ("lower", "higher")
    assert measured.all.kl.n == 48 and code.kl.n == 16
    means = [domain.kl.value for domain in measured.domains]
    half = stats.t.ppf(0.975, 2) * np.std(means, ddof=1) * math.sqrt(1 + 1 / 3)
    assert measured.new_domain.value == pytest.approx(np.mean(means)) and half > np.mean(means)
    assert measured.new_domain.interval == pytest.approx((0.0, np.mean(means) + half))  # no KL is below 0
    two = Losses(*(column[:32] for column in joined), after.documents[:32], domains[:32])
    assert by_domain(two, None, frozenset()).new_domain is None
    assert all(domain.gain is None for domain in by_domain(after, None, frozenset()).domains)


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
    change = np.array([0.0] * 20 + [1.0] * 20)
    found = damage(Losses(np.zeros(40), change, change, (0,) * 20 + (1,) * 20))
    assert found.ratio.interval == pytest.approx((math.exp(0.5),) * 2) and found.strata == 2
    assert damage(planted(0.1, 0.05, count=32, documents=8)).strata == 1  # of four windows each


def domain_of(name, strata, kl=0.3, gain=None):
    """The damage on a domain of which only these figures matter."""
    over = {"n": 16, "over": "windows", "how": "bootstrap"}
    figures = {"perplexity_before": 2.0, "perplexity_after": 3.0, "documents": 4, "strata": strata}
    figures |= {"ratio": Estimate(value=1.5, low=1.4, high=1.6, none=1, **over), "kl": Estimate(value=kl, **over)}
    if gain is not None:
        without, (low, high) = gain
        damage = Damage(**figures | {"kl": Estimate(value=without, **over)})
        gain = Gain(without=damage, kl=Estimate(value=kl - without, low=low, high=high, **over))
    return DomainDamage(**figures, name=name, seen=False, gain=gain)


def test_sentences_say_how_windows_were_resampled_and_what_w_c_raises():
    single, several = domain_of("a", 1), domain_of("b", 2)
    independent, within = sampling([single]), sampling([several])
    assert "independent" in independent and "within documents" in within and "independent" not in within
    assert sampling([single, several]).startswith(within) and "(a: " in sampling([single, several])
    raised = domain_of("a", 1, 0.3, gain=(0.2, (0.05, 0.15)))
    sentence = gain_sentence([raised], "layerwise")
    assert "(0.200" in sentence and "lowers" not in sentence


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
    found = damage(planted(0.1, 0.1, count=1))
    assert found.kl.interval is None and found.ratio.interval is None and found.kl.verdict is None
    assert damage(planted(0.1, 0.1, count=2)).kl.interval is not None


@pytest.mark.parametrize("seed", [0, 5])
def test_all_reports_give_the_same_estimate_of_the_same_losses(seed):
    """What retrofit and heal (`damage`, `by_domain`), measure (`kl_rows`) and fit-codec (`damage_rows`) record."""
    noise = np.random.default_rng(0).normal(0, 1e-7, 24)  # a KL of nearly 0, whose interval would reach below
    before = np.random.default_rng(1).normal(3, 0.3, 24)
    documents = tuple(np.repeat([0, 1, 2], 8).tolist())
    found = Losses(before, before + noise, np.abs(noise) - 2e-8, documents, ("books",) * 12 + ("web",) * 12)
    rows = {(row.quantity, row.scope): row.change for row in kl_rows("small", found, seed)}
    stored = {row.scope: row.change for row in damage_rows("small", found.kl, found.domains, documents, seed)}
    domains = by_domain(found, None, frozenset(), seed)
    for scope, own in [("all", domains.all), *((row.name, row) for row in domains.domains)]:
        assert own.kl == rows["KL", scope] == stored[scope] and own.ratio == rows["perplexity", scope]
    assert domains.all == damage(found, seed)
    other = {(row.quantity, row.scope): row.change for row in kl_rows("small", found, seed + 1)}
    assert other["KL", "all"] != rows["KL", "all"]  # the seed is that of the bootstrap


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
        found = compare(before.log_softmax(-1), after, ids)
        own, other = (logits[:-1, :33].log_softmax(-1) for logits in (before, after))
        kl = (own.exp() * (own - other)).sum(-1).mean()
        losses = [-one[torch.arange(299), ids[1:]].mean() for one in (own, other)]
        assert found == pytest.approx((*map(float, losses), float(kl)), rel=1e-5)
