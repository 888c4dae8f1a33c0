"""Attention Residuals in two phases: one phase's numbers, in prompts and cached decoding, and where one phase stays."""

import copy
import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crosslayer.core.depth_attention import listed, two_phase
from crosslayer.testing import tiny
from tests.helpers.tiny import tokens


def always():
    """Read in two phases, however few sources or tokens there are."""
    return mock.patch.multiple(two_phase, FEWEST_SOURCES=1, FEWEST_ELEMENTS=0)


def never():
    """Read in one phase."""
    return mock.patch.object(two_phase, "FEWEST_ELEMENTS", 1 << 40)


def readers(model):
    """Return all readers but the first, which has nothing to choose."""
    return [module for module in model.modules() if getattr(module, "group", None)]


def reads(model, ids, **inputs):
    """Return what every reader read; norms in float32 would hide small differences of logits."""
    found = []

    def keep(_, arguments, result):
        if len(arguments) < 3:  # a third argument is an update that is written
            found.append(result[0])

    hooks = [reader.register_forward_hook(keep) for reader in readers(model)]
    with torch.no_grad():
        model(ids, use_cache=False, **inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_a_read_equals_the_definition(dtype, tolerance, scale, monkeypatch):
    monkeypatch.setattr(two_phase, "AT_ONCE", 200)  # 14 tokens in parts of three, of four sources of 16 channels
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 7, 16, dtype=dtype, generator=generator) for _ in range(7)]
    directions = torch.randn(5, 16, dtype=dtype, generator=generator) * scale
    ahead = two_phase.read_ahead(sources[:4], range(5), directions, 1e-6)
    for number, direction in enumerate(directions):
        for own in range(4):
            result = two_phase.merge(ahead, number, sources[4 : 4 + own], direction, 1e-6).view(2, 7, 16)
            expected = listed(sources[: 4 + own], direction, 1e-6)
            # scores of 1e4 have an absolute error that large weights' softmax passes on
            assert (result - expected).abs().max() <= tolerance * max(1, scale) * expected.abs().max()


@st.composite
def cases(draw):
    """Return layers, blocks, a batch, a length, padding, and the parts in which a prompt is read."""
    layers = draw(st.integers(1, 7))
    count = 2 * layers
    cuts = draw(st.sets(st.integers(1, count - 1), max_size=5))
    uneven = tuple(end - start for start, end in itertools.pairwise([0, *sorted(cuts), count]))
    block = draw(st.sampled_from([None, draw(st.integers(1, count)), uneven]))
    length = draw(st.integers(1, 20))
    parts, left = [], length
    while left:
        parts.append(draw(st.integers(1, left)))
        left -= parts[-1]
    return layers, block, draw(st.integers(1, 3)), length, draw(st.integers(0, length - 1)), parts


@given(cases())
@settings(max_examples=40, deadline=None)
def test_two_phases_equal_one(case):
    layers, block, batch, length, padding, parts = case
    entry = {"name": "attnres", "block": block, "query_init": 1.0}
    model = tiny.build(tiny.config_of(entry, num_hidden_layers=layers))
    ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    mask[0, :padding] = 0
    with never():
        expected = reads(model, ids, attention_mask=mask)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
    with always():
        found = reads(model, ids, attention_mask=mask)
        cached = tiny.steps(model, ids, parts)[0]
    assert len(found) == len(expected) == 2 * layers
    for result, one in zip(found, expected, strict=True):
        tiny.close(result[mask.bool()], one[mask.bool()], "read", 1e-10)
    tiny.close(cached, logits, "cached, in parts", 1e-6)  # norms round to float32, either way


def test_groups_are_whole_blocks_of_eight_readers_or_more():
    sizes = {None: [8, 4], 3: [8, 4], 5: [9, 3], 12: [11, 1], (2, 1, 9): [11, 1]}
    for block, expected in sizes.items():
        model = tiny.build(tiny.config_of({"name": "attnres", "block": block}))
        groups = {id(reader.group): len(reader.group) for reader in readers(model)}
        assert list(groups.values()) == expected, block
        assert [reader for reader in readers(model) if reader is reader.group[0]][0] is readers(model)[0]


def test_prompts_pay_and_single_tokens_do_not():
    model = tiny.build(tiny.config_of("attnres", hidden_size=64))
    count = mock.patch.multiple(two_phase, FEWEST_ELEMENTS=10 * 64 * 8)
    with count, mock.patch.object(two_phase, "merge", wraps=two_phase.merge) as merge, torch.no_grad():
        for batch, length, merges in ((1, 1, 0), (1, 8, 0), (1, 9, 4), (3, 3, 4), (1, 41, 4)):
            merge.reset_mock()
            model(tokens(batch, length))  # the groups have 2 and 10 closed sources, too few and enough
            assert merge.call_count == merges, (batch, length)


def test_training_and_ablations_keep_one_phase():
    ids = tokens()
    with always(), mock.patch.object(two_phase, "merge", wraps=two_phase.merge) as merge:
        for entry in ({"name": "attnres"}, {"name": "attnres", "block": 3}):
            tiny.build(tiny.config_of(entry)).train()(ids, labels=ids, use_cache=False).loss.backward()
        with torch.no_grad():
            tiny.build(tiny.config_of({"name": "attnres", "window": 2}))(ids)
            assert merge.call_count == 0
            tiny.build(tiny.config_of("attnres"))(ids)  # what the count would show
        assert merge.call_count == 12


def test_a_group_with_a_query_elsewhere_keeps_one_phase():
    """Offloading leaves the queries of other layers on the meta device until their turn."""
    model = tiny.build(tiny.config_of({"name": "attnres", "query_init": 1.0}))
    ids = tokens(1, 12)
    with never():
        expected = reads(model, ids)
    later = model.model.layers[2].mlp_residual
    query = later.query
    first = model.model.layers[0].mlp_residual
    with always(), mock.patch.object(two_phase, "merge", wraps=two_phase.merge) as merge:
        later.register_parameter("query", torch.nn.Parameter(query.to("meta")))
        put_back = later.register_forward_pre_hook(lambda *_: later.register_parameter("query", query))
        found = reads(model, ids)
        put_back.remove()
    assert later in first.group and merge.call_count == 4  # of the second group
    for result, one in zip(found, expected, strict=True):
        tiny.close(result, one, "read", 1e-10)


def test_a_reader_whose_group_did_not_begin_reads_by_itself():
    """A probe may run a layer, or replace one, by itself."""
    model = tiny.build(tiny.config_of({"name": "attnres", "query_init": 1.0}))
    first, second = readers(model)[:2]
    stream = torch.randn(1, 5, 32, dtype=torch.float64)
    with always(), torch.no_grad():
        result, carry = second.read(stream, {})
        assert torch.equal(result, stream) and "attnres.ahead" not in carry  # of a single source
        _, carry = first.read(stream, {})
        twin = copy.deepcopy(model)
        found = readers(twin)[1].read(2 * stream, carry)[0]  # the answers are another model's
        tiny.close(found, listed([stream, 2 * stream], second.query * second.gain, second.eps), "read", 1e-10)
