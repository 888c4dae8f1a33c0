"""The search against exhaustive choice on toy damages, and the fixed blocks that it is compared with."""

import random

import pytest

from crosslayer.core.methods import method_class
from crosslayer.probe.shapes import CacheShare, LayerShape
from crosslayer.verbs.retrofit.greedy import PASSES
from crosslayer.verbs.retrofit.run import options_of, strategy_of
from crosslayer.verbs.retrofit.search import Assignment, Search, fixed_blocks, searched_methods

SHAPE = LayerShape(4, 2, 8, 8, True)
UNIATTN, CLA, DROP = (method_class(name) for name in ("uniattn", "cla", "drop"))


def own(layers):
    return Assignment((None,) * layers, (SHAPE,) * layers)


def additive(costs):
    """A damage that is a sum over layers: `costs[method][layer]`, read off the plan."""

    def measure(assignment):
        plan = assignment.plan
        total = 0.0
        for layer in range(plan.layers):
            if plan.keys[layer] is None:
                total += costs[DROP][layer]
            elif plan.values[layer] != layer:
                total += costs[CLA][layer]
            elif plan.keys[layer] != layer:
                total += costs[UNIATTN][layer]
        return total

    return measure


def drawn_costs(seed, layers):
    generator = random.Random(seed)
    return {kind: [generator.random() * len(kind.saves) for _ in range(layers)] for kind in (UNIATTN, CLA, DROP)}


def saved(assignment):
    return sum(len(kind.saves) for kind in assignment.classes if kind is not None)


def test_all_methods_that_save_something_are_searched():
    assert searched_methods() == [CLA, DROP, UNIATTN]


@pytest.mark.parametrize("seed", range(5))
def test_with_additive_damage_the_search_takes_the_cheapest_states(seed):
    layers, costs = 12, drawn_costs(seed, 12)
    search = Search(additive(costs), [SHAPE] * layers)
    chosen = search.run(share=0.75)
    assert chosen.plan.cached_fraction() <= 0.75 and search.passes <= PASSES
    assert search.curve[-1][1] == pytest.approx(additive(costs)(chosen))
    shares = [assignment.plan.cached_fraction() for assignment, _ in search.curve]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0
    # the first step is the cheapest move per state that it saves
    singles = [own(layers).take(kind, layer) for kind in searched_methods() for layer in range(layers)]
    possible = [assignment for assignment in singles if assignment.valid]
    cheapest = min(additive(costs)(assignment) / saved(assignment) for assignment in possible)
    assignment, damage = search.curve[1]
    assert damage / saved(assignment) == pytest.approx(cheapest)


def test_a_move_that_became_dear_is_measured_again():
    """Dropping both 3 and 4 ruins the toy model, each alone is free: a search that never measures again takes both."""

    def measure(assignment):
        plan = assignment.plan
        dropped = [i for i, source in enumerate(plan.keys) if source is None]
        shared = sum(plan.values[i] not in (i, None) or plan.keys[i] not in (i, None) for i in range(8))
        return 100.0 * ({3, 4} <= set(dropped)) + 0.1 * len(set(dropped) - {3, 4}) + shared

    chosen = Search(measure, [SHAPE] * 8, classes=[DROP]).run(share=0.75)
    assert {i for i, kind in enumerate(chosen.classes) if kind is DROP} & {3, 4} != {3, 4}
    assert chosen.plan.cached_fraction() == 0.75


def test_a_damage_budget_stops_before_it_is_crossed():
    costs = drawn_costs(1, 8)
    search = Search(additive(costs), [SHAPE] * 8)
    chosen = search.run(kl=0.4)
    assert additive(costs)(chosen) <= 0.4
    assert search.run(kl=1e-9).methods() == []


def test_a_dear_move_does_not_hide_a_cheap_one_within_the_budget():
    """Cheaper for each state, but two states at once: 0.10 does not fit into 0.08, 0.06 does."""
    costs = {DROP: [0.10] * 4, CLA: [9.0] * 4, UNIATTN: [0.06] * 4}
    search = Search(additive(costs), [SHAPE] * 4)
    classes = search.run(kl=0.08).classes
    assert classes.count(UNIATTN) == 1 and classes.count(None) == 3


