"""The search for choosers: its greedy search, and the verb on a tiny model."""

import itertools
import math

import pytest
import torch

import crosslayer
from crosslayer.core.choice import TokenChoice
from crosslayer.core.plan import TokenCount
from crosslayer.output.formatting import ranges
from crosslayer.probe.intercept import visited
from crosslayer.probe.maps import choice_sums
from crosslayer.verbs.retrofit import greedy
from crosslayer.verbs.retrofit.choosers import (
    ALL,
    OWN,
    READER,
    KindSearch,
    affordable,
    evenly,
    groups_of,
    matched_heads,
    reads_of,
)
from tests.helpers.tiny import tiny, tokens


def test_the_greedy_search_meets_its_budget():
    """With costs that add up, it takes the cheapest moves; a layer with its own choice may become a reader later."""
    own, reader = [9.0, 0.1, 0.2, 5.0, 0.3, 0.1], [9.0, 0.2, 0.5, 9.0, 0.4, 0.2]

    def measure(kinds):
        return sum({ALL: 0, OWN: own[i], READER: reader[i]}[kind] for i, kind in enumerate(kinds))

    search = KindSearch(measure, 6, 0.1)
    kinds = search.run(reads=0.5)
    assert kinds == (ALL, READER, OWN, ALL, READER, READER)
    assert search.curve[-1][1] == pytest.approx(measure(kinds))
    assert reads_of(search.curve[-2][0], 0.1) > 0.5 >= reads_of(kinds, 0.1)
    within = KindSearch(measure, 6, 0.1).run(kl=0.6)
    assert measure(within) <= 0.6 and within.count(ALL) < 6


def test_a_budget_of_reads_is_met_when_passes_run_out(monkeypatch):
    """The first costs are used then; a search within a KL ends instead, with what it has measured."""
    monkeypatch.setattr(greedy, "PASSES", 14)

    def measure(kinds):
        return 0.1 * sum(kind != ALL for kind in kinds) ** 2

    search = KindSearch(measure, 6, 0.1)
    kinds = search.run(reads=0.3)
    assert reads_of(kinds, 0.1) <= 0.3 and search.curve[-1][0] == kinds and search.passes == 15
    assert len(search.curve) > 2 and all(kl == pytest.approx(measure(taken)) for taken, kl in search.curve)
    within = KindSearch(measure, 6, 0.1)
    taken = within.run(kl=5.0)
    assert measure(taken) <= 5.0 and 0 < sum(kind != ALL for kind in taken) < 6


def test_groups_and_even_choosers():
    assert groups_of((ALL, READER, ALL, OWN, OWN, READER)) == [[0, 1], [3], [4, 5]]
    assert affordable(12, 0.5, 0.1) == 5 and affordable(12, 0.1, 0.1) == 1
    kinds = evenly(12, affordable(12, 0.5, 0.1))
    assert reads_of(kinds, 0.1) <= 0.5
    assert [layer for layer, kind in enumerate(kinds) if kind == ALL] == [0, 2, 5, 7, 10]


def test_recovered_attention_by_loops():
    """Softmax rows summed over a key-value head's query heads; the chosen tokens of each row, one by one."""
    model, ids, calls = tiny("llama").double(), tokens(batch=1, length=14), []
    choice = TokenChoice(TokenCount(4), 1, 2)
    with torch.no_grad(), visited(model, calls.append):
        model(ids)
    sums = choice_sums(calls, choice)
    expected, rows = torch.zeros(3, 2, 3, 2, dtype=torch.float64), 0
    for row in range(4, 14):
        masses, kept = {}, {}
        for (layer, call), head in itertools.product(enumerate(calls), range(2)):
            keys = call.key[0, head, : row + 1]
            maps = [(call.query[0, 2 * head + i, row] @ keys.T * call.scaling).softmax(-1) for i in range(2)]
            mass = (maps[0] + maps[1]) / 2
            always = {0, row - 1, row}
            others = sorted((j for j in range(row + 1) if j not in always), key=lambda j: -float(mass[j]))
            masses[layer, head], kept[layer, head] = mass, always | set(others[:1])
        for chooser, reader in itertools.product(masses, masses):
            expected[*chooser, *reader] += sum(masses[reader][j] for j in kept[chooser])
        rows += 1
    assert sums.rows == rows and (sums.recovered - expected).abs().max() < 1e-10


