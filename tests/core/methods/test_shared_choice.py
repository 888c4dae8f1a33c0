"""Shared choice: cached, padded and in blocks; reads by the plan; what is refused. Its equation: test_equations.py."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crosslayer.core.choice import TokenChoice
from crosslayer.core.methods import load_method, merge_plans
from crosslayer.core.methods.shared_choice import SharedChoice
from crosslayer.core.plan import DepthPlan, TokenCount
from crosslayer.testing.tiny import build, config_of, steps, tokens

LENGTH = 13
SWAPPED = ((1, 0), (0, 1), (0, 1), (0, 1))
METHOD = SharedChoice(groups=((0, 1, 4), (2, 3, 5)), tokens=5, sinks=1, window=2)


def test_a_choice_matters():
    """The loops would pass if nothing were chosen; with few tokens logits move by far more than a rounding."""
    model, ids = build(config_of(METHOD)), tokens(length=LENGTH)
    plain = build(config_of(None))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (model(ids).logits - plain(ids).logits).abs().max() > 0.1
        every = build(config_of(SharedChoice(groups=((0, 1, 4), (2, 3, 5)), tokens=LENGTH, sinks=1, window=2)))
        assert torch.equal(every(ids).logits, plain(ids).logits)  # exact where all tokens are chosen


@st.composite
def sharing(draw):
    """Draw a shared choice of four layers with two key-value heads: any groups, sizes, sparse choosers and heads."""
    group_of = draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))  # group 0: layers that attend to all tokens
    groups = tuple(tuple(layer for layer in range(4) if group_of[layer] == group) for group in (1, 2))
    groups = tuple(group for group in groups if group)
    sinks, window = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    tokens = draw(st.one_of(st.integers(sinks + window, 9), st.sampled_from([0.1, 0.3, 0.6])))
    heads = draw(st.lists(st.tuples(*[st.integers(0, 1)] * 2), min_size=4, max_size=4))
    return SharedChoice(
        groups=groups,
        tokens=float(tokens),
        sinks=sinks,
        window=window,
        least=draw(st.integers(0, 5)),
        sparse_choosers=tuple(group[0] for group in groups if draw(st.booleans())),
        chooser_heads=tuple(heads) if draw(st.booleans()) else (),
    )


@settings(max_examples=12, deadline=None)
@given(sharing(), st.integers(0, 99))
@example(SharedChoice(groups=((0, 1),), tokens=4.0, sinks=1, window=2, sparse_choosers=(0,), chooser_heads=SWAPPED), 0)
def test_any_options_give_the_same_with_a_cache(method, seed):
    """Token by token and in pieces, and for a row of a batch with padding before it, as in one pass over the text."""
    model, ids = build(config_of(method, num_hidden_layers=4)), tokens(batch=2, length=12, seed=seed)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = torch.stack([torch.cat([ids[0], ids[0, :2]]), torch.cat([ids[0, :2], ids[1]])])
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        for sizes in ([1] * 12, [5, 1, 4, 1, 1]):
            assert (steps(model, ids, sizes)[0] - full).abs().max() < 1e-6, sizes
        row = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[1, 2:]
        assert (row - full[1]).abs().max() < 1e-6


@given(st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.5, 0.99, 7, 20]), st.integers(0, 3), st.integers(1, 4))
def test_blocks_of_rows_and_padding_choose_the_same(length, share, sinks, window):
    """A choice made in blocks, with a mask, or with padding before the text, is the choice."""
    generator = torch.Generator().manual_seed(length)
    choice = TokenChoice(TokenCount(share, sinks + window if share < 1 else 0), sinks, window)
    q = torch.randn(1, 4, length, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(1, 2, length, 8, generator=generator, dtype=torch.float64)
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    sets = _sets(choice.choose(q, k, None, 0.5), length)
    assert _sets(choice.choose(q, k, causal, 0.5), length) == sets
    for row in range(length):
        one = choice.choose(q[:, :, row : row + 1], k[:, :, : row + 1], None, 0.5)
        assert _sets(one, row + 1, rows=1)[0] == sets[row]
    padded = torch.cat([torch.zeros(1, 1, length, 3, dtype=torch.bool), causal], -1)
    more = choice.choose(q, torch.cat([torch.ones_like(k[:, :, :1])] * 3 + [k], 2), padded, 0.5)
    assert _sets(more, length + 3, shift=3, first=3) == sets
    for row, heads in enumerate(sets):
        always = {*range(min(sinks, row + 1)), *range(max(0, row + 1 - window), row + 1)}
        assert all(always <= chosen <= set(range(row + 1)) for chosen in heads)


def _sets(choice, length, rows=None, shift=0, first=0):
    """Return, for each row, the set of tokens that each head chooses; all that it sees where there is no choice."""
    if choice is None:
        rows = length - first if rows is None else rows
        return [[set(range(length - first - rows + row + 1))] * 2 for row in range(rows)]
    return [[{int(j) - shift for j in head[row] if j >= 0} for head in choice[0]] for row in range(choice.shape[2])]


def test_reads_are_counted():
    plan = SharedChoice(groups=((0, 1, 2), (3, 4, 5)), tokens=32).plan(6)
    assert plan.cached_fraction() == 1
    assert plan.read_states(context=128) == 2 * 2 + 4 * 2 * 0.25  # two choosers read all, four readers 32 of 128 tokens
    assert plan.read_states() == 12
    own = SharedChoice(groups=((0, 1),), sparse_choosers=(0,), tokens=0.5).plan(2)
    assert own.read_states(160) == 1 + 0.5 + 1  # all keys and half of the values; half of both
    assert own.read_states(80) == 1 + 0.8 + 2 * 0.8 and own.read_states(8) == 4  # 64 are chosen at least


def test_choices_merge():
    both = merge_plans([SharedChoice(groups=((0, 1, 2),)), load_method({"name": "drop", "attention": (2,)})], 4)
    assert both.choices == (None, 0, None, None)
    with pytest.raises(ValueError, match="layer 0"):
        merge_plans([SharedChoice(groups=((0, 1, 2),)), load_method({"name": "drop", "attention": (0,)})], 4)


REFUSED = {
    "tokens must be a share below 1 or a whole number, got 2.5": ({"tokens": 2.5}, {}),
    "tokens must be at least sinks \\+ window = 20, got 8": ({"tokens": 8.0}, {}),
    "groups of layers in rising order": ({"groups": ((2, 1),)}, {}),
    "window at least 1, got 4, 0": ({"window": 0}, {}),
    "each of sparse_choosers must be the first layer of a group, got \\[2\\]": (
        {"groups": ((1, 2),), "sparse_choosers": (1, 2)},
        {},
    ),
    "least must be at least 0, got -1": ({"least": -1}, {}),
    "chooser_heads must have 6 entries": ({"chooser_heads": ((0, 1),)}, {}),
    "chooser_heads of layer 0 must be 2 heads from 0 to 1": (
        {"groups": ((0, 1),), "chooser_heads": ((0, 2),) * 6},
        {},
    ),
    "layer 0 \\(sliding_attention\\): chosen tokens need": ({"groups": ((0, 1),)}, {"sliding_window": 4}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    options, shape = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        config_of(SharedChoice(**options), **shape)


@pytest.mark.parametrize(
    ("choices", "chosen", "message"),
    [
        ((None, 2, None), 0.5, "must name the layer itself, a layer below or None, got 2"),
        ((None, 0, 1), 0.5, "name layer 1, which attends to the choice of another layer"),
        ((None, 0), 0.5, "an entry for each layer"),
        ((None, 0, 0), None, "chosen must be above 0 where layers choose tokens"),
    ],
)
def test_plans_that_cannot_be(choices, chosen, message):
    own = (0, 1, 2)
    with pytest.raises(ValueError, match=message):
        DepthPlan(own, own, own, own, choices=choices, chosen=None if chosen is None else TokenCount(chosen))
