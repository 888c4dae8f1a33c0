"""Block Attention Residuals in two phases: the plain form's numbers, for prompts and cached decoding."""

from unittest import mock

import pytest
import torch

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.core.depth_attention import listed, plain
from crosslayer.core.methods import attnres
from crosslayer.testing import tiny as contract
from tests.helpers.tiny import tokens


def both(block, dtype=torch.float64):
    """Return models of both forms with the same weights."""
    one = contract.build(contract.config_of([{"name": "attnres", "block": block}])).to(dtype)
    two = CrossLayerForCausalLM(contract.config_of([{"name": "attnres", "block": block, "two_phase": True}]))
    two.to(dtype).load_state_dict(one.state_dict())
    return one, two.eval()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_a_read_in_two_phases_equals_the_definition(dtype, tolerance, scale):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 7, 16, dtype=dtype, generator=generator) for _ in range(4)]
    directions = torch.randn(5, 16, dtype=dtype, generator=generator) * scale
    ahead = plain.read_ahead(sources[:-1], directions, 1e-6)
    for direction, one in zip(directions, ahead, strict=True):
        for result, expected in (
            (one[0], listed(sources[:-1], direction, 1e-6)),
            (plain.merge(one, sources[-1], direction, 1e-6), listed(sources, direction, 1e-6)),
            (plain.read(sources, direction, 1e-6), listed(sources, direction, 1e-6)),
        ):
            # scores of 1e4 have an absolute error that large weights' softmax passes on
            assert (result - expected).abs().max() <= tolerance * max(1, scale) * expected.abs().max()


@pytest.mark.parametrize("block", [2, 5, 12])
def test_prompts_and_cached_decoding_equal_the_plain_form(block):
    one, two = both(block)
    ids = tokens(length=12)
    with torch.no_grad(), mock.patch.object(attnres, "merge", wraps=attnres.merge) as merge:
        expected = one(ids, use_cache=False).logits
        assert merge.call_count == 0
        contract.close(two(ids, use_cache=False).logits, expected, "prompt", 1e-10)
        contract.close(contract.steps(two, ids, [5, 1, 2, 4])[0], expected, "cached", 1e-10)
        openers = -(-12 // block)
        assert merge.call_count == 5 * (12 - openers)  # every reader that opens no block, in five passes


def test_training_and_gradients_are_those_of_the_plain_form():
    ids = tokens()
    gradients = []
    for model in both(3):
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for result, expected in zip(*gradients, strict=True):
        assert torch.equal(result, expected)


def test_a_reader_whose_block_is_elsewhere_reads_as_usual():
    """Offloading leaves the queries of other layers on the meta device."""
    one, two = both(3)
    reader = two.model.layers[1].mlp_residual
    query = reader.query
    ids = tokens()
    with torch.no_grad():
        expected = one(ids, use_cache=False).logits
        reader.register_parameter("query", torch.nn.Parameter(query.to("meta")))
        opener = two.model.layers[1].mlp_residual
        assert not opener._read_ahead([torch.zeros(1, 2, 32)])
        reader.register_parameter("query", query)
        contract.close(two(ids, use_cache=False).logits, expected, "as before", 1e-10)


@pytest.mark.parametrize("options", [{}, {"block": 2, "window": 1}, {"block": 2, "depth_heads": 2}], ids=str)
def test_bad_input(options):
    with pytest.raises(ValueError, match="two_phase"):
        attnres.AttnRes(**options, two_phase=True)
