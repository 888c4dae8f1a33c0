"""What a conversion keeps and drops, and what the caches of the results hold."""

import copy

import pytest
import torch
from transformers import DynamicCache

import crosslayer
from crosslayer.cache.kv_cache import held_bytes
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.methods import load_method, method_class
from crosslayer.core.options import parse_layers
from crosslayer.core.transformers_versions import CACHE
from crosslayer.probe.shapes import CacheShare
from crosslayer.probe.what_if import find_sublayers, what_if
from crosslayer.testing.tiny import build, close, config_of
from crosslayer.verbs.retrofit.cache import token_bytes
from crosslayer.verbs.retrofit.convert import convert
from tests.helpers.cases import SHAPES
from tests.helpers.nested import FACTOR, Nested
from tests.helpers.tiny import tiny, tokens

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PLANS = {
    "uniattn": {"superblocks": ((1, 2, 3), (4, 5)), "compensation": None},
    "cla": {"groups": ((0, 4), (1, 3, 5))},
    "svformer": {"anchors": (0, 4)},
    "drop": {"attention": (0, 3), "mlp": (2,)},
}


def method(name):
    return load_method({"name": name, **PLANS[name]})


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_if_equals_the_retrofit_without_training(family, name):
    source, ids = tiny(family, num_hidden_layers=6), tokens()
    with torch.no_grad():
        before = source(ids).logits
        made = convert_weights(source, [method(name)]).model
        with what_if(source, method(name).plan(6)):
            pretended = source(ids).logits
            text = source.generate(ids[:, :6], max_new_tokens=8, do_sample=False)
        assert (pretended - before).abs().max() > 1e-2  # the plan does something
        assert (pretended - made(ids).logits).abs().max() < 1e-10
        assert torch.equal(text, made.generate(ids[:, :6], max_new_tokens=8, do_sample=False))
        assert torch.equal(source(ids).logits, before)  # restored


def test_what_if_on_a_family_that_cannot_be_converted():
    """Dropping attention in GPT-2 is zeroing its output projection; the model itself is left alone."""
    source, ids = tiny("gpt2"), tokens()
    plan = load_method({"name": "drop", "attention": (1,)}).plan(3)
    zeroed = copy.deepcopy(source)
    with torch.no_grad():
        zeroed.transformer.h[1].attn.c_proj.weight.zero_()
        zeroed.transformer.h[1].attn.c_proj.bias.zero_()
        with what_if(source, plan):
            assert (source(ids).logits - zeroed(ids).logits).abs().max() < 1e-10
    with pytest.raises(ValueError, match="'gpt2' cannot be converted.*llama.*diagnose"):
        convert_weights(source, [load_method("cla")])


def test_what_if_refuses_what_it_cannot_show():
    sliding = tiny("gemma2")
    with pytest.raises(ValueError, match=r"layer 1 \(causal\).*layer 0 \(causal,.*8\)"):
        find_sublayers(sliding).check(load_method("cla").plan(3))
    with pytest.raises(ValueError, match="4 layers.*model 3"):
        find_sublayers(sliding).check(load_method("cla").plan(4))
    shared = convert_weights(tiny("llama"), [load_method("cla")]).model
    with pytest.raises(ValueError, match="without cross-layer methods"), what_if(shared, load_method("cla").plan(3)):
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_stay_are_the_sources_own(family):
    source = tiny(family, num_hidden_layers=6)
    made = convert_weights(source, [method("uniattn")])
    weights, found = source.state_dict(), made.model.state_dict()
    assert all(found[name].data_ptr() == weights[name].data_ptr() for name in found)
    assert {name.split(".")[2] for name in made.weights.dropped} == {"2", "3", "5"}
    assert (
        all(".q_" in name or ".k_" in name for name in made.weights.dropped)
        and not made.weights.changed
        and not made.weights.new
    )
    apart = convert(source, method("uniattn")).model.state_dict()
    assert all(torch.equal(apart[n], weights[n]) and apart[n].data_ptr() != weights[n].data_ptr() for n in apart)


