"""W_c against what it promises: Theorem 3.1, least squares, held-out ridge, and a naive bottom-up loop."""

import pytest
import torch

from crosslayer.method import load_method
from crosslayer.retrofit.calibrate import calibrate
from crosslayer.retrofit.convert import convert
from crosslayer.retrofit.run import retrofit
from tests.tiny import VOCABULARY, tiny

METHODS = {
    "uniattn": {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5))},
    "cla": {"name": "cla", "groups": ((1, 2), (3, 4, 5)), "compensation": "attention"},
    "svformer": {"name": "svformer", "anchors": (0, 1, 2), "compensation": "attention"},
    "drop": {"name": "drop", "attention": (2, 4), "compensation": "attention"},
    "heads": {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5)), "compensation": "heads"},
    "mlp": {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5)), "compensation": "mlp"},
}


@pytest.fixture(scope="module")
def source():
    return tiny("llama", num_hidden_layers=6)


def text(sequences=24, length=12):
    return torch.randint(3, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(1))


def fitted(source, name, fit, ids, groups=1):
    plain, model = convert(source, []).model, convert(source, [load_method(METHODS[name])]).model
    return model, calibrate(plain, model, ids, fit, groups)


@pytest.mark.parametrize("name", METHODS)
def test_least_squares_beat_zero_on_every_token_and_ridge_never_loses_much(source, name):
    ids = text()
    _, zero = fitted(source, name, "zero", ids)
    _, least = fitted(source, name, "lstsq", ids)
    _, ridge = fitted(source, name, "ridge", ids)
    for one, two, three in zip(zero, least, ridge, strict=True):
        assert one.token_after == pytest.approx(one.token_before)
        assert two.token_after < two.token_before * 0.97
        assert three.penalty is not None and three.token_after <= three.token_before
    assert zero[0].token_before == pytest.approx(least[0].token_before)  # nothing below the first has changed


def test_the_mean_fit_interpolates_the_means_where_rows_are_few(source):
    """Theorem 3.1: with fewer positions than inputs the mean error vanishes, whatever becomes of the tokens."""
    _, fits = fitted(source, "uniattn", "mean", text())
    assert all(fit.mean_after < 1e-9 < 1e-2 < fit.mean_before for fit in fits)
    assert any(fit.token_after > fit.token_before for fit in fits)
    _, more = fitted(source, "uniattn", "mean", text(), groups=8)  # 96 rows for 32 inputs: no interpolation
    assert all(fit.mean_after > 1e-3 for fit in more)


@pytest.mark.parametrize("name", ["uniattn", "drop", "mlp"])
def test_against_a_naive_loop_from_below(source, name):
    """Run the whole models for each layer, take X and E by hooks, solve with torch.linalg.lstsq."""
    ids = text()
    target = "mlp" if name == "mlp" else "attention"
    model, fits = fitted(source, name, "lstsq", ids)
    naive = convert(source, [load_method(METHODS[name])]).model
    for fit in fits:
        seen = {}

        def keep(key, seen=seen):
            def hook(module, args, output=None):
                seen[key] = (args[0] if output is None else output[0] if isinstance(output, tuple) else output).detach()

            return hook

        handles = []
        for key, one in (("theirs", source), ("ours", naive)):
            layer = one.model.layers[fit.layer]
            if target == "mlp":
                handles.append(layer.register_forward_hook(keep(key)))
            else:
                handles.append(layer.post_attention_layernorm.register_forward_pre_hook(keep(key)))
        handles.append(naive.model.layers[fit.layer].input_layernorm.register_forward_hook(keep("normed")))
        with torch.no_grad():
            source(ids), naive(ids)
            for handle in handles:
                handle.remove()
            x, error = seen["normed"].flatten(0, 1), (seen["theirs"] - seen["ours"]).flatten(0, 1)
            weight = torch.linalg.lstsq(x, error).solution
            naive.model.layers[fit.layer].compensation.weight.copy_(weight.T)
        before = error.square().sum(-1).mean().sqrt().item()
        after = (error - x @ weight).square().sum(-1).mean().sqrt().item()
        # 1e-6: the norms compute in float32, so that two orders of summation differ by 6e-8 now and then
        assert fit.token_before == pytest.approx(before, rel=1e-6)
        assert fit.token_after == pytest.approx(after, rel=1e-6)
        assert (model.model.layers[fit.layer].compensation.weight - weight.T).abs().max() < 1e-5


def test_ridge_shrinks_what_noise_would_fit(source):
    """Held-out sequences choose the penalty: with few tokens it must not be the smallest."""
    _, fits = fitted(source, "uniattn", "ridge", text(16, 6))
    assert max(fit.penalty for fit in fits) > 1e-6


def test_the_original_and_everything_but_wc_stay(source):
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    made = retrofit(source, METHODS["uniattn"], calibration=text(), fit="lstsq")
    assert all(torch.equal(source.state_dict()[name], weight) for name, weight in before.items())
    found = made.model.state_dict()
    assert made.new == [f"model.layers.{i}.compensation.weight" for i in (2, 4, 5)]
    assert all(torch.equal(found[n], before[n]) for n in found if n not in made.new)
    assert all(found[name].abs().max() > 0 for name in made.new)


def test_a_mixer_below_parts_the_streams(source):
    """Layers that mix have the same weights and another output: the original must not be led through them."""
    below = [{"name": "resformer", "mode": "identity"}, {"name": "uniattn", "superblocks": ((3, 4),)}]
    model = retrofit(source, below, fit="zero").model
    fit = retrofit(source, below, calibration=text(), fit="lstsq").fits[0]
    seen = []
    for one in (source, model):
        hook = one.model.layers[4].post_attention_layernorm.register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        with torch.no_grad():
            one(text())
        hook.remove()
    assert fit.token_before == pytest.approx((seen[0] - seen[1]).square().sum(-1).mean().sqrt().item(), rel=1e-6)


def test_bad_calibrations(source):
    with pytest.raises(ValueError, match="uniattn, attnres: W_c is fitted between plain residual streams"):
        retrofit(source, [METHODS["uniattn"], "attnres"], calibration=text())
    with pytest.raises(ValueError, match="fit 'ridge' needs calibration=…"):
        retrofit(source, METHODS["uniattn"])
    with pytest.raises(ValueError, match=r"calibration text has 24 tokens; lstsq needs at least 64"):
        retrofit(source, METHODS["uniattn"], calibration=text(2, 12), fit="lstsq")
    with pytest.raises(ValueError, match=r"calibration text has 84 tokens; ridge needs at least 96"):
        retrofit(source, METHODS["uniattn"], calibration=text(7, 12))
    with pytest.raises(ValueError, match="no layer has a W_c to fit"):
        calibrate(convert(source, []).model, convert(source, [load_method("cla")]).model, text())
    with pytest.raises(ValueError, match="groups is 25; it must be between 1 and the 24"):
        fitted(source, "uniattn", "mean", text(), groups=25)
