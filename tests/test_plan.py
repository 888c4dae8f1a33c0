"""Plans: rules, merging, diagrams, and random wirings through the cache."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import AttentionInterface

import crosslayer.methods
from crosslayer import testing as contract
from crosslayer.decoder import CrossLayerForCausalLM
from crosslayer.method import Wiring
from crosslayer.methods import load_method, merge_plans, method_names
from crosslayer.plan import STATES, DepthPlan
from tests.helpers.tiny import tokens


@st.composite
def vectors(draw, layers):
    """A valid vector: each entry is its own or an earlier owner's."""
    vector = []
    for layer in range(layers):
        owners = [i for i in range(layer) if vector[i] == i]
        vector.append(draw(st.sampled_from([layer, layer, *owners])))
    return vector


@st.composite
def plans(draw):
    layers = draw(st.integers(1, 6))
    found = {state: draw(vectors(layers)) for state in STATES}
    lenders = {source for vector in found.values() for i, source in enumerate(vector) if source != i}
    free = [i for i in range(layers) if i not in lenders]
    dropped = draw(st.lists(st.sampled_from(free), unique=True, max_size=len(free))) if free else []
    dropped = dropped if len(dropped) < layers else dropped[1:]
    for layer in dropped:
        for state in STATES:
            found[state][layer] = None
    mlps = [i if draw(st.booleans()) or i not in dropped else None for i in range(layers)]
    return DepthPlan(**{state: tuple(vector) for state, vector in found.items()}, mlps=tuple(mlps))


def config_with(plan, **changes):
    """A config with a plan; `cross_layer` stays empty, so that nothing has to be named."""
    config = contract.config_of([], num_hidden_layers=plan.layers, **changes)
    wiring = Wiring((), plan, (None,) * plan.layers, (False,) * plan.layers)
    config.__class__ = type("Wired", (type(config),), {"wiring": property(lambda self: wiring)})
    return config


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans(), st.sampled_from([(4, 1), (4, 2), (4, 4), (2, 1), (6, 3)]))
def test_random_plans_run_cached_as_uncached_and_store_what_is_predicted(plan, heads):
    config = config_with(plan, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8)
    model, ids = contract.build(config), tokens(batch=1, length=6)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    found, cache = contract.steps(model, ids, [3, 1, 2])
    contract.close(full, found, "cached")
    assert contract.elements(cache) == contract.predicted(config, 1, 6)
    share = contract.predicted(config, 1, 6) / (2 * plan.layers * heads[1] * 8 * 6)
    assert plan.cached_fraction() == pytest.approx(share)


BREAKS = ("above", "not owned", "out of range", "half dropped", "mlp", "length", "type", "dropped lender")


@settings(max_examples=300, deadline=None)
@given(plans(), st.sampled_from(BREAKS), st.data())
def test_impossible_plans_are_refused(plan, how, data):
    values = {name: list(getattr(plan, name)) for name in (*STATES, "mlps")}
    state, layer = data.draw(st.sampled_from(STATES)), data.draw(st.integers(0, plan.layers - 1))
    top = plan.layers - 1
    if how == "above":
        values[state] = [top + 1 if i == layer else s for i, s in enumerate(values[state])]
        values = {name: [*vector, len(vector)] for name, vector in values.items()}  # now the layer above exists
    elif how == "not owned":  # a new top layer reads from one that reads from another
        values = {name: [*vector, len(vector), len(vector) + 1] for name, vector in values.items()}
        values[state][-2:] = [next(i for i, s in enumerate(values[state]) if s == i), top + 1]
        if values[state][-2] == top + 1:
            values[state][-2] = top + 2
    elif how == "out of range":
        values[state][layer] = data.draw(st.sampled_from([-1, plan.layers, 99]))
    elif how == "half dropped":
        values[state][layer] = None if values[state][layer] is not None else layer
    elif how == "mlp":
        values["mlps"][layer] = layer + 1
    elif how == "length":
        values[state].append(plan.layers)
    elif how == "type":
        values[state][layer] = data.draw(st.sampled_from([True, 0.5, "0"]))
    else:
        values = {name: [*vector, len(vector)] for name, vector in values.items()}
        values[state][-1] = layer
        for name in STATES:
            values[name][layer] = None
    with pytest.raises(ValueError):
        DepthPlan(**{name: tuple(vector) for name, vector in values.items()})


