"""W_c against what it promises: Theorem 3.1, least squares, held-out ridge, and a naive bottom-up loop."""

import re

import numpy as np
import pytest
import torch

from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.decoder.modeling import masks_of
from crosslayer.core.methods import load_method
from crosslayer.verbs.retrofit.convert import calibrate, convert
from crosslayer.verbs.retrofit.moments import Moments, check_enough
from tests.helpers.tiny import VOCABULARY, tiny

METHODS = {
    "uniattn": {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5))},
    "cla": {"name": "cla", "groups": ((1, 2), (3, 4, 5)), "compensation": "attention"},
    "drop": {"name": "drop", "attention": (2, 4), "compensation": "attention"},
    "heads": {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5)), "compensation": "heads"},
    "mlp": {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5)), "compensation": "mlp"},
    "values": {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5)), "compensation": "heads-from-values"},
}


@pytest.fixture(scope="module")
def source():
    return tiny("llama", num_hidden_layers=6)


def text(sequences=24, length=12):
    return torch.randint(3, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(1))


def fitted(source, name, fit, ids, groups=1):
    plain, model = convert_weights(source, []).model, convert_weights(source, [load_method(METHODS[name])]).model
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


@pytest.mark.parametrize("name", ["uniattn", "drop", "mlp", "values"])
def test_against_a_naive_loop_from_below(source, name):
    """Run the whole models for each layer, take X and E by hooks, solve with torch.linalg.lstsq."""
    ids = text()
    target = "mlp" if name == "mlp" else "attention"
    model, fits = fitted(source, name, "lstsq", ids)
    naive = convert_weights(source, [load_method(METHODS[name])]).model
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
        layer = naive.model.layers[fit.layer]
        read = layer.self_attn.v_proj if name == "values" else layer.input_layernorm
        handles.append(read.register_forward_hook(keep("normed")))
        with torch.no_grad():
            source(ids), naive(ids)
            for handle in handles:
                handle.remove()
            x, error = seen["normed"].flatten(0, 1), (seen["theirs"] - seen["ours"]).flatten(0, 1)
            weight = torch.linalg.lstsq(x, error).solution
            written = weight.T
            if name == "values":  # what is added before W_o, and what of it passes through W_o
                written = torch.linalg.pinv(layer.self_attn.o_proj.weight) @ weight.T
                weight = (layer.self_attn.o_proj.weight @ written).T
            layer.compensation.weight.copy_(written)
        before = error.square().sum(-1).mean().sqrt().item()
        after = (error - x @ weight).square().sum(-1).mean().sqrt().item()
        # 1e-6: the norms compute in float32, so that two orders of summation differ by 6e-8 now and then
        assert fit.token_before == pytest.approx(before, rel=1e-6)
        assert fit.token_after == pytest.approx(after, rel=1e-6)
        assert (model.model.layers[fit.layer].compensation.weight - written).abs().max() < 1e-5


def test_the_pseudo_inverse_does_not_invert_what_float32_rounds():
    """Inputs in eight directions, known to float32: what stands in the other 56 is rounding, and must not be fitted."""

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(12, 60, 8, generator=generator) + 1) @ basis
        return x, x @ weight + 2 * torch.randn(12, 60, 64, generator=generator)

    basis = torch.randn(8, 64, generator=torch.Generator().manual_seed(8))
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(9)) / 8
    moments = Moments(torch.zeros(1, 60, 64), [12], 1, [64])
    moments.add(*drawn(0))
    solved, *_ = moments.solve("mean")
    x, error = drawn(1)
    mean, target = moments.means()
    left = [(error - x @ w.float()).square().mean().sqrt() for w in (solved, torch.linalg.pinv(mean) @ target)]
    assert left[0] < 2.2 < 3 < left[1]  # 2 is the noise of the errors
    assert torch.linalg.matrix_rank(solved, rtol=1e-5) == 8


