"""Gemma 3, with windows in five of six layers, is retrofitted within a mask: shared, dropped, evicted and exported."""

import pytest
import torch
from transformers import DynamicCache

import crosslayer
from crosslayer.cache.running import smaller_cache
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.methods import load_method, method_class
from crosslayer.core.options import parse_layers
from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.embedded import missing_packages
from crosslayer.probe.what_if import what_if
from crosslayer.verbs.retrofit.convert import convert
from tests.helpers.allocation import held_bytes
from tests.helpers.tiny import tiny, tokens

LAYERS = {"num_hidden_layers": 12, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
}
PAIRS = {"name": "cla", "groups": ((1, 2), (3, 4), (5, 11))}


def gemma3(**changes):
    return tiny("gemma3_text", **{**LAYERS, "num_key_value_heads": 1, "rope_parameters": ROPE, **changes})


@pytest.mark.parametrize(("name", "layers"), [("uniattn", "1-4,7+9,5+11"), ("cla", "1-4,7+9,5+11"), ("drop", "2,5")])
def test_what_if_equals_the_retrofit_without_training(name, layers):
    source, ids = gemma3(), tokens()
    method = method_class(name).from_groups(parse_layers(layers, 12), 12)
    with torch.no_grad():
        before, retrofitted = source(ids).logits, convert_weights(source, [method]).model(ids).logits
        with what_if(source, method.plan(12)):
            pretended = source(ids).logits
    assert (pretended - before).abs().max() > 1e-2
    assert torch.equal(pretended, retrofitted)


@pytest.mark.parametrize("method", [{"name": "cla"}, {"name": "uniattn", "superblocks": ((4, 5),)}], ids=str)
def test_sharing_across_masks_is_refused(method):
    with pytest.raises(ValueError, match=r"layer 5 \(full_attention\) reads .* of layer 4 \(sliding_attention\)"):
        convert(gemma3(), method)


@pytest.mark.parametrize("fit", ["layerwise", "ridge"])
def test_the_compensation_reduces_the_error(fit):
    """Both layer types are read with their own rotary tables, or the error would grow."""
    calibration = {"one": tokens(24, 24, 1), "two": tokens(24, 24, 2)}
    converted = convert(gemma3(), {**PAIRS, "compensation": "attention"}, calibration=calibration, fit=fit)
    assert [fitted.layer for fitted in converted.fits] == [2, 4, 11]
    assert all(fitted.token_after < fitted.token_before for fitted in converted.fits)


def test_the_top_half_shares_within_a_mask():
    options = {"length": 12, "windows": 16, "calibration": 40}
    report = crosslayer.retrofit(gemma3(dtype=torch.float32), tokens(120, 12), method="cla", **options)
    assert report.calibration.fit == "layerwise" and report.choice.groups == [[7, 8, 9, 10]]
    assert report.model.config.plan.keys == (*range(8), 7, 7, 7, 11)


def test_the_plan_is_what_the_cache_holds():
    model, length = convert(gemma3(), PAIRS).model, 24
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(batch=1, length=length), use_cache=True, **{CACHE: cache})
    counted = sum(held_bytes(layer) for layer in cache.layers)
    assert counted == crosslayer.plan(model, length=length).stored_bytes
    assert counted == 2 * 8 * (8 * 7 + 24) * 8  # keys and values of eight windows less the new token, and of all tokens


def test_layers_that_see_all_tokens_evict():
    source, ids = gemma3(), tokens(batch=1, length=60)
    shared, logits = convert(source, PAIRS).model, []
    with torch.no_grad():
        for model in (source, convert_weights(source, []).model, shared):
            with smaller_cache(model, "streaming:0.5") as new_cache:
                cache = new_cache()
                logits.append(model(ids, use_cache=True, **{CACHE: cache}).logits)
            assert cache.layers[5].columns[0].used < 40 and cache.layers[0].keys.shape[2] == 7
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[1], logits[2])


def test_a_model_that_loses_whole_layers_is_gemmas_own():
    source, ids = gemma3(), tokens()
    shorter = convert_weights(source, [load_method({"name": "drop", "layers": (1, 5, 11)})]).model
    assert type(shorter) is type(source) and shorter.config.num_hidden_layers == 9
    with torch.no_grad(), what_if(source, {"name": "drop", "layers": (1, 5, 11)}):
        assert torch.equal(shorter(ids).logits, source(ids).logits)


@pytest.mark.slow  # compiles the model; other families are verified every day
def test_a_retrofit_verifies():
    source = gemma3(dtype=torch.float32, num_hidden_layers=6, layer_types=LAYERS["layer_types"][:6])
    converted = convert(source, {"name": "cla", "groups": ((1, 2), (3, 4))})
    verification = crosslayer.verify(converted.model, dtypes=("float32",), compile_backend="aot_eager")
    assert [check for check in verification.applicable if check.status != "PASS"] == []
    assert [check.name for check in verification.checks if check.status == "NOT APPLICABLE"] == ["manifest"]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_packages("gemma3")), reason="its packages are not installed; see make models")
def test_gemma_3_270m_converts_exactly():
    """More tokens than its windows hold."""
    source, _ = crosslayer.load_model("gemma3", device="cpu")
    ids = torch.randint(3, 200_000, (1, 600), generator=torch.Generator().manual_seed(0))
    ours = convert_weights(source, []).model
    with torch.no_grad():
        expected, result = source(ids, logits_to_keep=50).logits, ours(ids, logits_to_keep=50).logits
    assert (result - expected).abs().max() < 1e-4
