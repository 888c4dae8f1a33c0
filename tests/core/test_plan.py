"""Plans: rules, merging, diagrams, and random wirings through the cache."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import AttentionInterface

import crosslayer.core.methods
from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.core.method import Method, StateReader, Wiring
from crosslayer.core.methods import load_method, merge_plans, method_names
from crosslayer.core.options import parse_layers
from crosslayer.core.plan import STATES, DepthPlan
from crosslayer.testing import tiny as contract
from tests.helpers.tiny import tokens


@st.composite
def vectors(draw, layers):
    """A valid vector: each layer reads itself or an earlier source."""
    vector = []
    for layer in range(layers):
        sources = [i for i in range(layer) if vector[i] == i]
        vector.append(draw(st.sampled_from([layer, layer, *sources])))
    return vector


@st.composite
def plans(draw):
    layers = draw(st.integers(1, 6))
    result = {state: draw(vectors(layers)) for state in STATES}
    sources = {source for vector in result.values() for i, source in enumerate(vector) if source != i}
    free = [i for i in range(layers) if i not in sources]
    dropped = draw(st.lists(st.sampled_from(free), unique=True, max_size=len(free))) if free else []
    dropped = dropped if len(dropped) < layers else dropped[1:]
    for layer in dropped:
        for state in STATES:
            result[state][layer] = None
    mlps = [i if draw(st.booleans()) or i not in dropped else None for i in range(layers)]
    return DepthPlan(**{state: tuple(vector) for state, vector in result.items()}, mlps=tuple(mlps))


def config_with(plan, *methods, **changes):
    """A config with a plan; `cross_layer` stays empty, so that nothing has to be named."""
    config = contract.config_of([], num_hidden_layers=plan.layers, **changes)
    wiring = Wiring(methods, plan, (None,) * plan.layers)
    config.__class__ = type("Wired", (type(config),), {"wiring": property(lambda self: wiring)})
    return config


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans(), st.sampled_from([(4, 1), (4, 2), (4, 4), (2, 1), (6, 3)]))
def test_random_plans_run_cached_as_uncached_and_store_what_is_predicted(plan, heads):
    config = config_with(plan, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8)
    model, ids = contract.build(config), tokens(batch=1, length=6)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    result, cache = contract.steps(model, ids, [3, 1, 2])
    contract.close(full, result, "cached")
    assert contract.elements(cache) == contract.predicted(config, 1, 6)
    share = contract.predicted(config, 1, 6) / (2 * plan.layers * heads[1] * 8 * 6)
    assert plan.cached_fraction() == pytest.approx(share)


@st.composite
def entries_of_several(draw, layers):
    """A valid vector in which layers may read several sources."""
    vector: list = []
    for layer in range(layers):
        sources = [i for i in range(layer) if vector[i] == i or isinstance(vector[i], tuple) and i in vector[i]]
        several = draw(st.lists(st.sampled_from([*sources, layer]), unique=True, max_size=3))
        vector.append(tuple(sorted(several)) if len(several) > 1 else several[0] if several else layer)
    return tuple(vector)


@st.composite
def plans_of_several(draw):
    """Plans whose layers may read several layers' keys and values."""
    layers = draw(st.integers(1, 6))
    own = tuple(range(layers))
    return DepthPlan(own, draw(entries_of_several(layers)), draw(entries_of_several(layers)), own)


class Mean(StateReader):
    """Reads the mean of the layers' states."""

    def forward(self, keys, values, mask, new):
        return sum(keys) / len(keys), sum(values) / len(values), mask


class ReadsMean(Method):
    """Reads the mean of several sources."""

    def reader(self, config, wiring, layer):
        return Mean()


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans_of_several(), st.sampled_from([(4, 2), (4, 4)]))
def test_random_plans_of_several_sources_run_cached_as_uncached_and_store_what_is_predicted(plan, heads):
    config = config_with(plan, ReadsMean(), num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8)
    model, ids = contract.build(config), tokens(batch=1, length=6)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    result, cache = contract.steps(model, ids, [3, 1, 2])
    contract.close(full, result, "cached")
    state = heads[1] * 8 * 6  # elements of a layer's keys, or values
    assert contract.elements(cache) == contract.predicted(config, 1, 6)
    assert plan.cached_fraction() == pytest.approx(contract.elements(cache) / (2 * plan.layers * state))
    assert plan.stored_states() <= plan.read_states()


