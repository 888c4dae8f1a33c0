"""How text chooses layers, against naive loops: by the distance of caches, and by similarity."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import crosslayer
from crosslayer.core.methods import method_class
from crosslayer.core.transformers_versions import CACHE
from crosslayer.probe.what_if import find_sublayers
from crosslayer.verbs.retrofit import layers as layers_module
from crosslayer.verbs.retrofit.layers import averaged_caches, dissimilar_groups, ranked_pairs
from tests.helpers.tiny import VOCABULARY, tiny

LAYERS = 6


@pytest.fixture(scope="module")
def source():
    return tiny("llama", num_hidden_layers=LAYERS)


def text(sequences=8, length=12):
    return torch.randint(3, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(1))


def naive_order(source, ids):
    """Pairs (upper, lower) by distance, from transformers' own cache, in double loops."""
    caches = []
    for sequence in ids:
        cache = DynamicCache(config=source.config)
        with torch.no_grad():
            source(sequence[None], **{CACHE: cache})
        caches.append(cache)
    means = []
    for layer in range(LAYERS):
        states = [(cache.layers[layer].keys[0], cache.layers[layer].values[0]) for cache in caches]
        means.append([sum(state[i] for state in states) / len(states) for i in (0, 1)])
    distances = {}
    for upper in range(LAYERS):
        for lower in range(upper):
            apart = []
            for mine, other in zip(means[upper], means[lower], strict=True):
                heads, positions, _ = mine.shape
                rows = [(mine[h, t] - other[h, t]).norm() for h in range(heads) for t in range(positions)]
                apart.append(float(sum(rows)) / len(rows))
            distances[upper, lower] = sum(apart) / 2
    return sorted(distances, key=distances.get, reverse=True)


def naive_cosine(source, ids, pairs):
    """The mean cosine of last hidden states of the converted model itself."""
    converted = crosslayer.convert(source, {"name": "kvsharer", "pairs": pairs}).model
    cosines = []
    with torch.no_grad():
        for sequence in ids:
            mine, other = (m.base_model(sequence[None]).last_hidden_state.flatten() for m in (converted, source))
            cosines.append(float(mine @ other / mine.norm() / other.norm()))
    return sum(cosines) / len(cosines)


def plan_of(groups):
    return method_class("kvsharer").from_groups(groups, LAYERS).plan(LAYERS)


def test_pairs_are_ranked_by_the_distance_of_averaged_caches(source):
    ids = text()
    order = ranked_pairs(averaged_caches(source, ids), find_sublayers(source).shapes)
    assert order == naive_order(source, ids) and len(order) == 15


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_farthest_pairs_are_taken_while_the_cosine_stays_above(source, count):
    """Against a naive walk over the pairs that converts the model for each; some pair fails at this threshold."""
    ids = text()
    threshold, chosen, refused = 0.7, {}, 0
    for upper, lower in naive_order(source, ids):
        if len(chosen) == count or upper in chosen:
            continue
        tried = {**chosen, upper: lower}
        while any(end in tried for end in tried.values()):  # whoever reads a reader reads what that reads
            tried = {layer: tried.get(end, end) for layer, end in tried.items()}
        if naive_cosine(source, ids, tuple(tried.items())) > threshold:
            chosen = tried
        else:
            refused += 1
    groups = dissimilar_groups(source, ids, plan_of, count, threshold, lambda done, total: None)
    assert {layer: group[0] for group in groups for layer in group[1:]} == chosen
    assert len(chosen) == count and refused
    assert naive_cosine(source, ids, tuple(chosen.items())) > threshold


def test_too_high_a_threshold_says_how_far_it_came(source):
    with pytest.raises(ValueError, match=r"count 4 .* 0 layers .*threshold 1;"):
        dissimilar_groups(source, text(), plan_of, 4, 1.0, lambda done, total: None)


def test_only_layers_of_the_same_mask_are_paired():
    sliding = tiny("mistral", sliding_window=8, num_hidden_layers=4)
    kinds = ["sliding_attention", "full_attention"] * 2
    gemma = tiny("gemma2", num_hidden_layers=4, layer_types=kinds)
    for model, expected in ((sliding, 6), (gemma, 2)):
        pairs = ranked_pairs(averaged_caches(model, text()), find_sublayers(model).shapes)
        assert len(pairs) == expected
    assert sorted(pairs) == [(2, 0), (3, 1)]


def retrofitted(source, **options):
    ids = {"a": text(90), "b": text(90).flip(0)}
    sizes = {"windows": 32, "length": 12} | ({} if isinstance(options["method"], dict) else {"layers": "auto,count=2"})
    return crosslayer.retrofit(source, ids, **{**sizes, **options})


def test_llm_drop_takes_the_most_similar_attentions_of_the_top_half(source, monkeypatch):
    similarity = np.array([0.9, 0.8, 0.7, 0.1, 0.3, 0.2])
    monkeypatch.setattr(layers_module, "diagnose", lambda *_, **__: SimpleNamespace(attention_io_similarity=similarity))
    options = {"method": "drop", "compensation": "none"}
    assert retrofitted(source, layers="auto,count=2", **options).methods[0]["attention"] == (0, 1)
    way = "auto:top-half-similarity"
    assert retrofitted(source, layers=f"{way},count=2", **options).methods[0]["attention"] == (4, 5)
    with pytest.raises(ValueError, match="`layers`:.*3,.*4"):
        retrofitted(source, layers=f"{way},count=4", **options)


def test_a_retrofit_by_distance(source):
    """What is chosen is what the model gets; the report says how, and readers have no projections."""
    shared = retrofitted(source, method="kvsharer", layers="auto:distance,count=2,threshold=0")
    kept = shared.plan.keys
    assert sum(source != layer for layer, source in enumerate(kept)) == 2 and shared.kv_share == pytest.approx(4 / 6)
    assert all(shared.model.model.layers[layer].self_attn.k_proj is None for layer in range(6) if kept[layer] != layer)
    assert shared.choice.groups and shared.calibration.fit == "refit" and shared.fitted == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "cla", "layers": "auto:distance"}, "auto must be one of 'similarity'"),
        ({"method": "kvsharer", "layers": "auto:greedy"}, "must be one of 'distance', 'similarity'"),
        (
            {"method": "drop", "layers": "auto:distance"},
            "must be one of 'similarity', 'top-half-similarity', 'greedy'",
        ),
        ({"method": "drop", "layers": "auto:nearest"}, "`layers` must be one of .*auto:distance, .*got 'auto:nearest'"),
        (
            {"method": "drop", "layers": "auto:greedy,threshold=0.8"},
            "`layers`: auto:greedy takes count=…, each once; got 'threshold=0.8'",
        ),
        ({"method": "kvsharer", "layers": "auto:distance,threshold=1.5"}, "less than or equal to 1"),
        ({"method": "kvsharer", "layers": "top-half,threshold=0.5"}, "top-half takes size=…, count=…"),
        ({"method": "kvsharer", "compensation": "none,bias"}, "none takes no settings; got 'bias'"),
        ({"method": "drop", "part": "mlp", "compensation": "bias"}, "`compensation` bias has no effect"),
        (
            {"method": {"name": "drop", "attention": [1], "compensation": "attention"}, "compensation": "bias"},
            "`compensation` bias has no effect",
        ),
    ],
    ids=str,
)
def test_choices_that_cannot_be(source, options, message):
    with pytest.raises(ValueError, match=message):
        retrofitted(source, **options)
