"""Whether methods combine does not depend on their order, and a refusal names those that collide and no others."""

import re
from itertools import combinations, permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crosslayer.core.methods import load_methods, merge_plans, method_names
from crosslayer.testing.tiny import config_of

LAYERS = 5
NAMES = re.compile(rf"\b({'|'.join(method_names())})\b")
FEW = st.lists(st.integers(0, LAYERS - 1), min_size=2, max_size=3, unique=True).map(
    lambda layers: tuple(sorted(layers))
)
GROUPS = FEW.map(lambda layers: (layers,))
ONE = st.integers(0, LAYERS - 1).map(lambda layer: (layer,))
STATES = st.sampled_from(["queries", "keys", "values"])
OPTIONS = {name: {} for name in method_names()} | {
    "cla": {"groups": GROUPS},
    "cross_attention": {"source": st.sampled_from(["first", "previous"])},
    "drop": {"attention": st.one_of(ONE, FEW), "mlp": st.one_of(st.just(()), ONE)},
    "resformer": {"of": STATES},
    "shared_choice": {"groups": GROUPS},
    "svformer": {"anchors": st.sampled_from([(0,), (0, 2), (0, 4)]), "share": STATES},
    "uniattn": {"superblocks": GROUPS, "compensation": st.sampled_from([None, "attention", "mlp"])},
}
ENTRIES = {name: st.fixed_dictionaries({"name": st.just(name), **options}) for name, options in OPTIONS.items()}
SETS = st.lists(st.sampled_from(list(ENTRIES)), min_size=2, max_size=4, unique=True).flatmap(
    lambda names: st.tuples(*[ENTRIES[name] for name in names])
)
CROSS_ATTENTION, CLA = {"name": "cross_attention"}, {"name": "cla", "groups": ((1, 4),)}
KNOWN = [
    [CROSS_ATTENTION, {"name": "drop", "attention": (1,)}, {"name": "cla", "groups": ((0, 1),)}],
    [
        {"name": "drop", "attention": (0, 1, 4)},
        CLA,
        {"name": "uniattn", "superblocks": ((0, 4),)},
    ],
    [{"name": "shared_choice", "groups": ((0, 2),)}, {"name": "attnres"}, {"name": "yoco"}],
    [CROSS_ATTENTION, {"name": "mudd"}, {"name": "shared_choice", "groups": ((1, 3),)}],
    [{"name": "yoco"}, {"name": "attnres"}, {"name": "svformer"}],
    [{"name": "uniattn", "superblocks": ((1, 2),), "compensation": "mlp"}, "attnres", {"name": "drop", "mlp": (2,)}],
]
THREE = [{"name": "svformer", "anchors": (0, 4)}, {"name": "cla", "groups": ((0, 4),)}, "neutreno", "attnres"]


def refusal(entries):
    try:
        config_of(list(entries), num_hidden_layers=LAYERS)
    except ValueError as error:
        return str(error)
    return None


def named(message, entries):
    """Return the entries whose methods a message names."""
    names = set(NAMES.findall(message))
    return [entry for entry in entries if (entry if isinstance(entry, str) else entry["name"]) in names]


@settings(max_examples=12)
@given(SETS)
@example(KNOWN[0])
@example(KNOWN[1])
@example(KNOWN[2])
@example(KNOWN[3])
@example(KNOWN[4])
@example(KNOWN[5])
@example(THREE)
def test_any_methods_in_any_order(entries):
    messages = [refusal(order) for order in permutations(entries)]
    assert len({message is None for message in messages}) == 1, messages
    for message in filter(None, messages):
        culprits = named(message, entries)
        assert culprits and refusal(culprits) is not None, message
        for count in range(1, len(culprits)):
            assert all(refusal(fewer) is None for fewer in combinations(culprits, count)), message


@pytest.mark.parametrize("entries", KNOWN)
def test_the_two_that_collide_are_named(entries):
    assert len(named(refusal(entries), entries)) == 2


def test_three_that_collide_only_together_are_named():
    assert named(refusal(THREE), THREE) == THREE[:3]


@pytest.mark.parametrize("entries", KNOWN[:2])
def test_plans_merge_in_no_order(entries):
    for order in permutations(load_methods(entries)):
        with pytest.raises(ValueError, match="only one"):
            merge_plans(order, LAYERS)