@settings(max_examples=100, deadline=None)
@given(plans_of_several())
def test_plans_of_several_sources_merge_and_compare_as_others(plan):
    identity = DepthPlan.identity(plan.layers)
    assert plan.merge(identity, ("one", "other")) == plan == identity.merge(plan, ("one", "other"))
    assert plan.merge(plan, ("one", "other")) == plan and hash(plan) == hash(plan.merge(plan, ("one", "other")))
    for state in ("keys", "values"):
        slots = plan.slots(state)
        for reader in range(plan.layers):
            held = [slots[source] for source in plan.reads(state, reader) if source != reader]
            assert None not in held and len(set(held)) == len(
                held
            )  # states that are read together have different slots


BREAKS = ("above", "no state of its own", "out of range", "half dropped", "mlp", "length", "type", "dropped source")


@settings(max_examples=100, deadline=None)
@given(plans(), st.sampled_from(BREAKS), st.data())
def test_impossible_plans_are_refused(plan, how, data):
    values = {name: list(getattr(plan, name)) for name in (*STATES, "mlps")}
    state, layer = data.draw(st.sampled_from(STATES)), data.draw(st.integers(0, plan.layers - 1))
    top = plan.layers - 1
    if how == "above":
        values[state] = [top + 1 if i == layer else s for i, s in enumerate(values[state])]
        values = {name: [*vector, len(vector)] for name, vector in values.items()}  # now the layer above exists
    elif how == "no state of its own":  # a new top layer reads from one that reads from another
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
        (((0, 2, 2), own, own, own), "layer 1: queries: a source must not be above its reader, got layer 2"),
        ((own, (0, 0, 1), own, own), "layer 2: keys: .* got layer 1, which has none"),
        ((own, own, (0, None, 2), own), r"layer 1: .* must be all None or all set, got \[1, 1, None\]"),
        ((own, own, own, (0, 0, 2)), r"layer 1: mlps must be the layer itself or None .*, got 0"),
    ]
    several = [
        (((0, (0, 1), 2), own, own, own), r"layer 1: queries must have a single source, got \(0, 1\)"),
        ((own, (0, (1,), 2), own, own), r"layer 1: keys: .* at least two layers in rising order, got \(1,\)"),
        ((own, (0, (1, 0), 2), own, own), r"layer 1: keys: .* in rising order, got \(1, 0\)"),
        ((own, (0, (0, 0), 2), own, own), r"layer 1: keys: .* in rising order, got \(0, 0\)"),
        ((own, (0, 0, (0, 1)), own, own), "layer 2: keys: .* got layer 1, which has none"),
        ((own, (0, (0, 2), 2), own, own), "layer 1: keys: .* must not be above its reader, got layer 2"),
    ]
    for entries, message in cases + several:
        with pytest.raises(ValueError, match=message):
            DepthPlan(*entries)


def test_lists_become_tuples():
    plan = DepthPlan([0, 1, 1], [0, 0, 0], [0, 1, 2], [0, 1, None])
    same = DepthPlan((0, 1, 1), (0, 0, 0), (0, 1, 2), (0, 1, None))
    assert plan == same and hash(plan) == hash(same) and plan.keys == (0, 0, 0)
    assert plan.merge(DepthPlan.identity(3), ("one", "other")) == plan
    for wrong in (True, 1.0):
        with pytest.raises(ValueError, match=f"layer 1: mlps must be .*, got {wrong}"):
            DepthPlan((0, 1), (0, 1), (0, 1), (0, wrong))


def test_merging():
    cla = load_method({"name": "cla", "group": 2})
    assert merge_plans([cla, load_method({"name": "drop", "attention": (1,)})], 4).keys == (0, None, 2, 2)
    with pytest.raises(ValueError, match="layer 1.*layer 0"):
        merge_plans([cla, load_method({"name": "drop", "attention": (0,)})], 4)
    uniattn = load_method({"name": "uniattn", "superblocks": ((1, 2, 3),)})
    with pytest.raises(ValueError, match="layer 3:.*layer 2.*layer 1"):
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
        ("fusedkv", 32, 0.5),
        ({"name": "fusedkv", "lite": True}, 32, 0.5),
        ("cross_attention", 32, 1.0),
        ("yoco", 32, 17 / 32),
        ("denseformer", 32, 1.0),
    ],
)
def test_cached_fraction(method, layers, share):
    assert load_method(method).plan(layers).cached_fraction() == pytest.approx(share)


