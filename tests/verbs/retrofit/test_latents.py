"""Latents fitted to text: moments, bits, and what the fitted model computes."""

import numpy as np
import pytest
import torch

from crosslayer import convert, retrofit
from crosslayer.core.latents import ERRORS, SCALE, UNIT
from crosslayer.core.methods.kv_latents import KVLatents
from crosslayer.corpus.windows import repeating
from crosslayer.testing.tiny import build, config_of, tokens
from crosslayer.verbs.retrofit import latents, sentences
from crosslayer.verbs.retrofit.convert import plain_decoder
from crosslayer.verbs.retrofit.latents import choose_bits, find_bases, levels_of, measure_moments, with_errors
from crosslayer.verbs.retrofit.page import panels

SHAPE = {"attention_bias": True, "qk_norm": True}
TEXT = {"one": tokens(6, 24), "two": tokens(6, 24, seed=1)}


@pytest.fixture(scope="module")
def model():
    return build(config_of(None, **SHAPE))


@pytest.fixture(scope="module")
def moments(model):
    return measure_moments(plain_decoder(model), TEXT, KVLatents().plan(6))


def test_moments(model, moments):
    """Mean and covariances by loops over tokens, of which the first of a text counts more."""
    with torch.no_grad():
        streams = model(repeating(torch.cat(list(TEXT.values())))[0], output_hidden_states=True).hidden_states
        states = []
        for layer in (2, 3):
            block = model.model.layers[layer]
            normed = block.input_layernorm(streams[layer])
            both = torch.cat([block.self_attn.k_proj(normed), block.self_attn.v_proj(normed)], -1)
            states.append([(latents.FIRST if t == 0 else 1, row[t]) for row in both for t in range(24)])
    total = sum(weight for weight, _ in states[1])
    means = [sum(weight * y for weight, y in rows) / total for rows in states]
    assert torch.allclose(moments[3].mean, means[1])
    covariance = sum(weight * torch.outer(y - means[1], y - means[1]) for weight, y in states[1]) / total
    assert torch.allclose(moments[3].covariance, covariance)
    pairs = zip(*states, strict=True)
    with_below = sum(weight * torch.outer(y - means[1], below - means[0]) for (weight, below), (_, y) in pairs) / total
    assert torch.allclose(moments[3].with_below, with_below)


def test_information_is_that_of_the_loss(model):
    """Moving a layer's values by δ costs ½ δᵀ G δ nats a token, when every token of many texts moves by itself."""
    text = {"text": tokens(160, 12)}
    ids, _ = repeating(text["text"])
    information = measure_moments(plain_decoder(model), text, KVLatents(groups=()).plan(6))[5].information[16:, 16:]
    generator = torch.Generator().manual_seed(0)
    size = 0.05
    moved, changes = build(config_of(None, **SHAPE)), []
    with torch.no_grad():
        before = moved(ids).logits.log_softmax(-1)
        for _ in range(4):
            noise = size * torch.randn(160, 12, 16, generator=generator, dtype=torch.float64)
            noise[:, 0] = 0  # the information is that of all tokens but the first
            hook = moved.model.layers[5].self_attn.v_proj.register_forward_hook(
                lambda m, i, out, noise=noise: out + noise
            )
            after = moved(ids).logits.log_softmax(-1)
            hook.remove()
            changes.append(float((before.exp() * (before - after)).sum(-1).sum() / (160 * 12)))
    expected = float(information.trace()) * size**2 / 2
    # gradients of sampled tokens: 160 texts of 11 tokens, each with one sample, leave about a tenth
    assert np.mean(changes) == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("groups", [None, (), ((0, 2, 5), (1, 3))])
def test_full_rank_changes_nothing(model, groups):
    converted = convert(model, KVLatents(rank=1.0, groups=groups), calibration=TEXT).model
    with torch.no_grad():
        gap = (converted(TEXT["one"]).logits - model(TEXT["one"]).logits).abs().max()
    assert gap < 1e-5  # float32 norms