def test_layers_follow_the_next_of_their_own_mask():
    """Where masks alternate, layer 2 reads layer 0 and layer 3 reads layer 1."""
    windowed = LayerShape(4, 2, 8, 8, True, window=16)
    costs = {CLA: [9.0, 9.0, 0.1, 0.1], DROP: [9.0] * 4}
    chosen = Search(additive(costs), [SHAPE, windowed] * 2, classes=[CLA, DROP], context=16).run(share=0.5)
    assert chosen.classes == (None, None, CLA, CLA) and chosen.plan.keys == (0, 1, 0, 1)
    assert chosen.methods()[0].groups == ((0, 2), (1, 3))


def test_a_window_has_little_to_save_at_a_long_context():
    """Layers 0 and 2 see everything, 1 and 3 a window of 8: at 32 tokens those take 8, and dropping one saves less."""
    windowed = LayerShape(4, 2, 8, 8, True, window=8)
    shapes = [SHAPE, windowed, SHAPE, windowed]
    cache = CacheShare(shapes, 32)
    assert cache.of(own(4).take(DROP, 1).plan) == pytest.approx((32 + 32 + 8) / 80)
    assert cache.of(own(4).take(DROP, 2).plan) == pytest.approx((32 + 8 + 8) / 80)
    assert cache.saved(DROP.saves, 2) == pytest.approx(2 * 32 * 4 / 80) and cache.least == pytest.approx(8 / 80)
    assert CacheShare(shapes).context == 2048
    assert CacheShare([LayerShape(4, 2, 8, 8, True, window=4096)]).context == 8192
    costs = {DROP: [9.0, 0.02, 0.05, 0.02]}
    chosen = Search(additive(costs), shapes, classes=[DROP], context=32).run(share=0.65)
    assert chosen.classes == (None, None, DROP, None)  # not the cheaper two windows
    short = Search(additive(costs), shapes, classes=[DROP], context=7).run(share=0.5)
    assert short.classes == (None, DROP, None, DROP)


def test_deep_models_are_searched_within_the_passes():
    search = Search(additive(drawn_costs(0, 126)), [SHAPE] * 126)
    chosen = search.run(share=0.95)
    assert chosen.plan.cached_fraction() <= 0.95 and search.passes <= PASSES


def test_budgets_that_cannot_be_met_name_the_nearest():
    with pytest.raises(ValueError, match=r"0.1250 .*got 0.05"):
        Search(additive(drawn_costs(0, 8)), [SHAPE] * 8).run(share=0.05)
    with pytest.raises(ValueError, match=r"0.6250"):  # three keys of eight states
        Search(lambda assignment: 0.0, [SHAPE] * 4, classes=[UNIATTN]).run(share=0.5)


def test_assignments_follow_the_rules_of_plans():
    assert not own(6).take(CLA, 0).valid  # nothing below
    chain = own(6).take(CLA, 2).take(CLA, 3)
    assert [chain.source(2), chain.source(3)] == [1, 1]
    assert chain.plan.keys == (0, 1, 1, 1, 4, 5)
    passed = chain.take(DROP, 2)  # a reader past a dropped layer still reads its source
    assert passed.valid and passed.plan.keys == (0, 1, None, 1, 4, 5)
    assert passed.classes == (None, None, DROP, CLA, None, None)
    strategy = strategy_of(options_of(kv_budget=0.7, target="mlp"))
    assert [method.compensation for method in strategy.compensated(passed.methods())] == ["mlp", "attention"]
    assert not own(6).take(CLA, 2).take(UNIATTN, 3).valid  # layer 2 has no keys of its own
    shapes = (SHAPE, SHAPE, LayerShape(4, 2, 8, 8, True, window=8), *[SHAPE] * 3)
    assert not Assignment((None,) * 6, shapes).take(CLA, 2).valid and Assignment((None,) * 6, shapes).take(CLA, 3).valid
    assert Assignment((None,) * 6, shapes).take(CLA, 3).plan.keys == (0, 1, 2, 1, 4, 5)
    assert not Assignment((DROP,) * 6, (SHAPE,) * 6).valid


def test_fixed_blocks_are_of_the_size_nearest_to_the_share():
    shapes = [SHAPE] * 30
    blocks = fixed_blocks(UNIATTN, shapes, 0.85, CacheShare(shapes))
    fours = [[18, 19, 20, 21], [22, 23, 24, 25], [26, 27, 28, 29]]
    assert blocks == (fours, 0.85)
    groups, share = fixed_blocks(UNIATTN, shapes, 0.88, CacheShare(shapes))
    assert share == pytest.approx(53 / 60) and len(groups) == 7
    assert fixed_blocks(CLA, shapes, 0.70, CacheShare(shapes))[0] == fours
    assert fixed_blocks(CLA, [SHAPE, None] * 15, 0.7, CacheShare(shapes)) is None
