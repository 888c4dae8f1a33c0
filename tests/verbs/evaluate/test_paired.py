"""Paired statistics against naive computations, and in simulations of models that are alike or not."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from crosslayer.judge.tasks import summary as paired
from crosslayer.judge.tasks.summary import check_same, items_of
from crosslayer.stats.differences import share_difference


def naive_t(differences):
    mean = sum(differences) / len(differences)
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (len(differences) - 1))
    half = stats.t.ppf(0.975, len(differences) - 1) * spread / math.sqrt(len(differences))
    return mean, (mean - half, mean + half)


def naive_table(x, y):
    """Agresti and Min's interval, as the Wald interval of the 2 × 2 table with half an item more in each cell."""
    cells = {(a, b): 0.5 + sum((p, q) == (a, b) for p, q in zip(x, y, strict=True)) for a in (0, 1) for b in (0, 1)}
    total = sum(cells.values())
    first, second = cells[1, 0] / total, cells[0, 1] / total
    half = 1.959964 * math.sqrt((first + second - (first - second) ** 2) / total)
    return first - second - half, first - second + half


def test_the_interval_of_shares_is_that_of_the_table():
    draw = np.random.default_rng(0)
    x, y = (draw.random(200) < 0.6).astype(float), (draw.random(200) < 0.5).astype(float)
    found = paired.compare_shares(x, y)
    assert found.change.value == pytest.approx(x.mean() - y.mean())
    assert found.change.interval == pytest.approx(naive_table(x, y))
    assert found.change.interval == pytest.approx(naive_t((x - y).tolist())[1], abs=5e-3)
    both = sum(a > b for a, b in zip(x, y, strict=True)), sum(a < b for a, b in zip(x, y, strict=True))
    assert (found.counts["only_candidate"], found.counts["only_original"]) == both
    equal = paired.compare_shares(x, x)
    assert equal.change.interval == pytest.approx(naive_table(x, x)) and equal.change.interval[1] > 0.009


def test_means_have_the_naive_paired_interval():
    draw = np.random.default_rng(6)
    x, y = draw.normal(0.2, 1, 50), draw.normal(0, 1, 50)
    found = paired.weighted_mean(x - y, np.ones(50))[0]
    estimate, interval = naive_t((x - y).tolist())
    assert found.value == pytest.approx(estimate) and found.interval == pytest.approx(interval)
    assert found.p == pytest.approx(stats.ttest_rel(x, y).pvalue)


@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (3, 0), (7, 2), (5, 5), (1, 12)])
def test_mcnemar_is_a_fair_coin_counted_out(ours, theirs):
    count = ours + theirs
    heads = [sum(toss) for toss in itertools.product((0, 1), repeat=count)]
    extreme = sum(abs(head - count / 2) >= abs(ours - count / 2) - 1e-9 for head in heads)
    assert share_difference(ours, theirs, 20).p == pytest.approx(extreme / 2**count)


def test_three_items_all_one_way_are_no_win():
    """The interval alone would say so; McNemar's test does not."""
    x, y = np.zeros(100), np.zeros(100)
    x[:5] = 1
    found = paired.compare_shares(x, y)
    assert found.change.interval[0] > 0 and found.change.p > 0.05 and found.change.verdict == "no difference seen"
    x[:10] = 1
    assert paired.compare_shares(x, y).change.verdict == "higher"
    assert paired.compare_shares(y, x).change.verdict == "lower"


def test_a_perplexity_is_compared_on_the_scale_of_its_logarithm():
    draw = np.random.default_rng(1)
    weights = draw.integers(10, 200, 60).astype(float)
    y = -weights * draw.normal(3, 0.3, 60)
    x = y - weights * 0.05  # 5 % worse, each item alike
    found = paired.compare_perplexities(x, y, weights)
    ratio = math.exp(-x.sum() / weights.sum()) / math.exp(-y.sum() / weights.sum())
    assert found.change.value == pytest.approx(ratio) == pytest.approx(math.exp(0.05))
    assert found.change.interval == pytest.approx((ratio, ratio)) and found.change.verdict == "higher"
    equal = np.ones(60)
    found = paired.compare_perplexities(x, y, equal)
    estimate, interval = naive_t([b - a for a, b in zip(x, y, strict=True)])
    assert math.log(found.change.value) == pytest.approx(estimate)
    assert [math.log(end) for end in found.change.interval] == pytest.approx(interval)


def test_a_group_adds_up_the_variances_of_its_tasks():
    draw = np.random.default_rng(2)
    tasks = [draw.choice([-1.0, 0.0, 1.0], size, p=[0.1, 0.8, 0.1]) for size in (400, 3000, 900)]
    found = paired.compare_groups(tasks, np.ones(3))
    error = math.sqrt(sum(np.var(task, ddof=1) / len(task) for task in tasks)) / 3
    assert found.value == pytest.approx(sum(task.mean() for task in tasks) / 3)
    assert (found.interval[1] - found.interval[0]) / 2 == pytest.approx(1.96 * error, rel=0.02)
    two = np.ones(2)
    assert paired.compare_groups([np.ones(50), np.ones(50)], two).verdict == "higher"
    assert paired.compare_groups([-np.ones(50), np.ones(50)], two).verdict == "no difference seen"
    by_items = paired.compare_groups(tasks, np.array([400.0, 3000.0, 900.0]))
    whole = np.concatenate(tasks)
    assert by_items.value == pytest.approx(whole.mean())
    half = 1.96 * whole.std() / 4300**0.5
    assert (by_items.high - by_items.low) / 2 == pytest.approx(half, rel=0.02)