def test_uniattn_and_drop_keep_the_papers_shares():
    blocks = tuple(tuple(range(s, s + 4)) for s in (16, 20, 24, 28))
    assert load_method({"name": "uniattn", "superblocks": blocks}).plan(32).cached_fraction() == pytest.approx(0.8125)
    dropped = tuple(i for block in blocks for i in block[1:])
    plan = load_method({"name": "drop", "attention": dropped}).plan(32)
    assert plan.cached_fraction() == pytest.approx(0.625)
    assert plan.bytes_per_token(100) == (40 * 100, 40 * 100)
    assert load_method("cla").plan(32).bytes_per_token(100) == (32 * 100, 64 * 100)  # stored less, read as much


def test_diagram():
    text = load_method({"name": "cla", "group": 2}).plan(4).diagram()
    assert "    3  own      ← 2      ← 2      own   –" in text and "KV cache: 50.00%" in text


BAD = [
    ({"name": "clo"}, "did you mean 'cla'"),
    ({"name": "my.missing.module"}, "is not known; .*allow_methods"),
    ("mhc", "did you mean 'hyper_connections'"),
    ("value_residual", "did you mean 'resformer'"),
    ({"group": 2}, "each entry needs a name"),
    ([5], "each entry needs a name, got 5; known methods: .*attnres"),
    ({"name": "cla", "groop": 2}, "did you mean 'group'"),
    ({"name": "cla", "group": 7}, "group must be 1 to 6 .*, got 7"),
    ({"name": "cla", "start": 4, "end": 3}, "0 ≤ start < end ≤ 6"),
    ({"name": "svformer", "anchors": (2,)}, "must include layer 0, got"),
    ({"name": "svformer", "share": "maps"}, "must be one of 'queries', 'keys', 'values'"),
    ({"name": "uniattn", "superblocks": ((4, 2),)}, r"groups of layers in rising order, got \[4, 2\]"),
    ({"name": "uniattn", "superblocks": ((2, 3), (3, 4))}, r"each layer once, got \[2, 3, 3, 4\]"),
    ({"name": "uniattn", "superblocks": ((5, 6),)}, "layers from 0 to 5, got 6"),
    ({"name": "uniattn", "compensation": "ffn"}, "must be one of 'attention', 'heads', 'mlp', 'heads-from-values',"),
    ({"name": "drop", "attention": (9,)}, "got 9"),
    ({"name": "drop", "layers": tuple(range(6))}, "no layer has attention"),
    ({"name": "cla", "group": "2"}, "^cla: group must be int, got '2'$"),
    ({"name": "cla", "group": True}, "group must be int, got True"),
    ({"name": "cla", "groups": 5}, r"groups must be tuple\[tuple\[int, ...\], ...\] \| None, got 5"),
    ({"name": "svformer", "anchors": 0}, "anchors must be tuple.*, got 0"),
    ({"name": "uniattn", "superblocks": {"a": 1}}, "superblocks must be tuple.*, got {'a': 1}"),
    ({"name": "drop", "attention": [0.5]}, r"attention must be tuple.*, got \[0.5\]"),
    ({"name": "resformer", "mode": ["dense"]}, r"mode must be str, got \['dense'\]"),
    ({"name": "attnres", "block": {1, 2}}, "block must be int.*, got {1, 2}"),
    ({"name": "resformer", "mode": "dense"}, "source must be 'all'"),
    ({"name": "resformer", "mode": "sparse", "weights": [2.0]}, "weights need mode 'constant' or 'learnable'"),
    ({"name": "resformer", "mode": "constant", "weights": [1.0, 2.0]}, r"weights must be 1 or \d+, got 2"),
    ({"name": "resformer", "mode": "constant", "weights": ["x"]}, "weights must be .*float"),
    ({"name": "resformer", "mode": "strange"}, "must be one of 'identity'"),
    ({"name": "attnres", "block": 13}, "block must be 1 to 12 .*, got 13"),
    (["svformer", "resformer"], "at least two layers with their own values, got only layer 0"),
    (["attnres", "attnres"], "both replace the residual"),
    (["cla", "cla"], "each method once, got cla, cla"),
    (["svformer", "neutreno"], "neutreno: .* their own values, got only layer 0"),
    (["svformer", "identity_mapping"], "identity_mapping: .* their own values, got only layer 0"),
    ({"name": "neutreno", "weight": float("inf")}, "neutreno: weight must be a finite number, got inf"),
    ({"name": "denseformer", "period": 0}, "denseformer: period must be at least 1, got 0"),
    ({"name": "denseformer", "dilation": 7}, "none of the 6 layers .* period may be at most 6, dilation at most 6"),
    ({"name": "denseformer", "dilation": 5, "period": 4}, "period may be at most 6, dilation at most 4"),
    ({"name": "denseformer", "period": 7}, "period may be at most 6, dilation at most 6"),
    (["denseformer", "attnres"], "denseformer with attnres: both replace the residual stream"),
    ({"name": "yoco", "window": 0}, "yoco: window must be at least 1 token, got 0"),
    (
        ["yoco", "cla"],
        "layer 5: yoco reads keys of layer 3 and cla of layer 4; only one",
    ),
    ({"name": "fusedkv", "start": 1}, "start must be 2 to 5 for 6 layers, got 1"),
    (["fusedkv", "cla"], r"layer 3: fusedkv reads keys of layers 0 and 2 and cla of layer 2; only one"),
    (["fusedkv", "cross_attention"], r"fusedkv reads keys of layers 0 and 2 and cross_attention of layers 0 and 3"),
    ({"name": "cross_attention", "source": "last"}, "source must be one of 'first', 'previous', got 'last'"),
]