def test_ridge_leaves_one_domain_out():
    """A direction that means the opposite in every other domain is worth nothing in the next one: it is not learnt."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.eye(32) * (torch.arange(32) < 16)
    moments, single = (Moments(torch.zeros(1, 64, 32), sizes, 1, [32]) for sizes in ([8, 8, 8], [24]))
    for sign in (1.0, -1.0, 1.0):
        x = torch.randn(8, 64, 32, generator=generator)
        error = 0.1 * x @ shared + sign * 3 * x @ (torch.eye(32) - shared)
        moments.add(x, error)
        single.add(x, error)
    (_, (penalty,), left), (_, (other,), _) = moments.solve("ridge"), single.solve("ridge")
    assert moments.solve("ridge", roughly=True)[1:] == ((penalty,), None)
    assert penalty >= 10 * other and left > 1 - 1e-3  # what was learnt of one domain does not hold in the next


def test_domains_are_text_like_any_other_but_for_the_penalty(source):
    ids = text()
    one, two = ({"a": ids[:10], "b": ids[10:]}, ids)
    first, second = (convert(source, METHODS["cla"], calibration=given, fit="lstsq").fits for given in (one, two))
    assert [fit.token_after for fit in first] == pytest.approx([fit.token_after for fit in second], rel=1e-9)
    fits = convert(source, METHODS["cla"], calibration=one, fit="layerwise").fits
    assert all(0 < fit.left_out < 2 and fit.penalty is not None for fit in fits)
    with pytest.raises(ValueError, match=r"equal length,.*\[8, 12\]"):
        convert(source, METHODS["cla"], calibration={"a": ids, "b": ids[:, :8]})


@pytest.mark.parametrize("name", ["uniattn", "drop", "mlp", "heads"])
def test_layerwise_corrects_the_change_of_each_layer_alone(source, name):
    """Against a naive loop: the original's layer on the converted stream; W_c does not mend what went wrong below."""
    ids = text()
    model, fits = fitted(source, name, "layerwise", ids)
    naive = convert_weights(source, [load_method(METHODS[name])]).model
    for fit in fits:
        seen = {}
        original, layer = (one.model.layers[fit.layer] for one in (convert_weights(source, []).model, naive))
        hooks = [layer.input_layernorm.register_forward_pre_hook(lambda _, args, s=seen: s.update(into=args[0]))]
        for key, one in (("expected", original), ("reached", layer)):
            if name == "mlp":
                hooks.append(one.register_forward_hook(lambda _, args, out, s=seen, k=key: s.update({k: out[0]})))
            else:
                hooks.append(
                    one.post_attention_layernorm.register_forward_pre_hook(
                        lambda _, args, s=seen, k=key: s.update({k: args[0]})
                    )
                )
        with torch.no_grad():
            naive(ids)
            position = torch.arange(ids.shape[1])[None]
            rotary = naive.model.rotary_emb(seen["into"], position_ids=position)
            mask = masks_of(naive.config, ["full_attention"], seen["into"], None, position)["full_attention"]
            original(seen["into"], {}, rotary, mask)
            error = seen["expected"] - seen["reached"]
            for hook in hooks:
                hook.remove()
            naive.model.layers[fit.layer].compensation.weight.copy_(model.model.layers[fit.layer].compensation.weight)
        assert fit.token_before == pytest.approx(error.square().sum(-1).mean().sqrt().item(), rel=1e-5)
        assert fit.token_after < fit.token_before
    _, stream = fitted(source, name, "ridge", ids)
    assert fits[0].token_before == pytest.approx(stream[0].token_before)  # nothing was wrong below the first
    assert fits[-1].token_before < stream[-1].token_before


def seen_in(model, layer, ids):
    """Return the normed input of a layer and its stream after attention, rows of numpy."""
    seen = {}
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda _, args, out: seen.update(normed=out)),
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: seen.update(stream=args[0])),
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return (seen[name].flatten(0, 1).numpy() for name in ("normed", "stream"))


def test_lstsq_is_least_squares(source):
    """Against numpy's lstsq, on both models' streams from below."""
    ids, entry = text(), METHODS["drop"]
    done = convert(source, entry, calibration=ids, fit="lstsq")
    naive, converted = convert_weights(source, [load_method(entry)]).model, done.model
    for fitted_layer, number in zip(done.fits, (2, 4), strict=True):
        _, expected = seen_in(source, source.model.layers[number], ids)
        normed, stream = seen_in(naive, naive.model.layers[number], ids)
        error = expected - stream
        solved = np.linalg.lstsq(normed, error, rcond=None)[0]
        rest = error - normed @ solved
        assert fitted_layer.token_after == pytest.approx(np.sqrt((rest**2).sum(1).mean()), rel=1e-6)
        assert fitted_layer.token_before == pytest.approx(np.sqrt((error**2).sum(1).mean()), rel=1e-6)
        found = converted.model.layers[number].compensation
        assert np.abs(found.weight.detach().numpy().T - solved).max() < 1e-5 < np.abs(solved).max()
        naive.model.layers[number].compensation.load_state_dict(found.state_dict())
    assert done.weights.new == [f"model.layers.{i}.attn_compensation.weight" for i in (2, 4)]


@pytest.mark.parametrize("name", ["heads", "mlp", "cla"])
def test_a_fit_reports_what_is_left_wherever_w_c_writes(source, name):
    done = convert(source, METHODS[name], calibration=text(), fit="lstsq")
    rest = seen_rest(source, done.model, done.fits[0].layer, name)
    assert done.fits[0].token_after == pytest.approx(np.sqrt((rest**2).sum(1).mean()), rel=1e-6)


