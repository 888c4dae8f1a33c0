"""Attention Residuals as released models have them: normed values, and three reads of an attention sublayer."""

import contextlib
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING

from crosslayer import testing as contract
from crosslayer.core.depth_attention import depth_attention, listed, two_phase
from crosslayer.core.methods.attnres import AttnRes
from crosslayer.core.sources import Sources
from crosslayer.testing.tiny import build, config_of
from tests.core.methods.naive import attend, check, project
from tests.core.methods.test_attnres import QUICK, Loops
from tests.core.methods.test_listed_form import agree, readers
from tests.core.methods.test_two_phase import always, never, reads
from tests.helpers.tiny import tokens

FORMS = {
    "normed": {"values": "normed"},
    "normed, blocks": {"values": "normed", "block": 4},
    "three queries": {"queries": 3, "block": [1, 5, 6]},
    "Inkling 2": {"values": "normed", "queries": 3, "block": 4},
}


def normed_read(sources, direction, eps):
    return depth_attention(sources, direction, eps, normed=True)


class ReleasedLoops(Loops):
    """The reads of released forms: one after another, by `Loops.token` with normed values."""

    def run(self, ids):
        outputs = [self.model.model.embed_tokens(ids)]
        for i, layer in enumerate(self.layers):
            residual, norm = layer.attn_residual, layer.input_layernorm
            apart = self.options.get("queries", 1) == 3 and i > 0
            views = [self.of_query(residual, number) for number in range(3)] if apart else [residual] * 3
            inputs = [norm(self.read(outputs, view)) for view in views]
            q, k, v = (project(self.model, i, x, state) for x, state in zip(inputs, "qkv", strict=True))
            outputs.append(layer.self_attn.o_proj(attend(self.model, i, q, k, v)))
            outputs.append(layer.mlp(layer.post_attention_layernorm(self.read(outputs, layer.mlp_residual))))
        return self.model.lm_head(self.model.model.norm(self.read(outputs, self.model.model.final_residual)))

    def of_query(self, residual, number):
        return mock.Mock(query=residual.query[number], gain=residual.gain)

    def token(self, sources, residual):
        normed = [v / torch.sqrt((v * v).mean() + 1e-6) for v in sources]
        scores = torch.stack([residual.query @ (row * residual.gain) for row in normed])
        weights = torch.exp(scores) / torch.exp(scores).sum()
        values = normed if self.options.get("values") == "normed" else sources
        return sum(weight * row for weight, row in zip(weights, values, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_released_forms_equal_their_loops(form):
    model = build(config_of([{"name": "attnres", "query_init": 0.5, **FORMS[form]}]))
    assert AttnRes(**{**FORMS[form], "block": None}).published
    check(model, ReleasedLoops)


@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.__name__)
@pytest.mark.parametrize("form", ["normed", "Inkling 2"])
def test_released_forms_hold_the_contract(form, check):
    check(config_of([{"name": "attnres", **FORMS[form]}]))


@pytest.mark.slow
@pytest.mark.parametrize("check", (*contract.BY_OPTIONS, contract.compiled_equals_eager), ids=lambda c: c.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_released_forms_hold_the_whole_contract(form, check):
    check(config_of([{"name": "attnres", **FORMS[form]}]))


def test_only_attention_to_all_tokens_reads_three_times():
    kinds = ["sliding_attention", "full_attention"] * 3
    config = config_of([{"name": "attnres", "queries": 3}], layer_types=kinds, sliding_window=4)
    shapes = [tuple(layer.attn_residual.query.shape) for layer in build(config).model.layers[1:]]
    assert shapes == [(3, 32), (32,), (3, 32), (32,), (3, 32)]


@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason="this version of transformers has no Inkling 2")
@pytest.mark.parametrize("queries", [1, 3])
def test_a_read_and_its_gradients_equal_those_of_transformers_inkling_2(queries):
    """With copied weights, in float64: theirs rounds to float32, which is switched off here."""
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual, Inkling2TextConfig

    width, count = 32, 5
    theirs = Inkling2BlockAttentionResidual(Inkling2TextConfig(hidden_size=width), queries).double()
    theirs.config._attn_implementation = "sdpa"  # eager attention rounds its softmax to float32
    model = build(config_of([{"name": "attnres", "values": "normed", "queries": queries}]))
    reader = model.model.layers[2].attn_residual
    with torch.no_grad():
        reader.gain.fill_(1.0)
        theirs.query.copy_(reader.query.normal_() * width**0.5)  # w = q / √C
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(2, 7, count, width, dtype=torch.float64, generator=generator).requires_grad_()
    partial = torch.randn(2, 7, width, dtype=torch.float64, generator=generator).requires_grad_()
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        expected = theirs(blocks, partial)
    read, carry = reader.read(partial, {"attnres.sources": Sources(blocks.unbind(-2))})
    found = reader.inputs(read, carry)[: len(expected)]
    weights = torch.randn(len(expected), 2, 7, width, dtype=torch.float64, generator=generator)
    results = []
    for outputs, query, scale in ((expected, theirs.query, width**0.5), (found, reader.query, 1.0)):
        loss = sum((weight * output).sum() for weight, output in zip(weights, outputs, strict=True))
        *gradients, toward = torch.autograd.grad(loss, (blocks, partial, query))
        results.append([*outputs, *gradients, toward * scale])
    agree(results[1], results[0], 1e-10)
    if queries == 3:
        kept = reader.write(partial, partial, carry)[1]
        assert set(carry) - set(kept) == {"attnres.inputs"}  # no later layer gets them


def test_gradients_of_normed_values_equal_the_listed_form():
    def definition(sources, direction, eps):
        return listed(sources, direction, eps, normed=True)

    with mock.patch("tests.core.methods.test_listed_form.listed", definition):  # so `readers` keeps no source
        expected, others = readers(definition)
    loss, leaves = readers(normed_read)
    assert abs(loss - expected) < 1e-12 * abs(expected)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(expected, others, create_graph=True)
    agree(first, second)
    agree(
        *(
            torch.autograd.grad(sum(g.square().sum() for g in one), of)
            for one, of in ((first, leaves), (second, others))
        )
    )


@pytest.mark.parametrize("tokens_of", [1, 200])  # stacked, and as operands of neighbors in memory
@pytest.mark.parametrize("gradients", [False, True])
def test_either_kernel_for_cpus_norms_the_values(tokens_of, gradients, monkeypatch):
    monkeypatch.setattr("crosslayer.core.depth_attention.plain.STACKED", 1000)
    generator = torch.Generator().manual_seed(0)
    sources = list(torch.randn(6, tokens_of, 16, dtype=torch.float64, generator=generator).unbind())
    direction = torch.randn(16, dtype=torch.float64, generator=generator)
    with contextlib.nullcontext() if gradients else torch.no_grad():
        agree([normed_read(sources, direction, 1e-6)], [listed(sources, direction, 1e-6, normed=True)])


def test_the_operators_are_sound_with_normed_values():
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 5, 8, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    direction, names = torch.randn(8, dtype=torch.float64, generator=generator).requires_grad_(), torch.ops.crosslayer
    torch.library.opcheck(names.depth_attention.default, (sources, direction, 1e-6, True))
    plain, toward = [source.detach() for source in sources], direction.detach()
    result, scores, inverse = names.depth_attention(plain, toward, 1e-6, True)
    torch.library.opcheck(names.depth_attention_backward.default, (result, scores, inverse, plain, toward, True))


def test_two_phases_equal_one_with_normed_values():
    model = build(config_of({"name": "attnres", "values": "normed", "query_init": 1.0}, num_hidden_layers=5))
    ids = tokens(2, 12)
    with never():
        expected = reads(model, ids)
    with always(), mock.patch.object(two_phase, "merge", wraps=two_phase.merge) as merged:
        found = reads(model, ids)
    assert len(found) == len(expected) == 10 and merged.call_count == 10
    agree(found, expected, 1e-10)
    apart = build(config_of({"name": "attnres", "queries": 3}, num_hidden_layers=5))
    assert reads(apart, ids) == []  # no groups: a group has one query for each reader


def test_released_forms_have_no_ablations():
    for options in (
        {"queries": 2},
        {"values": "unit"},
        {"queries": 3, "window": 2},
        {"values": "normed", "query": "input"},
    ):
        with pytest.raises(ValueError, match="attnres: (queries|values)"):
            AttnRes(**options)
