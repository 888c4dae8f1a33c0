"""Rows of a position table that are scaled to a norm: from Python, as plain data, and from the command line."""

import pytest
import torch

import crosslayer
from crosslayer.cli.intervene import interventions
from crosslayer.verbs.intervene.kinds import PositionSwap, intervening, load_intervention, to_entry
from crosslayer.verbs.intervene.page import describe
from tests.helpers.tiny import tiny, tokens


@pytest.mark.parametrize("source", [8, 4], ids=["another row", "its own row"])
def test_a_row_gets_the_norm(source):
    model = tiny("gpt2")
    table = model.transformer.wpe.weight
    before = table.detach().clone()
    row = before[source].tolist()
    length = sum(x**2 for x in row) ** 0.5
    with intervening(model, PositionSwap(4, source, 1.5)):
        assert table[4].tolist() == pytest.approx([1.5 * x / length for x in row], rel=1e-6)
        model(tokens())
    assert torch.equal(table, before)


def test_it_is_typed_with_a_colon_and_kept_by_the_controls():
    (typed,) = interventions(position_swap=["9:0:1.5"])
    assert typed == PositionSwap(9, 0, 1.5) == load_intervention(to_entry(typed))
    assert interventions(position_swap=["9:0"]) == [PositionSwap(9, 0)]
    assert describe([typed]) == "position_swap (position 9, source 0, norm 1.5)"
    assert describe([PositionSwap(9, 0)]) == "position_swap (position 9, source 0)"
    effect = crosslayer.intervene(tiny("gpt2"), tokens(), interventions=[typed], controls=1)
    assert effect.controls[0].interventions[0].norm == 1.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9:0:0", "position_swap: norm must be greater than 0, got '0'"),
        ("9:0:nan", "position_swap: norm must be a finite number"),
        ("9:0:1:2", "--position-swap must be POSITION:SOURCE:NORM, with commas between positions, got '9:0:1:2'"),
    ],
)
def test_a_norm_that_cannot_be_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        interventions(position_swap=[text])