def test_information_with_errors(model):
    """Latents without errors have the original's Fisher information; those of one bit have another."""
    method = KVLatents(groups=())
    moments = measure_moments(plain_decoder(model), TEXT, method.plan(6))

    def measured(**options):
        latents = convert(model, KVLatents(groups=(), **options), moments=moments).model
        return [own.information for own in with_errors(latents, moments, TEXT)]

    for own, exact, coarse in zip(moments, measured(rank=1.0), measured(bits=((1, 0, 0, 0),) * 6), strict=True):
        size = own.information.norm()
        assert (exact - own.information).norm() < 1e-4 * size  # float32 norms
        assert (coarse - own.information).norm() > 0.01 * size


def test_bits_need_text(model):
    with pytest.raises(ValueError, match="bits need calibration"):
        convert(model, KVLatents(bits=((4, 2, 1, 1),) * 6))


def test_beside_dropped_attention(model):
    """Layers that keep attention are fitted: at full rank nothing else changes."""
    drop = {"name": "drop", "attention": (2,)}
    methods = [KVLatents(rank=1.0, groups=((0, 1, 3), (4, 5))), drop]
    converted, dropped = (convert(model, each, calibration=TEXT).model for each in (methods, drop))
    with torch.no_grad():
        assert (converted(TEXT["one"]).logits - dropped(TEXT["one"]).logits).abs().max() < 1e-5


def test_bases(moments):
    """Channels have variance 1 and no correlation, and an error of one costs its λ."""
    plan = KVLatents(groups=()).plan(6)
    for own, basis in zip(moments, find_bases(moments, plan, torch.ones(6, 32)), strict=True):
        floor = latents.SMALLEST * own.covariance.diagonal().mean() * torch.eye(32).double()
        assert torch.allclose(basis.down @ (own.covariance + floor) @ basis.down.T, torch.eye(32).double(), atol=1e-6)
        ridge = latents.RIDGE * own.information.diagonal().mean() * torch.eye(32).double()
        costs = basis.up.T @ (own.information + ridge) @ basis.up
        assert torch.allclose(costs, basis.cost.diag(), atol=1e-8 * float(basis.cost.max()))


def test_text_unlike_what_was_fitted_to():
    """Of text with two tokens most channels never vary: other text must not make their latents huge."""
    model = build(config_of(None)).float()  # in float64 rounding is small enough
    few = 1 + tokens(8, 24) % 2
    latent = convert(model, KVLatents(rank=1.0), calibration=few).model
    largest = []
    for block in latent.model.layers:
        block.self_attn.latent_encoder.register_forward_hook(lambda m, i, out: largest.append(float(out.abs().max())))
    with torch.no_grad():
        assert latent(tokens(4, 24)).logits.isfinite().all()
    assert max(largest) < 1000  # standard deviations: a hundred where none was seen; without SMALLEST they overflow


@pytest.mark.parametrize(
    ("axes", "share"),
    [("bits,rank", 0.08), ("bits,rank", 0.15), ("bits,rank", 0.3), ("bits", 0.15), ("rank", 0.25), ("rank", 0.5)],
)
def test_bits_cannot_be_exchanged(moments, axes, share):
    """All bytes are spent, and moving a bit, or a channel, from one place to another saves nothing."""
    plan, levels = KVLatents(groups=()).plan(6), levels_of(axes.split(","))
    bits = choose_bits(moments, plan, share, levels)
    assert {number for row in bits for number in row} <= set(levels)
    scales = 0 if axes == "rank" else 6 * SCALE
    assert round(share * 2 * 32 * 6) - levels.step < sum(map(sum, bits)) + scales <= round(share * 2 * 32 * 6)
    cost = torch.stack([basis.cost for basis in find_bases(moments, plan, torch.ones(6, 32))])
    cost = cost.unflatten(1, (-1, UNIT)).mean(-1).flatten().tolist()
    flat = [number for row in bits for number in row]
    step = levels.step
    more = [c * (ERRORS[b] - ERRORS[b + step]) if b < levels[-1] else 0.0 for c, b in zip(cost, flat, strict=True)]
    less = [
        c * (ERRORS[b - step] - ERRORS[b]) if b > max(levels[0], step * (index % 4 == 0)) else float("inf")
        for index, (c, b) in enumerate(zip(cost, flat, strict=True))
    ]
    assert max(more) <= min(less) * (1 + 1e-9)