def test_whole_layers_give_the_stock_class():
    source, ids = tiny("qwen3", num_hidden_layers=4), tokens()
    made = convert_weights(source, [load_method({"name": "drop", "layers": (1, 3)})]).model
    assert type(made) is type(source) and made.config.num_hidden_layers == 2 and len(made.config.layer_types) == 2
    with torch.no_grad(), what_if(source, load_method({"name": "drop", "layers": (1, 3)}).plan(4)):
        assert (source(ids).logits - made(ids).logits).abs().max() < 1e-10
    assert made.generate(ids[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)


SHARES = [
    ("uniattn", 32, "16-19,20-23,24-27,28-31", 26 / 32),
    ("cla", 32, "16-19,20-23,24-27,28-31", 20 / 32),
    ("drop", 32, "20-31", 20 / 32),
    ("uniattn", 30, "18-21,22-25,26-29", 0.85),
    ("uniattn", 30, "16-17,18-19,20-21,22-23,24-25,26-27,28-29", 53 / 60),
]


def test_the_cache_is_counted_beyond_the_window():
    """Two of four layers see 8 tokens only: dropping one of those saves those of a long context, not a quarter."""
    source = tiny(
        "qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2, layer_types=None
    )
    assert source.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    for context, expected in ((40, (40 + 40 + 8) / (40 + 40 + 8 + 8)), (4, 3 / 4)):
        made = convert_weights(source, [load_method({"name": "drop", "attention": (3,)})]).model
        assert token_bytes(made, context) / token_bytes(source, context) == pytest.approx(expected, abs=1e-12)
        cache = DynamicCache(config=made.config)
        for length in (context - 1, 1):  # as it is in decoding
            made(tokens(batch=1, length=length), **{CACHE: cache})
        assert held_bytes(cache).sixteen == pytest.approx(token_bytes(made, context) * context)
        counted = CacheShare(find_sublayers(source).shapes, context).of(made.config.plan)
        assert counted == pytest.approx(expected, abs=1e-12)  # the search counts what the report does


@pytest.mark.parametrize(("name", "layers", "groups", "share"), SHARES, ids=str)
def test_the_cache_allocates_the_share_that_the_paper_counts(name, layers, groups, share):
    source = tiny("llama", num_hidden_layers=layers)
    method = method_class(name).from_groups(parse_layers(groups, layers), layers)
    made = convert_weights(source, [method]).model
    assert token_bytes(made) / token_bytes(source) == pytest.approx(share, abs=1e-12)
    assert made.config.plan.cached_fraction() == pytest.approx(share, abs=1e-12)
    cache = DynamicCache(config=made.config)
    made(tokens(batch=3, length=5), **{CACHE: cache})
    states = [state for one in cache.layers for state in (one.keys, one.values) if state is not None]
    elements = sum(state.numel() for state in states)
    each = 3 * 5 * made.config.num_key_value_heads * made.config.head_dim
    assert elements == each * sum(len(made.config.plan.stored(i)) for i in range(layers))


def test_mixing_modules_begin_as_they_should():
    made = convert(tiny("llama"), ["resformer", "attnres"])
    assert {"weights", "query", "gain"} == {name.rsplit(".")[-1] for name in made.weights.new}
    ids = tokens()
    assert torch.equal(made.model(ids).logits, made.model(ids).logits)
    assert made.model.model.layers[1].self_attn.mixers[0].weights.tolist() == [0.5, 0.5]


def test_modules_and_buffers_inside_of_a_mixer_begin_as_they_should():
    source, ids = tiny("llama"), tokens()
    converted = convert(source, "tests.helpers.nested")
    mixer = converted.model.model.layers[2].self_attn.mixers[0]
    assert mixer.scale.tolist() == [FACTOR] * 8 and not mixer.linear.weight.any() and not mixer.linear.bias.any()
    assert sum(name.endswith("linear.weight") for name in converted.weights.new) == 3
    with torch.no_grad():
        for layer in source.model.layers:
            layer.self_attn.v_proj.weight.mul_(FACTOR)
        assert (converted.model(ids).logits - source(ids).logits).abs().max() < 1e-10


def test_what_a_mixer_inherits_stays(monkeypatch):
    name = "model.layers.1.self_attn.mixers.0.linear.weight"
    matrix = torch.randn(8, 8, dtype=torch.float64)
    monkeypatch.setattr(Nested, "inherit", lambda self, weights, *rest: weights.update({name: matrix}) or [name])
    model = convert_weights(tiny("llama"), [Nested()]).model
    weight, others = model.get_parameter(name), model.get_parameter(name.replace("layers.1", "layers.0"))
    assert torch.equal(weight, matrix) and not others.any()


def test_bad_conversions():
    source = tiny("llama")
    with pytest.raises(ValueError, match="uniattn changes"):
        convert(source, "uniattn")
    with torch.no_grad():
        source.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="1 with NaN or infinity, such as model.layers.0.mlp.up_proj"):
        convert_weights(source, [load_method("cla")])
    for text, words in (
        ("18-21,x", "'x' is neither a layer nor a range"),
        ("2-1", "out of range"),
        ("1,1", "named twice"),
        ("0-99", "layers go from 0 to 29"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_layers(text, 30)
    with pytest.raises(ValueError, match=r"two layers,.*\[\[1\], \[2\]\]"):
        method_class("cla").from_groups([[1], [2]], 3)


OWN_SHAPES = ("gemma2", "gpt2", "mixture of experts")
DROPPED = ({"name": "drop", "layers": (3,)}, {"name": "drop", "attention": (3,)})


@pytest.mark.parametrize("name", OWN_SHAPES)
def test_a_plain_model_of_ours_is_converted_as_it_is(name):
    source, ids = build(config_of([], **SHAPES[name][1])), tokens()
    conversions = [load_method({"name": "cla", "groups": ((3, 5),)}), *map(load_method, DROPPED)]
    with torch.no_grad():
        expected = source(ids).logits
        assert torch.equal(convert_weights(source, []).model(ids).logits, expected)
        for method in conversions:
            made = convert_weights(source, [method]).model
            with what_if(source, method.plan(6)):
                assert (made(ids).logits - source(ids).logits).abs().max() < 1e-10
            assert (made(ids).logits - expected).abs().max() > 1e-3
    fitted = convert(source, {**DROPPED[1], "compensation": "attention"}, calibration=tokens(16))
    assert fitted.fits[0].token_after < fitted.fits[0].token_before


UNIATTN = {"name": "uniattn", "superblocks": ((1, 2, 3),)}


def test_readers_of_a_retrofit_lose_their_attention():
    """Fig. 7 of arXiv 2502.00439; the oracle is both at once, with the same weights."""
    source, ids = build(config_of(UNIATTN)), tokens()
    dropped = {"name": "drop", "attention": (2, 3)}
    made = convert(source, dropped)
    assert made.model.config.cross_layer == config_of([UNIATTN, dropped]).cross_layer and made.fits == []
    assert [layer.self_attn is None for layer in made.model.model.layers] == [False, False, True, True, False, False]
    both = build(config_of([UNIATTN, dropped]))
    both.load_state_dict(made.model.state_dict())
    with torch.no_grad():
        close(made.model(ids).logits, both(ids).logits, "both at once")
        assert (made.model(ids).logits - source(ids).logits).abs().max() > 1e-3
    report = crosslayer.retrofit(
        source, tokens(16, 12), method="drop", layers="2", compensation="none", length=12, windows=16
    )
    assert report.plan.keys[2] is None and report.plan.queries[3] == 1 and report.calibration.layers == []
    wired = "a model that already has methods cannot be fitted or searched"
    for options in ({"kv_budget": 0.5}, {"method": "drop", "layers": "2", "compensation": "layerwise"}):
        with pytest.raises(ValueError, match=wired):
            crosslayer.retrofit(source, tokens(64, 12), length=12, windows=16, **options)
    with pytest.raises(ValueError, match=wired):
        convert(source, {**dropped, "compensation": "attention"}, fit="zero")


def test_a_second_method_that_collides_with_the_first_is_refused():
    source = build(config_of(["resformer", "cla"]))
    with pytest.raises(ValueError, match="uniattn .*cla|cla .*uniattn"):
        convert(source, {"name": "uniattn", "superblocks": ((1, 2),), "compensation": None})
    with pytest.raises(ValueError, match=r"\[0, 2\].*attention,.*retrofit"):
        convert(build(config_of([], **SHAPES["linear attention"][1])), {"name": "cla", "groups": ((3, 5),)})