def seen_rest(source, model, number, name):
    """Return what the first compensated layer still lacks, run as whole models, rows of numpy."""
    if name != "mlp":
        return np.subtract(*(list(seen_in(m, m.model.layers[number], text()))[1] for m in (source, model)))
    seen = []
    for m in (source, model):
        hook = m.model.layers[number].register_forward_hook(
            lambda _, args, out: seen.append((out[0] if isinstance(out, tuple) else out).flatten(0, 1).numpy())
        )
        with torch.no_grad():
            m(text())
        hook.remove()
    return seen[0] - seen[1]


def test_ridge_shrinks_what_noise_would_fit(source):
    """Held-out sequences choose the penalty: with few tokens it must not be the smallest."""
    _, fits = fitted(source, "uniattn", "ridge", text(16, 6))
    assert max(fit.penalty for fit in fits) > 1e-6


def test_the_original_and_everything_but_wc_stay(source):
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    made = convert(source, METHODS["uniattn"], calibration=text(), fit="lstsq")
    assert all(torch.equal(source.state_dict()[name], weight) for name, weight in before.items())
    found = made.model.state_dict()
    assert made.weights.new == [f"model.layers.{i}.attn_compensation.weight" for i in (2, 4, 5)]
    assert all(torch.equal(found[n], before[n]) for n in found if n not in made.weights.new)
    assert all(found[name].abs().max() > 0 for name in made.weights.new)


def test_a_mixer_below_separates_the_streams(source):
    """Layers that mix have the same weights and another output: the original must not be led through them."""
    below = [{"name": "resformer", "mode": "identity"}, {"name": "uniattn", "superblocks": ((3, 4),)}]
    model = convert(source, below, fit="zero").model
    fit = convert(source, below, calibration=text(), fit="lstsq").fits[0]
    seen = []
    for one in (source, model):
        hook = one.model.layers[4].post_attention_layernorm.register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        with torch.no_grad():
            one(text())
        hook.remove()
    assert fit.token_before == pytest.approx((seen[0] - seen[1]).square().sum(-1).mean().sqrt().item(), rel=1e-6)


def test_what_changes_outside_of_w_c_is_fitted_by_ridge(source):
    """No layerwise fit corrects a dropped MLP: ridge by default, and layerwise is refused.

    Otherwise W_o of readers is refitted, where W_c writes to the stream.
    """
    both = {"name": "drop", "attention": (2, 4), "mlp": (4,), "compensation": "attention"}
    alone = {"name": "drop", "attention": (4,), "mlp": (1,), "compensation": "attention"}
    ids = text()
    assert convert(source, METHODS["cla"], calibration=ids).fit == "refit"
    assert convert(source, METHODS["mlp"], calibration=ids).fit == "layerwise"
    assert convert(source, "cla").fit is None
    for method, layers in ((both, [4]), (alone, [1])):
        assert convert(source, method, calibration=ids).fit == "ridge"
        with pytest.raises(ValueError, match=rf"layers {re.escape(str(layers))}.*use ridge"):
            convert(source, method, calibration=ids, fit="layerwise")


@pytest.mark.parametrize("domains", [1, 2, 3, 6])
@pytest.mark.parametrize("fit", ["lstsq", "ridge"])
def test_the_windows_that_are_required_are_the_fewest_that_do(domains, fit):
    def message(count):
        sizes = [len(range(first, count, domains)) for first in range(domains)]
        try:
            check_enough(576, sizes, 128, fit)
        except ValueError as error:
            return str(error)
        return None

    words = message(domains)
    windows = int(re.search(r"needs at least (\d+) calibration windows of 128 tokens", words)[1])
    assert message(windows) is None and all(message(count) for count in range(domains, windows))
    held = {"lstsq": 0, "ridge": windows // 8 if domains == 1 else -(-windows // domains)}[fit]
    assert f"got {domains}: 2 tokens for each of 576 inputs" in words
    assert windows - held == 9  # 1,152 tokens


def test_bad_calibrations(source):
    with pytest.raises(ValueError, match="uniattn, attnres: W_c"):
        convert(source, [METHODS["uniattn"], "attnres"], calibration=text())
    with pytest.raises(ValueError, match="fit 'refit' needs calibration=…"):
        convert(source, METHODS["uniattn"])
    with pytest.raises(ValueError, match="6 calibration.*got 2"):
        convert(source, METHODS["uniattn"], calibration=text(2, 12), fit="lstsq")
    with pytest.raises(ValueError, match="8 calibration.*got 7"):
        convert(source, METHODS["uniattn"], calibration=text(7, 12), fit="layerwise")
    with pytest.raises(ValueError, match="layer.*W_c.*fit"):
        calibrate(convert_weights(source, []).model, convert_weights(source, [load_method("cla")]).model, text())
    with pytest.raises(ValueError, match="1.*24 .*got 25"):
        fitted(source, "uniattn", "mean", text(), groups=25)