def test_an_interval_of_shares_stays_among_shares():
    assert paired.compare_shares(np.ones(1), np.zeros(1)).change.interval[1] == 1.0
    assert paired.compare_shares(np.zeros(1), np.ones(1)).change.interval[0] == -1.0


def answers(draw, items, discordance, difference):
    """Right and wrong answers of two models, whose shares differ by `difference`."""
    kind = draw.random(items)
    ours, theirs = (discordance + difference) / 2, (discordance - difference) / 2
    both = (draw.random(items) < 0.6).astype(float)
    x = np.where(kind < ours, 1.0, np.where(kind < ours + theirs, 0.0, both))
    return x, np.where(kind < ours, 0.0, np.where(kind < ours + theirs, 1.0, both))


def test_intervals_hold_the_truth_in_19_of_20_cases_and_equal_models_seldom_differ():
    draw = np.random.default_rng(3)
    held, seen = 0, 0
    for _ in range(2000):
        held += (found := paired.compare_shares(*answers(draw, 500, 0.15, 0.03)).change).low <= 0.03
        held -= found.high < 0.03
        seen += paired.compare_shares(*answers(draw, 500, 0.15, 0.0)).change.verdict != "no difference seen"
    assert 0.935 < held / 2000 < 0.965
    assert seen / 2000 < 0.06


def test_a_difference_of_one_standard_error_is_no_win():
    draw = np.random.default_rng(4)
    error = math.sqrt(0.15 / 2376)  # of ARC-Easy's size: 0.8 points
    wins = [paired.compare_shares(*answers(draw, 2376, 0.15, error)).change.verdict for _ in range(1000)]
    assert wins.count("higher") / 1000 < 0.25  # 16 % are chance and a power of 17 %
    x, y = np.zeros(2376), np.zeros(2376)
    x[:188], y[188:356] = 1, 1  # 188 against 168: 0.8 points
    assert paired.compare_shares(x, y).change.verdict == "no difference seen"


def test_so_many_items_are_needed_as_a_simulation_needs():
    draw = np.random.default_rng(5)
    needed = paired.items_for_shares(0.1)
    assert needed == pytest.approx(7850, abs=20)
    seen = [paired.compare_shares(*answers(draw, needed, 0.1, 0.01)).change.verdict == "higher" for _ in range(600)]
    assert 0.75 < np.mean(seen) < 0.85
    assert paired.items_for_shares(0.0) == paired.items_for_shares(0.01)
    perplexities = paired.compare_perplexities(*(draw.normal(0, 1, 50) for _ in range(2)), np.ones(50))
    assert perplexities.counts["items_for_a_point"] > 50


@pytest.mark.parametrize("count", [1, 2])
def test_few_items_give_no_interval_of_a_mean_and_a_wide_one_of_a_share(count):
    ones, zeros = np.ones(count), np.zeros(count)
    found = [paired.weighted_mean(ones - zeros, ones)[0], paired.compare_perplexities(ones, zeros, ones).change]
    assert all(change.interval is None and change.p is None for change in found)
    found.append(paired.compare_shares(ones, zeros).change)
    assert found[-1].low < 0
    assert [change.verdict for change in found] == [None, None, "no difference seen"]


def test_items_are_what_gives_the_reported_score():
    def samples(values):
        return [{"acc": value} for value in values]

    assert items_of(samples([1, 0, 1.0, True]), "acc", 0.75).kind == "share"
    assert items_of(samples([0.5, 0.25]), "acc", 0.375).kind == "mean"
    assert items_of(samples([-2.0, -4.0]), "acc", math.exp(3)).kind == "perplexity"
    words = items_of(samples([(-20.0, 10), (-40.0, 5)]), "acc", math.exp(4))
    assert words.kind == "perplexity" and words.weights.tolist() == [10, 5]
    bits = items_of(samples([(-20.0, 10), (-40.0, 5)]), "acc", 4 / math.log(2))
    assert bits.kind == "mean" and bits.values.sum() / bits.weights.sum() == pytest.approx(4 / math.log(2))
    for values, reported in (([1, 0], 0.3), (["a"], 1.0), ([], 0.0), ([(1, 2, 3)], 1.0), ([math.nan], 0.5)):
        assert items_of(samples(values), "acc", reported) is None


def test_other_documents_are_not_paired():
    sample = {"doc_id": 0, "doc_hash": "a", "prompt_hash": "b"}
    check_same([sample], [dict(sample)], "arc_easy")
    for name in sample:
        with pytest.raises(ValueError, match=f"arc_easy: .* different {name},"):
            check_same([sample], [sample | {name: "other"}], "arc_easy")
