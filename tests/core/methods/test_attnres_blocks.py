"""Blocks of given sizes, and random initial queries: both in the fast form."""

import pytest
import torch

from crosslayer.core.methods.attnres import AttnRes
from crosslayer.testing import tiny as contract
from crosslayer.testing.tiny import build, config_of, tokens
from tests.core.methods.test_attnres import Loops
from tests.core.methods.test_equations import check

UNEVEN = {"first": [1, 5, 6], "ones": [1, 1, 1, 4, 2, 3], "one": [12], "all": [1] * 12}


@pytest.mark.parametrize("sizes", UNEVEN.values(), ids=UNEVEN)
def test_blocks_of_given_sizes_equal_their_loops(sizes):
    method = {"name": "attnres", "block": sizes, "query_init": 0.5}
    model = build(config_of([method]))
    assert AttnRes(block=tuple(sizes)).published
    check(model, Loops)


def test_equal_sizes_are_the_same_model():
    ids, states = tokens(), None
    logits = []
    for block in (3, [3, 3, 3, 3], 5, [5, 5, 2]):
        model = build(config_of([{"name": "attnres", "block": block}]))
        states = states or model.state_dict()
        model.load_state_dict(states)
        with torch.no_grad():
            logits.append(model(ids, use_cache=False).logits)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[2], logits[3])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("block", [[5, 5], [6, 6, 1], [12, 0], []])
def test_sizes_that_are_not_those_of_all_sublayers_are_refused(block):
    with pytest.raises(ValueError, match="attnres: block .*12"):
        config_of([{"name": "attnres", "block": block}])


@pytest.mark.parametrize("more", [{}, {"query": "input"}, {"depth_heads": 2}], ids=str)
def test_initial_queries_have_the_scale_that_is_asked_for(more):
    from crosslayer.core.decoder import CrossLayerForCausalLM

    for scale in (0.0, 0.3):
        model = CrossLayerForCausalLM(config_of([{"name": "attnres", "query_init": scale, **more}]))
        queries = [value for name, value in model.named_parameters() if name.endswith("residual.query")]
        spread = torch.cat([query.detach().flatten() for query in queries]).std()
        assert len(queries) == 12 and float(spread) == pytest.approx(scale, rel=0.15)
    with pytest.raises(ValueError, match="query_init"):
        AttnRes(query_init=-1.0)
    with pytest.raises(ValueError, match="static"):
        AttnRes(weights="static", query_init=0.1)


@pytest.mark.parametrize("check_of", [contract.steps], ids=["cache"])
def test_uneven_blocks_read_a_text_in_pieces_as_whole(check_of):
    model, ids = build(config_of([{"name": "attnres", "block": [1, 4, 7]}])), tokens()
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        pieces, _ = check_of(model, ids, [4, 1, ids.shape[1] - 5], None)
    torch.testing.assert_close(pieces, full, atol=1e-10, rtol=1e-10)