def test_errors_name_layer_and_rule():
    own = (0, 1, 2)
    cases = [
        (((0, 2, 2), own, own, own), "layer 1: queries come from layer 2 above it; a source is never above its reader"),
        ((own, (0, 0, 1), own, own), "layer 2: keys come from layer 1, which owns none"),
        ((own, own, (0, None, 2), own), r"layer 1: .* attention goes whole"),
        ((own, own, own, (0, 0, 2)), "layer 1: mlps is 0; an MLP is its layer's own"),
        (((None,) * 3, (None,) * 3, (None,) * 3, own), "no layer has attention"),
    ]
    for entries, message in cases:
        with pytest.raises(ValueError, match=message):
            DepthPlan(*entries)


def test_lists_become_tuples():
    plan = DepthPlan([0, 1, 1], [0, 0, 0], [0, 1, 2], [0, 1, None])
    same = DepthPlan((0, 1, 1), (0, 0, 0), (0, 1, 2), (0, 1, None))
    assert plan == same and hash(plan) == hash(same) and plan.keys == (0, 0, 0)
    assert plan.merge(DepthPlan.identity(3), ("one", "other")) == plan
    for wrong in (True, 1.0):
        with pytest.raises(ValueError, match=f"layer 1: mlps is {wrong}"):
            DepthPlan((0, 1), (0, 1), (0, 1), (0, wrong))


def test_merging():
    cla = load_method({"name": "cla", "group": 2})
    assert merge_plans([cla, load_method({"name": "drop", "attention": (1,)})], 4).keys == (0, None, 2, 2)
    with pytest.raises(ValueError, match="cla with drop: layer 1 reads keys of layer 0, which owns none"):
        merge_plans([cla, load_method({"name": "drop", "attention": (0,)})], 4)
    uniattn = load_method({"name": "uniattn", "superblocks": ((1, 2, 3),)})
    with pytest.raises(ValueError, match=r"layer 3: cla takes keys from layer 2 and uniattn from layer 1"):
        merge_plans([cla, uniattn], 4)


def test_slots_are_reused_after_the_last_reader():
    groups = load_method({"name": "cla", "group": 2}).plan(6)
    assert groups.slots("keys") == (0, None, 0, None, 0, None) and groups.slots("queries") == (None,) * 6
    crossing = DepthPlan((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 2, 3), (0, 1, 2, 3))
    assert crossing.slots("keys") == (0, 1, None, None)


@pytest.mark.parametrize(
    ("method", "layers", "share"),
    [
        ("svformer", 8, 0.5625),
        ("svformer", 24, 25 / 48),
        ("cla", 32, 0.5),
        ("resformer", 32, 1.0),
        ("attnres", 32, 1.0),
    ],
)
def test_cached_fraction(method, layers, share):
    assert load_method(method).plan(layers).cached_fraction() == pytest.approx(share)


def test_uniattn_and_drop_keep_the_papers_shares():
    blocks = tuple(tuple(range(s, s + 4)) for s in (16, 20, 24, 28))
    assert load_method({"name": "uniattn", "superblocks": blocks}).plan(32).cached_fraction() == pytest.approx(0.8125)
    gone = tuple(i for block in blocks for i in block[1:])
    plan = load_method({"name": "drop", "attention": gone}).plan(32)
    assert plan.cached_fraction() == pytest.approx(0.625)
    assert plan.bytes_per_token(100) == (40 * 100, 40 * 100)
    assert load_method("cla").plan(32).bytes_per_token(100) == (32 * 100, 64 * 100)  # stored less, read as much


