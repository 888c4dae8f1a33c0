"""The search against exhaustive choice on toy damages, and the paper's groups."""

import pytest

from crosslayer.conversion.choose import PASSES, SAVES, CacheShare, Search, Wires, fixed_superblocks
from crosslayer.probe.shapes import LayerShape

SHAPE = LayerShape(4, 2, 8, 8, True)


def additive(costs):
    """A damage that is a sum over layers: `costs[kind][layer]`, read off the plan."""

    def measure(plan):
        total = 0.0
        for layer in range(plan.layers):
            if plan.keys[layer] is None:
                total += costs["drop"][layer]
            elif plan.values[layer] != layer:
                total += costs["cla"][layer]
            elif plan.keys[layer] != layer:
                total += costs["uniattn"][layer]
        return total

    return measure


def costs(seed, layers):
    import random

    generator = random.Random(seed)
    return {kind: [generator.random() * len(SAVES[kind]) for _ in range(layers)] for kind in SAVES}


@pytest.mark.parametrize("seed", range(5))
def test_with_additive_damage_the_search_takes_the_cheapest_states(seed):
    layers, given = 12, costs(seed, 12)
    search = Search(additive(given), [SHAPE] * layers)
    chosen = search.run(share=0.75)
    assert chosen.plan.cached_fraction() <= 0.75 and search.passes <= PASSES
    assert search.curve[-1][1] == pytest.approx(additive(given)(chosen.plan))
    shares = [wires.plan.cached_fraction() for wires, _ in search.curve]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0
    # the first pick is the cheapest possible move for each state that it saves
    singles = [Wires(("own",) * layers).take(kind, i) for kind in SAVES for i in range(layers)]
    cheapest = min(
        additive(given)(w.plan) / sum(len(SAVES[k]) for k in w.kinds if k != "own")
        for w in singles
        if w.valid([SHAPE] * layers)
    )
    first = search.curve[1]
    assert first[1] / sum(len(SAVES[k]) for k in first[0].kinds if k != "own") == pytest.approx(cheapest)


def test_a_move_that_became_dear_is_measured_again():
    """Dropping both 3 and 4 ruins the toy model, each alone is free: a search that never looks again takes both."""

    def measure(plan):
        gone = [i for i, source in enumerate(plan.keys) if source is None]
        shared = sum(plan.values[i] not in (i, None) or plan.keys[i] not in (i, None) for i in range(8))
        return 100.0 * ({3, 4} <= set(gone)) + 0.1 * len(set(gone) - {3, 4}) + shared

    chosen = Search(measure, [SHAPE] * 8, kinds=("drop",)).run(share=0.75)
    assert {i for i, kind in enumerate(chosen.kinds) if kind == "drop"} & {3, 4} != {3, 4}
    assert chosen.plan.cached_fraction() == 0.75


def test_a_damage_budget_stops_before_it_is_crossed():
    given = costs(1, 8)
    search = Search(additive(given), [SHAPE] * 8)
    chosen = search.run(kl=0.4)
    assert additive(given)(chosen.plan) <= 0.4
    assert search.run(kl=1e-9).methods() == []


def test_a_dear_move_does_not_hide_a_cheap_one_within_the_budget():
    """Cheaper for each state, but two states at once: 0.10 does not fit into 0.08, 0.06 does."""
    given = {"drop": [0.10] * 4, "cla": [9.0] * 4, "uniattn": [0.06] * 4}
    search = Search(additive(given), [SHAPE] * 4)
    assert sorted(search.run(kl=0.08).kinds) == ["own", "own", "own", "uniattn"]


def test_moves_that_become_possible_are_tried():
    """Layer 2 can read layer 0 only once layer 1, of another mask, has no attention."""
    windowed = LayerShape(4, 2, 8, 8, True, window=16)
    given = {"drop": [9.0, 0.1, 9.0], "cla": [9.0, 9.0, 0.1]}
    chosen = Search(additive(given), [SHAPE, windowed, SHAPE], kinds=("cla", "drop"), context=16).run(share=0.35)
    assert chosen.kinds == ("own", "drop", "cla")


def test_a_window_has_little_to_save_at_a_long_context():
    """Layers 0 and 2 see everything, 1 and 3 a window of 8: at 32 tokens those take 8, and dropping one saves less."""
    windowed = LayerShape(4, 2, 8, 8, True, window=8)
    shapes = [SHAPE, windowed, SHAPE, windowed]
    cache = CacheShare(shapes, 32)
    assert cache.of(Wires(("own", "drop", "own", "own")).plan) == pytest.approx((32 + 32 + 8) / 80)
    assert cache.of(Wires(("own", "own", "drop", "own")).plan) == pytest.approx((32 + 8 + 8) / 80)
    assert cache.saved(("drop", 2)) == pytest.approx(2 * 32 * 4 / 80) and cache.least == pytest.approx(8 / 80)
    assert (
        CacheShare(shapes).context == 2048 and CacheShare([LayerShape(4, 2, 8, 8, True, window=4096)]).context == 8192
    )
    given = {"drop": [9.0, 0.02, 0.05, 0.02]}
    chosen = Search(additive(given), shapes, kinds=("drop",), context=32).run(share=0.65)
    assert chosen.kinds == ("own", "own", "drop", "own")  # counting states, the cheaper two windows would go first
    assert Search(additive(given), shapes, kinds=("drop",), context=7).run(share=0.5).kinds == (
        "own",
        "drop",
        "own",
        "drop",
    )


def test_deep_models_are_searched_within_the_passes():
    search = Search(additive(costs(0, 126)), [SHAPE] * 126)
    chosen = search.run(share=0.95)
    assert chosen.plan.cached_fraction() <= 0.95 and search.passes <= PASSES


def test_budgets_that_cannot_be_met_name_the_nearest():
    with pytest.raises(ValueError, match=r"a KV budget of 0.05 cannot be met; with 8 layers it lies from 0.1250 to 1"):
        Search(additive(costs(0, 8)), [SHAPE] * 8).run(share=0.05)
    with pytest.raises(ValueError, match=r"the nearest found is 0.6250"):  # three keys of eight states
        Search(lambda plan: 0.0, [SHAPE] * 4, kinds=("uniattn",)).run(share=0.5)


def test_wires_follow_the_rules_of_plans():
    own = Wires(("own",) * 6)
    assert not own.take("cla", 0).valid([SHAPE] * 6)  # nothing below
    chain = own.take("cla", 2).take("cla", 3)
    assert [chain.leader(2), chain.leader(3)] == [1, 1]
    assert chain.plan.keys == (0, 1, 1, 1, 4, 5)
    passed = chain.take("drop", 2)  # a borrower past a dropped layer still reads its leader
    assert passed.valid([SHAPE] * 6) and passed.plan.keys == (0, 1, None, 1, 4, 5)
    assert not own.take("cla", 2).take("uniattn", 3).valid([SHAPE] * 6)  # layer 2 owns no keys
    assert not own.take("cla", 2).valid([SHAPE, SHAPE, LayerShape(4, 2, 8, 8, True, window=8)] + [SHAPE] * 3)
    assert not Wires(("drop",) * 6).valid([SHAPE] * 6)


def test_fixed_superblocks():
    groups, share = fixed_superblocks([SHAPE] * 30, 0.85, CacheShare([SHAPE] * 30))
    assert (groups, share) == ([[18, 19, 20, 21], [22, 23, 24, 25], [26, 27, 28, 29]], 0.85)
    groups, share = fixed_superblocks([SHAPE] * 30, 0.88, CacheShare([SHAPE] * 30))
    assert share == pytest.approx(53 / 60) and len(groups) == 7