@pytest.mark.parametrize(("methods", "message"), BAD)
def test_impossible_methods_are_refused_at_construction(methods, message):
    with pytest.raises(ValueError, match=message):
        contract.config_of(methods)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="num_key_value_heads"):
        contract.config_of([], num_key_value_heads=3)
    kinds = ["sliding_attention", "full_attention"] * 3
    with pytest.raises(ValueError, match="different types"):
        contract.config_of(["cla"], sliding_window=4, layer_types=kinds)
    with pytest.raises(ValueError, match="sliding_window"):
        contract.config_of([], layer_types=kinds)
    with pytest.raises(ValueError, match="head_dim.*7"):
        contract.config_of(["fusedkv"], head_dim=7)


def test_methods_that_need_other_layers_are_refused_where_there_are_none():
    for name in ("fusedkv", "cross_attention", "yoco"):
        with pytest.raises(ValueError, match=f"^{name}[: ]"):
            contract.config_of([name], num_hidden_layers=1)


def test_a_window_that_a_method_sets_is_set_nowhere_else():
    config = contract.config_of([{"name": "yoco", "window": 7}])
    assert config.sliding_window == 7
    assert config.layer_types == ["sliding_attention"] * 3 + ["full_attention"] * 3
    assert type(config).from_dict(config.to_dict()).layer_types == config.layer_types
    for wrong in ({"sliding_window": 8}, {"layer_types": ["full_attention"] * 6}):
        with pytest.raises(ValueError, match="^yoco.*layer_types.*sliding_window.*7 itself"):
            contract.config_of([{"name": "yoco", "window": 7}], **wrong)


@pytest.mark.parametrize("kind", ["flash_attention_2", "sdpa_within_documents"])
def test_attention_without_a_mask_as_a_tensor_cannot_read_two_layers_in_a_row(kind):
    model = contract.build(contract.config_of(["cross_attention"]))
    model.config._attn_implementation = kind  # as if it were installed
    attention = model.model.layers[1].self_attn
    with pytest.raises(ValueError, match=f"attention '{kind}' accepts no mask tensor; use sdpa or eager"):
        attention._read_several(attention.reader, [None] * 3, {}, None if "flash" in kind else object(), 4)


def test_attention_that_would_ignore_the_mask_is_refused():
    AttentionInterface.register("maskless", lambda *args, **kwargs: None)
    try:
        with pytest.raises(ValueError, match="'maskless'"):
            CrossLayerForCausalLM._from_config(contract.config_of([]), attn_implementation="maskless")
    finally:
        del AttentionInterface._global_mapping["maskless"]


def test_the_folder_is_the_list():
    files = {path.stem for path in Path(crosslayer.core.methods.__file__).parent.glob("[!_]*.py")}
    assert method_names() == sorted(files) and len(files) > 1


def test_groups_are_read_with_ranges_and_gaps():
    assert parse_layers("18-21, 22-23", 30) == [[18, 19, 20, 21], [22, 23]]
    assert parse_layers("2-4+6,5 + 7", 30) == [[2, 3, 4, 6], [5, 7]]
    with pytest.raises(ValueError, match="named twice"):
        parse_layers("2+4,4+6", 30)


def test_interleaved_groups_need_two_slots():
    plan = load_method({"name": "cla", "groups": ((0, 2, 4), (1, 3, 5))}).plan(6)
    assert plan.keys == plan.values == (0, 1, 0, 1, 0, 1)
    assert plan.slots("keys") == (0, 1, None, None, None, None)  # two states are shared at a time