def test_diagram():
    text = load_method({"name": "cla", "group": 2}).plan(4).diagram()
    assert "    3  own      ← 2      ← 2      own   –" in text and "cached share: 50.00%" in text


BAD = [
    ({"name": "clo"}, "did you mean 'cla'"),
    ({"name": "my.missing.module"}, "is not known; .*allow_methods"),
    ({"group": 2}, "has no name"),
    ([5], "cross_layer entry 5 has no name; it needs one of attnres"),
    ({"name": "cla", "groop": 2}, "did you mean 'group'"),
    ({"name": "cla", "group": 7}, "group is 7; it must be between 1 and the 6 layers"),
    ({"name": "cla", "start": 4, "end": 3}, "0 ≤ start < end ≤ 6"),
    ({"name": "svformer", "anchors": (2,)}, "must hold layer 0"),
    ({"name": "svformer", "share": "maps"}, "must be one of 'queries', 'keys', 'values'"),
    ({"name": "uniattn", "superblocks": ((2, 4),)}, "not a run of consecutive layers"),
    ({"name": "uniattn", "superblocks": ((2, 3), (3, 4))}, "names a layer twice"),
    ({"name": "uniattn", "superblocks": ((5, 6),)}, "holds 6; layers go from 0 to 5"),
    ({"name": "uniattn", "compensation": "ffn"}, "must be one of 'attention', 'heads', 'mlp', None"),
    ({"name": "drop", "attention": (9,)}, "holds 9"),
    ({"name": "drop", "layers": tuple(range(6))}, "no layer has attention"),
    ({"name": "cla", "group": "2"}, "^cla: group is '2'; it must be int$"),
    ({"name": "cla", "group": True}, "group is True; it must be int"),
    ({"name": "cla", "groups": 5}, r"groups is 5; it must be tuple\[tuple\[int, ...\], ...\] | None"),
    ({"name": "svformer", "anchors": 0}, "anchors is 0; it must be tuple"),
    ({"name": "uniattn", "superblocks": {"a": 1}}, "superblocks is {'a': 1}; it must be tuple"),
    ({"name": "drop", "attention": [0.5]}, r"attention is \[0.5\]; it must be tuple"),
    ({"name": "resformer", "mode": ["dense"]}, r"mode is \['dense'\]; it must be str"),
    ({"name": "attnres", "block": {1, 2}}, "block is {1, 2}; it must be int"),
    ({"name": "resformer", "mode": "dense"}, "source must be 'all'"),
    ({"name": "resformer", "mode": "strange"}, "must be one of 'identity'"),
    ({"name": "attnres", "block": 13}, "between 1 and the 12"),
    (["svformer", "resformer"], "only layer 0 owns values"),
    (["attnres", "attnres"], "both replace the residual"),
    (["cla", "cla"], "names a method twice"),
]


@pytest.mark.parametrize(("methods", "message"), BAD)
def test_impossible_methods_are_refused_at_construction(methods, message):
    with pytest.raises(ValueError, match=message):
        contract.config_of(methods)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="not a multiple of num_key_value_heads"):
        contract.config_of([], num_key_value_heads=3)
    kinds = ["sliding_attention", "full_attention"] * 3
    with pytest.raises(ValueError, match="different masks cannot share"):
        contract.config_of(["cla"], sliding_window=4, layer_types=kinds)
    with pytest.raises(ValueError, match="sliding_window is not set"):
        contract.config_of([], layer_types=kinds)


def test_attention_that_would_ignore_the_mask_is_refused():
    AttentionInterface.register("maskless", lambda *args, **kwargs: None)
    try:
        with pytest.raises(ValueError, match="'maskless' has no mask function registered"):
            CrossLayerForCausalLM._from_config(contract.config_of([]), attn_implementation="maskless")
    finally:
        del AttentionInterface._global_mapping["maskless"]


def test_the_folder_is_the_list():
    files = {path.stem for path in Path(crosslayer.methods.__file__).parent.glob("[!_]*.py")}
    assert method_names() == sorted(files) and len(files) > 1
