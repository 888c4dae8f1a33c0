"""Attention Residuals: the ablations equal their loops, and the published form is the default."""

import pytest
import torch

from crosslayer import testing as contract
from crosslayer.core.depth_attention import depth_scores
from crosslayer.core.methods.attnres import AttnRes
from crosslayer.core.sources import Sources
from crosslayer.testing.tiny import build, close, config_of
from tests.core.methods.naive import Naive, attend, check
from tests.helpers.tiny import tokens

ABLATIONS = {
    "input query": {"query": "input"},
    "input query, blocks": {"query": "input", "block": 5},
    "sigmoid": {"weights": "sigmoid"},
    "static": {"weights": "static"},
    "static, heads, blocks": {"weights": "static", "depth_heads": 4, "block": 3},
    "no key norm": {"key_norm": False},
    "heads": {"depth_heads": 4},
    "heads, blocks": {"depth_heads": 4, "block": 4},
    "window": {"window": 3},
    "all": {"query": "input", "weights": "sigmoid", "key_norm": False, "depth_heads": 2, "window": 2, "block": 3},
}
QUICK = (
    contract.cached_equals_full,
    contract.causal,
    contract.gradients_equal_under_checkpointing,
    contract.save_and_load_are_bit_equal,
    contract.documented,
)


class Loops(Naive):
    """The definition, token by token and head by head; `options` are the method's."""

    def __init__(self, model):
        super().__init__(model)
        self.options = {"block": None, **model.config.cross_layer[0]}

    def run(self, ids):
        outputs = [self.model.model.embed_tokens(ids)]
        for i, layer in enumerate(self.layers):
            x = self.read(outputs, layer.attn_residual)
            q, k, v = self.states(i, layer.input_layernorm(x))
            outputs.append(layer.self_attn.o_proj(attend(self.model, i, q, k, v)))
            outputs.append(layer.mlp(layer.post_attention_layernorm(self.read(outputs, layer.mlp_residual))))
        return self.model.lm_head(self.model.model.norm(self.read(outputs, self.model.model.final_residual)))

    def read(self, outputs, residual):
        size, rest, sources = self.options["block"] or 1, outputs[1:], [outputs[0]]
        sizes = list(size) if isinstance(size, list | tuple) else [size] * len(outputs)
        while rest:  # the last block may not be complete
            sources.append(sum(rest[: sizes[0]]))
            rest, sizes = rest[sizes[0] :], sizes[1:]
        if len(sources) == 1:
            return sources[0]
        window = self.options.get("window")
        sources = sources if window is None else [sources[0], *sources[1:][-window:]]
        rows = [self.token([source[t] for source in sources], residual) for t in range(len(outputs[0]))]
        return torch.stack(rows)

    def token(self, sources, residual):
        def normed(v):
            return v / torch.sqrt((v * v).mean() + 1e-6)

        heads = self.options.get("depth_heads", 1)
        parts = []
        for head in range(heads):
            group = slice(head * len(sources[0]) // heads, (head + 1) * len(sources[0]) // heads)
            if self.options.get("weights") == "static":
                weights = residual.weight[:, head]
            else:
                query = residual.query
                if self.options.get("query") == "input":
                    query = torch.stack([row @ normed(sources[-1]) for row in query])
                keys = (
                    sources if not self.options.get("key_norm", True) else [normed(v) * residual.gain for v in sources]
                )
                scores = torch.stack([query[group] @ key[group] for key in keys])
                sigmoid = self.options.get("weights") == "sigmoid"
                weights = 1 / (1 + torch.exp(-scores)) if sigmoid else torch.exp(scores) / torch.exp(scores).sum()
            parts.append(sum(weight * v[group] for weight, v in zip(weights, sources, strict=True)))
        return torch.cat(parts)


@pytest.mark.parametrize("case", ABLATIONS)
def test_ablations_equal_their_loops(case):
    check(build(config_of([{"name": "attnres", **ABLATIONS[case]}])), Loops)


@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", ["static, heads, blocks", "all", "window"])
def test_ablations_hold_the_contract(case, check):
    check(config_of([{"name": "attnres", **ABLATIONS[case]}]))


@pytest.mark.slow
@pytest.mark.parametrize("check", (*contract.BY_OPTIONS, contract.compiled_equals_eager), ids=lambda c: c.__name__)
@pytest.mark.parametrize("case", ABLATIONS)
def test_every_ablation_holds_the_whole_contract(case, check):
    check(config_of([{"name": "attnres", **ABLATIONS[case]}]))


def test_ablations_begin_uniform():
    """As published: a zero query. A model that is just built reads the mean, one half of each for sigmoids."""
    from crosslayer.core.decoder import CrossLayerForCausalLM

    for options, parts in (({"weights": "static"}, 1 / 3), ({"query": "input"}, 1 / 3), ({"weights": "sigmoid"}, 0.5)):
        residual = CrossLayerForCausalLM(config_of([{"name": "attnres", **options}])).model.layers[1].attn_residual
        stream, closed = torch.randn(1, 2, 32), (torch.randn(1, 2, 32), torch.randn(1, 2, 32))
        result, _ = residual.read(stream, {"attnres.sources": Sources(closed)})
        assert torch.allclose(result, (stream + closed[0] + closed[1]) * parts, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": "none"}, "query must be one of 'static', 'input', got 'none'"),
        ({"weights": "mean"}, "weights must be one of 'softmax', 'sigmoid', 'static', got 'mean'"),
        ({"weights": "static", "query": "input"}, "weights 'static' has neither queries nor keys"),
        ({"weights": "static", "key_norm": False}, "weights 'static' has neither queries nor keys"),
        ({"depth_heads": 0}, "depth_heads must be at least 1, got 0"),
        ({"depth_heads": 5}, "depth_heads must divide hidden_size = 32, got 5"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": 12}, "window must be at most 11 .* 13 sources, got 12"),
        ({"window": 2, "block": 6}, "window must be at most 1 .* 3 sources, got 2"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=f"attnres: {message}"):
        config_of([{"name": "attnres", **options}])


def test_the_published_form_is_the_default():
    assert AttnRes().published and AttnRes(block=4).published and not AttnRes(depth_heads=2).published
    names = set(build(config_of(["attnres"])).state_dict())
    assert {name.rsplit(".", 1)[1] for name in names if "residual" in name} == {"query", "gain"}


def test_zero_queries_are_the_prenorm_transformer():
    """A mean over sources is the plain sum over their number, which a norm without eps undoes.

    1e-12: the norms of both are given float64, since the modules' own computes in float32 whatever the dtype.
    """
    config = config_of(["attnres"], rms_norm_eps=0.0)
    ours, plain = build(config), build(config_of([], rms_norm_eps=0.0))
    weights = plain.state_dict()
    ours.load_state_dict(ours.state_dict() | weights)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("residual.query"):
                parameter.zero_()
    for model in (ours, plain):
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = lambda x, m=module: m.weight * x / x.square().mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        result, expected = ours(tokens()).logits, plain(tokens()).logits
    close(result / expected.abs().max(), expected / expected.abs().max(), "zero queries and the plain sum", 1e-12)


@pytest.mark.parametrize("reader", [1, 6, 12])
def test_scaling_a_source_leaves_the_weights_as_they_are(reader):
    model = build(config_of(["attnres"], rms_norm_eps=0.0)).model
    residuals = [r for layer in model.layers for r in (layer.attn_residual, layer.mlp_residual)]
    residual = [*residuals, model.final_residual][reader]
    *closed, stream = torch.randn(reader + 1, 2, 5, 32, dtype=torch.float64)
    direction = residual.query * residual.gain
    weights = torch.stack([depth_scores(v, direction, 0.0) for v in (*closed, stream)]).softmax(dim=0)
    read, _ = residual.read(stream, {"attnres.sources": Sources(closed)})
    closed[0] = closed[0] * 1e3
    again, _ = residual.read(stream, {"attnres.sources": Sources(closed)})
    assert weights.shape == (reader + 1, 2, 5) and weights.std() > 0
    close(again - read, weights[0].unsqueeze(-1) * closed[0] * 0.999, "a scaled source with its weight", 1e-10)
