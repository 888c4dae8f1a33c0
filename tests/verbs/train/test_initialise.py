"""Initial weights depend only on seed and name, and have the distributions of the model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.testing import tiny as contract
from crosslayer.training.initialise import initialise
from tests.helpers.cases import CASES, each


def weights(methods, seed=0, **shape):
    model = CrossLayerForCausalLM(contract.config_of(methods, **shape))
    initialise(model, seed)
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def plain():
    return weights([])


@pytest.mark.parametrize("case", each(CASES))
def test_methods_share_what_they_have_in_common(case, plain):
    """And each tensor has the model's own distribution: constants are equal, spreads are close."""
    methods, changes = CASES[case]
    base = weights([], **changes) if changes else plain
    config = contract.config_of(methods, **changes)
    torch.manual_seed(1)
    first, second = (dict(CrossLayerForCausalLM(config).named_parameters()) for _ in range(2))
    model = CrossLayerForCausalLM(config)
    initialise(model, 0)
    shared = 0
    for name, parameter in model.named_parameters():
        assert vars(parameter) == {}
        if name in base and base[name].shape == parameter.shape:
            assert torch.equal(parameter, base[name]), name
            shared += 1
        rule = first[name]
        if torch.equal(rule, second[name]):  # constants
            assert torch.equal(parameter, rule), name
        elif rule.numel() > 32:
            assert not torch.equal(parameter, rule), name
            assert abs(parameter.std() / rule.std() - 1) < 5 * rule.numel() ** -0.5, name
    assert shared > 10


def test_seed_and_name_matter(plain):
    other = weights([], seed=1)
    key = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(plain[key.format(0)], other[key.format(0)])
    assert not torch.equal(plain[key.format(0)], plain[key.format(1)])
    assert torch.equal(plain[key.format(0)], weights([])[key.format(0)])


def test_neither_the_random_state_nor_the_dtype_matters(plain):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    model = CrossLayerForCausalLM(contract.config_of([])).bfloat16()
    torch.random.set_rng_state(before)
    initialise(model, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, plain[name].bfloat16()), name


def test_a_stock_model_gets_the_same(plain):
    shape = {**contract.SHAPE, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    initialise(model, 0)
    assert {name for name, _ in model.named_parameters()} == set(plain)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain[name]), name


def test_tied_weights_stay_tied():
    tied = weights([], tie_word_embeddings=True)
    assert "lm_head.weight" not in tied
    assert torch.equal(tied["model.embed_tokens.weight"], weights([])["model.embed_tokens.weight"])
    assert tied["model.embed_tokens.weight"][0].eq(0).all()  # of the padding token


def test_a_parameter_that_is_not_initialised_is_refused():
    model = CrossLayerForCausalLM(contract.config_of([]))
    model.model.layers[1].extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="model.layers.1.extra.*CrossLayerDecoderLayer"):
        initialise(model, 0)
    assert model.model.layers[1].extra.tolist() == [1, 1, 1]
    with torch.device("meta"):
        empty = CrossLayerForCausalLM(contract.config_of([]))
    with pytest.raises(ValueError, match="meta device"):
        initialise(empty, 0)