def test_best_heads():
    recovered = torch.zeros(2, 2, 2, 2)
    recovered[0, :, 1] = torch.tensor([[0.2, 0.9], [0.6, 0.1]])  # (chooser's head, reader's head)
    assert matched_heads(recovered, [[0, 1]]) == ((), (1, 0))


def words(count):
    return torch.randint(3, 64, (count, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "budget",
    [
        {"read_budget": 0.6},
        {"kl_budget": 0.05, "method": '{"name": "shared_choice", "sinks": 1, "window": 2, "least": 0}'},
    ],
)
def test_the_verb_meets_a_budget(budget, tmp_path):
    report = crosslayer.retrofit(tiny("llama"), words(60), windows=16, length=48, **budget)
    assert report.settings.layers is None  # the search found them
    assert report.cache.share == 1 and report.cache.read_share < 1
    if "read_budget" in budget:
        assert report.cache.read_share <= 0.6
    assert report.cache.read_share == pytest.approx(report.plan.read_states(2048) / 6, rel=1e-5)  # whole bytes
    share, text = report.plan.chosen.of(2048) / 2048, " ".join(report.sentences())
    even = groups_of(evenly(3, affordable(3, report.cache.read_share + 1e-6, share)))
    baselines = report.choice.search.baselines
    written = ", ".join(map(ranges, even))
    assert {row.details["groups"] for row in baselines} == (set() if report.choice.groups == even else {written})
    assert all(row.details["share"] <= report.cache.read_share + 1e-6 for row in baselines)
    assert "after 2,048" in text
    assert ("evenly spaced" in text) == bool(baselines)
    (method,) = report.methods
    assert method["tokens"] in ((0.3, 0.15, 0.075) if "read_budget" in budget else (0.25,))
    # in texts shorter than windows as many tokens as in these, if it chooses how many
    assert method["least"] == (max(math.ceil(method["tokens"] * 48), 20) if "read_budget" in budget else 0)
    report.save(tmp_path / "out")
    again = crosslayer.load_result(tmp_path / "out")
    assert again.plan == report.plan
    assert "each layer" in (tmp_path / "out" / "report.html").read_text()


REFUSED = {
    "give one of `method`, `kv_budget`": {
        "read_budget": 0.5,
        "method": "cla",
    },
    "chooses groups, but `method`": {
        "read_budget": 0.5,
        "method": '{"name": "shared_choice", "groups": [[0, 1]]}',
    },
    "chooses sparse_choosers, but `method`": {
        "read_budget": 0.5,
        "method": '{"name": "shared_choice", "sparse_choosers": [0]}',
    },
    "all tokens are chosen .tokens = 48.*got 48": {
        "kl_budget": 0.5,
        "method": '{"name": "shared_choice", "tokens": 48}',
    },
    "read_budget must be less than 1, got 1": {"read_budget": 1.0},
    "`read_budget` must be at least 0.3750 here, got 0.35": {
        "read_budget": 0.35,
        "method": '{"name": "shared_choice", "tokens": 0.25, "least": 0}',
    },
    "tokens must be more than the 20 that are always chosen": {"read_budget": 0.01},
    "fewer than the `kv_context` of 30, got 32": {
        "kl_budget": 0.5,
        "kv_context": 30,
        "method": '{"name": "shared_choice", "tokens": 32}',
    },
    "all tokens are chosen .tokens = 64.*got 48": {
        "method": '{"name": "shared_choice", "groups": [[0, 1]], "tokens": 64}'
    },
    "give one of `method`, `kv_budget`, `kl_budget` and `read_budget`": {"read_budget": 0.5, "kl_budget": 0.5},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    options = {"windows": 16, "length": 48}
    with pytest.raises(ValueError, match=message):
        crosslayer.retrofit(tiny("llama"), words(60), **options, **REFUSED[message])
