"""Gemma 2, whose masks alternate, is retrofitted within a mask and refused across; scores are capped all the while."""

import pytest
import torch

import crosslayer
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.methods import load_method, method_class
from crosslayer.core.options import parse_layers
from crosslayer.probe.what_if import what_if
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.page import title
from tests.helpers.tiny import tiny, tokens

MASKS = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
APART = {"name": "uniattn", "superblocks": ((2, 4), (3, 5))}


def gemma2(**changes):
    return tiny("gemma2", **{**MASKS, "final_logit_softcapping": 5.0, **changes})


@pytest.mark.parametrize("name", ["uniattn", "cla", "drop"])
def test_what_if_equals_the_retrofit_without_training(name):
    source, ids = gemma2(), tokens()
    method = method_class(name).from_groups(parse_layers("2+4,3+5" if name != "drop" else "2,3", 8), 8)
    with torch.no_grad():
        before, retrofitted = source(ids).logits, convert_weights(source, [method]).model(ids).logits
        with what_if(source, method.plan(8)):
            pretended = source(ids).logits
    assert (pretended - before).abs().max() > 1e-2
    assert torch.equal(pretended, retrofitted)


@pytest.mark.parametrize("method", [{"name": "cla"}, {"name": "uniattn", "superblocks": ((2, 3),)}], ids=str)
def test_sharing_across_masks_is_refused(method):
    with pytest.raises(ValueError, match="different types"):
        convert(gemma2(), method)


@pytest.mark.parametrize("target", ["attention", "mlp"])
@pytest.mark.parametrize("fit", ["layerwise", "ridge"])
def test_the_compensation_stands_outside_of_the_norm_on_the_update(fit, target):
    """A fitted W_c reduces the error of sharing and adds to the stream: a change of it is exact."""
    text = {"one": tokens(24, 24, 1), "two": tokens(24, 24, 2)}
    converted = convert(gemma2(), {**APART, "compensation": target}, calibration=text, fit=fit)
    assert [fitted.layer for fitted in converted.fits] == [4, 5]
    assert all(fitted.token_after < fitted.token_before for fitted in converted.fits)
    layer, streams = converted.model.model.layers[5], []
    layer.register_forward_hook(lambda module, args, output: streams.append(output[0]))
    layer.mlp_norm.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    layer.input_layernorm.register_forward_hook(lambda module, args, output: streams.append(output))
    with torch.no_grad():
        converted.model(tokens())
        normed, middle, after = streams
        change = torch.randn(32, 32, dtype=torch.float64)
        layer.compensation.weight += change
        converted.model(tokens())
    reached = (streams[4] - middle) if target == "attention" else (streams[5] - after)
    assert (reached - normed @ change.T).abs().max() < 1e-10


def test_heads_are_not_compensated_through_a_norm():
    with pytest.raises(ValueError, match="W_c.*W_o"):
        convert(gemma2(), {**APART, "compensation": "heads"}, calibration=tokens(48), fit="ridge")


def test_a_model_that_loses_whole_layers_is_gemmas_own():
    source, ids = gemma2(), tokens()
    shorter = convert_weights(source, [load_method({"name": "drop", "layers": (1, 2)})]).model
    assert type(shorter) is type(source) and shorter.config.num_hidden_layers == 6
    with torch.no_grad(), what_if(source, {"name": "drop", "layers": (1, 2)}):
        assert torch.equal(shorter(ids).logits, source(ids).logits)


@pytest.mark.slow  # Gemma 3 does so in every run
def test_a_retrofit_verifies():
    converted = convert(gemma2(dtype=torch.float32), APART | {"compensation": None})
    verification = crosslayer.verify(converted.model, dtypes=("float32",), compile_backend="aot_eager")
    assert [check for check in verification.applicable if check.status != "PASS"] == []
    skipped = [check.name for check in verification.checks if check.status == "NOT APPLICABLE"]
    assert skipped == ["manifest", "eager and SDPA"]


def test_titles_show_groups_with_gaps():
    assert title([load_method({**APART, "compensation": None})]) == "uniattn (superblocks 2+4, 3+5)"