def test_the_fit_is_better_than_weights_alone(model):
    def divergence(converted):
        with torch.no_grad():
            ids = tokens(8, 24, seed=2)
            before, after = (one(ids).logits.log_softmax(-1) for one in (model, converted))
            return float((before.exp() * (before - after)).sum(-1).mean())

    method = KVLatents(rank=0.5)
    assert divergence(convert(model, method, calibration=TEXT).model) < divergence(convert(model, method).model)


def test_report(model, monkeypatch):
    """A budget becomes bits, and the report's bytes are the cache's."""
    monkeypatch.setattr(sentences, "SHOWN", 20)  # of 6 layers
    report = retrofit(
        model,
        {"one": tokens(20, 24)},
        method=KVLatents(groups=((0, 1, 2), (3, 4, 5))),
        kv_budget=0.15,
        calibration_text={"two": TEXT["two"]},
        windows=16,
        calibration=6,
        length=24,
        full=True,
    )
    assert [row.name for row in report.alternatives] == [
        *("retrofit", "original, fp8", "original, int8"),
        *("latents by depth, bits and rank", "latents by depth, bits and rank", "latents by bits"),
    ]
    # by rank alone a layer's smallest latent takes a quarter of these keys and values: left out
    assert [row.share for row in report.alternatives[3:]] == pytest.approx([0.075, 0.3, 0.15], abs=0.04)
    assert [row.options for row in report.alternatives] == [
        *("", "--kv-bits fp8", "--kv-bits 8", "--kv-budget 0.075 --axes depth,bits,rank"),
        *("--kv-budget 0.3 --axes depth,bits,rank", "--kv-budget 0.15 --axes bits"),
    ]
    (line,) = panels(report)[0].lines  # keys and values together
    assert sum(line.y) / 6 == pytest.approx(100 * report.cache.share)
    assert report.alternatives[0].share == pytest.approx(0.15, abs=0.03)  # memory is allocated for 16 tokens at a time
    assert report.cache.share == pytest.approx(0.15, abs=0.01)
    (method,) = report.methods
    assert len(method["bits"]) == 6 and method["groups"] == ((0, 1, 2), (3, 4, 5))
    assert report.title == "kv_latents (bits of 6 layers, groups 0-2, 3-5)"
    assert report.calibration.fit == "fisher" and report.calibration.windows == {"two": 6}


def test_axes_choose_bits_rank_and_depth(model):
    """Only what an axis allows changes, and the cache keeps to the budget."""

    def entry(axes):
        options = {"windows": 16, "calibration": 6, "length": 24, "kv_budget": 0.25}
        report = retrofit(model, {"one": tokens(20, 24)}, axes=axes, calibration_text={"two": TEXT["two"]}, **options)
        assert report.cache.share == pytest.approx(0.25, abs=0.05 if axes == "rank" else 0.01)
        return report.methods[0]

    every, bits, rank = (entry(axes) for axes in ("depth,bits,rank", "bits", "rank"))
    assert every.get("groups") is None and bits["groups"] == () and rank["groups"] == ()
    assert {number for row in bits["bits"] for number in row} <= set(range(1, 9))
    assert {number for row in rank["bits"] for number in row} == {0, 16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"method": "kv_latents", "kv_budget": 0.001},
            "`kv_budget` must be 0.047 to 0.531 for these latents, got 0.001",
        ),
        ({"method": "drop", "kv_budget": 0.5}, "or the bits of a `method` with latents"),
        ({"method": "kv_latents", "kl_budget": 0.5}, "give one of"),
        ({"kv_budget": 0.2, "axes": "depth,bit"}, "axes must be one of 'depth', 'bits', 'rank', got 'bit'"),
        ({"kl_budget": 0.2, "axes": "bits"}, "`axes` bits needs `kv_budget`, and no `method`"),
        ({"method": "kv_latents", "kv_budget": 0.2, "layers": "1,2"}, "`layers` 1,2 has no effect"),
    ],
)
def test_refusals(model, options, message):
    with pytest.raises(ValueError, match=message):
        retrofit(model, {"one": tokens(20, 24)}, windows=16, calibration=4, length=24, **options)
