"""Groups of layers, shares of the cache, and the sentences."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crosslayer
from crosslayer.core.methods import merge_plans, method_class, method_names
from crosslayer.output.formatting import counted, named_layers, ranges
from crosslayer.probe.shapes import LayerShape, may_share, paper_groups, similar_groups
from crosslayer.stats.bootstrap import measure
from crosslayer.verbs.diagnose.result import Massive, Measures, Sink
from crosslayer.verbs.diagnose.verdict import findings, map_statistics, massive, verdict, verdict_sentences
from tests.helpers.tiny import tiny, tokens

FULL = LayerShape(9, 3, 64, 64, causal=True)
SLIDING = LayerShape(9, 3, 64, 64, causal=True, window=8)


def test_windows_longer_than_the_text_still_differ():
    cache = crosslayer.diagnose(tiny("gemma2", sliding_window=4096), tokens()).verdict.cache
    assert cache.by_depth.groups == [] and cache.by_similarity.groups == []


def test_even_attention_is_no_sink():
    model = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    for length in (2, 3, 5, 24):
        sink = crosslayer.diagnose(model, tokens(length=length)).verdict.sink
        assert sink.layers == [] and sink.over_even == pytest.approx(1, abs=1e-5)


def test_layers_that_store_nothing_do_not_count():
    stored = [LayerShape(2, 2, 8, 8, causal=True, stored=s) for s in (("keys", "values"), ("values",), ())]
    assert [shape.cached(10) for shape in stored] == [(160, 160), (0, 160), (0, 0)]
    assert may_share(stored[0], stored[2])


def measures(layers, similarity=None):
    """Return measures that are the same in all layers, but for the similarities."""
    matrix = np.eye(layers) if similarity is None else similarity
    pairs = ("map_similarity", "map_similarity_without_first", "map_similarity_per_head")
    means = {name: [0.5] * layers for name in Measures.model_fields} | dict.fromkeys(pairs, matrix.tolist())
    return Measures.model_validate({name: {"mean": mean, "ci95": None, "n": 1} for name, mean in means.items()})


def test_paper_groups_of_30_32_and_42_layers():
    assert paper_groups([FULL] * 30) == [[18, 19, 20, 21], [22, 23, 24, 25], [26, 27, 28, 29]]
    assert paper_groups([FULL] * 32) == [list(range(s, s + 4)) for s in (16, 20, 24, 28)]
    assert paper_groups([FULL] * 42) == [list(range(s, s + 4)) for s in (22, 26, 30, 34, 38)]  # Gemma-2 9B
    assert len([i for g in paper_groups([FULL] * 30, size=2) for i in g[1:]]) == 7


@pytest.mark.parametrize(("layers", "uniattn", "cla"), [(30, 0.85, 0.70), (32, 0.8125, 0.625)])
def test_shares_are_the_papers(layers, uniattn, cla):
    cache = verdict(measures(layers), [FULL] * layers, 512, [], []).cache
    kept = {entry.method: entry.share for entry in cache.by_depth.kept}
    assert kept["uniattn"] == pytest.approx(uniattn) and kept["cla"] == pytest.approx(cla)
    assert cache.share_without == pytest.approx(cla)  # as many layers


def test_every_method_that_saves_by_sharing_is_counted_as_its_own_plan_says():
    layers = 30
    sharing = [cls for cls in map(method_class, method_names()) if cls.saves and cls.grouped]
    superblocks = verdict(measures(layers), [FULL] * layers, 512, [], []).cache.by_depth
    assert [entry.title for entry in superblocks.kept] == [cls.__name__ for cls in sharing]
    assert len(superblocks.kept) >= 2
    for cls, entry in zip(sharing, superblocks.kept, strict=True):
        plan = merge_plans([cls.from_groups(superblocks.groups, layers)], layers)
        stored = sum(len(plan.stored(layer)) for layer in range(layers))
        assert entry.share == pytest.approx(stored / (2 * layers)), cls


def test_layers_with_different_masks_are_never_grouped():
    shapes = [FULL, SLIDING] * 8
    assert paper_groups(shapes) == [] and similar_groups(np.ones((16, 16)), shapes, 5) == []
    assert not may_share(FULL, SLIDING) and not may_share(None, None)


def test_a_block_across_masks_moves_down_to_layers_with_one_mask():
    """Gemma 3 270M: every sixth of 18 layers sees all tokens."""
    shapes = [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 3
    assert paper_groups(shapes) == [[13, 14, 15, 16]]
    assert paper_groups(shapes, size=2) == [[9, 10], [13, 14], [15, 16]]
    assert paper_groups(shapes, count=3) == [[1, 2, 3, 4], [7, 8, 9, 10], [13, 14, 15, 16]]


def test_a_window_bounds_the_cache():
    assert SLIDING.cached(512) == (
        3 * 64 * 7,
        3 * 64 * 7,
    )  # as transformers keeps them and FULL.cached(512) == (3 * 64 * 512, 3 * 64 * 512)


def test_similar_groups_join_the_most_similar():
    matrix = np.full((6, 6), 0.1)
    matrix[2:5, 2:5] = 0.9
    matrix[0:2, 0:2] = 0.5
    np.fill_diagonal(matrix, 1)
    assert similar_groups(matrix, [FULL] * 6, 2) == [[2, 3, 4]]
    assert similar_groups(matrix, [FULL] * 6, 3) == [[0, 1], [2, 3, 4]]


@given(st.integers(2, 12), st.integers(0, 11), st.randoms(use_true_random=False))
def test_similar_groups_are_contiguous_and_have_the_asked_readers(layers, readers, random):
    matrix = np.array([[random.random() for _ in range(layers)] for _ in range(layers)])
    groups = similar_groups((matrix + matrix.T) / 2, [FULL] * layers, readers)
    assert all(group == list(range(group[0], group[-1] + 1)) for group in groups)
    assert sum(len(group) - 1 for group in groups) == min(readers, layers - 1)


def test_ranges():
    assert ranges([7, 1, 2, 3]) == "1-3, 7" and ranges([]) == ""
    assert named_layers([7]) == "layer 7" and named_layers([7, 1, 2, 3]) == "layers 1-3 and 7"
    assert [counted(n, "layer") for n in (0, 1, 2, 11)] == ["no layers", "one layer", "two layers", "11 layers"]


def test_encoders_have_no_cache_to_save():
    diagnosis = crosslayer.diagnose(tiny("bert"), tokens())
    assert diagnosis.verdict.cache is None and "bidirectional" in diagnosis.sentences()[-1]


def test_gemma2_says_that_masks_alternate():
    diagnosis = crosslayer.diagnose(tiny("gemma2"), tokens())
    assert diagnosis.model.masks == ["causal, window 8", "causal", "causal, window 8"]
    assert rows(diagnosis.verdict)["layers that could share, by depth"] == ["none", ""]


def rows(verdict) -> dict[str, list[str]]:
    """Return layers and value of each finding."""
    return {name: cells for name, *cells in findings(verdict)[2]}


def test_the_findings_name_the_groups_of_both_rules_and_what_they_keep():
    blocks = np.kron(np.eye(8), np.ones((2, 2)))
    candidates = verdict(measures(16, blocks), [FULL] * 16, 512, [], [])
    by_depth, by_similarity = (
        rows(candidates)[f"layers that could share, by {rule}"] for rule in ("depth", "similar maps")
    )
    assert by_depth[0] == "[8-11] [12-15]" and by_similarity[0].startswith("[0-1] [2-3]")
    for entry in candidates.cache.by_depth.kept:
        assert f"{100 * entry.share:.3g}% with {entry.title}" in by_depth[1] and entry.title in by_similarity[1]
    shapes = [SLIDING] * 4 + [FULL] * 4  # as many readers, of smaller layers
    blocks = np.kron(np.eye(2), np.array([[1.0, 0.9], [0.9, 1.0]]).repeat(2, 0).repeat(2, 1))
    blocks[4:, 4:] = np.eye(4)
    candidates = verdict(measures(8, blocks), shapes, 512, [], [])
    groups, kept = rows(candidates)["layers that could share, by similar maps"]
    assert groups == "[0-3]" and f"{100 * candidates.cache.by_similarity.kept[0].share:.3g}%" in kept


def sink(**changes):
    """A sink that is none, with changes."""
    plain = {"layers": [], "strongest": 3, "strongest_share": 0.12, "over_even": 1.24, "drains": []}
    return Sink(**{**plain, **changes})


def test_a_sink_of_no_one_and_several_layers():
    whole = verdict(measures(8), [FULL] * 8, 512, [], [])

    def shown(**changes):
        changed = whole.model_copy(update={"sink": sink(**changes)})
        return verdict_sentences(changed)[0], rows(changed)

    none, one, several = shown(), shown(layers=[3]), shown(layers=[1, 2, 3, 5], drains=[7])
    assert "not an attention sink" in none[0] and "12.0%" in none[0] and "1.2× an even" in none[0]
    assert "layer 3" in one[0] and "layers 1-3" in several[0] and len(several[1]) == len(none[1]) + 1
    assert several[1]["value drain of the first token"][0] == "7"


def test_a_massive_activation_is_both_large_and_far_above_the_median():
    large, small, close = (7, -150.0, 1500.0), (7, 80.0, 1500.0), (9, 5000.0, 900.0)
    assert massive([[], [small, close]]) is None
    found = massive([[small], [large, (9, 120.0, 1100.0)], [(7, 130.0, 2000.0)], []])
    assert found == Massive(layers=[1, 2], channels=[7, 9], value=-150.0, ratio=2000.0)
    table = rows(verdict(measures(3), [FULL] * 3, 512, [[], [large], [large]], [[large], [], []]))
    layers, text = table["massive activation of the first token"]
    assert layers == "1-2" and "channel 7: " in text and "-150, 1,500×" in text and "layer 0 " in text
    layers, text = table["massive activation of other tokens"]
    assert layers == "0" and "embedding" in text  # no layer comes before layer 0


def test_redundancy_of_no_one_and_several_layers():
    shapes, whole = [FULL] * 8, verdict(measures(8), [FULL] * 8, 512, [], [])
    ranked = whole.redundancy.attention

    def shown(attention, least):
        cache = whole.cache.model_copy(update={"least_attention": least, "share_without": 7 / 8})
        redundancy = whole.redundancy.model_copy(update={"attention": attention})
        changed = whole.model_copy(update={"redundancy": redundancy, "cache": cache})
        return " ".join(verdict_sentences(changed)), rows(changed)

    name = "attention that changes its input least"
    assert name not in shown([], [])[1] and "Dropping" not in shown([], [])[0]
    assert shown(ranked[:1], [0])[1][name] == ["0", "cos(x, x + Attn(x)) = 0.500"]
    text, found = shown(ranked[:2], [0, 1])
    assert found[name][0] == "0, 1" and "two layers" in text and "keep 87.5%" in text
    assert rows(verdict(measures(2), shapes[:2], 512, [], []))["layers that could share, by depth"][0] == "none"


def test_statistics_of_neighboring_maps_by_hand():
    """Table 11 of arXiv 2502.00439; layer 2 has no attention, so 1 and 3 are neighbors."""
    matrix = np.full((1, 6, 6), np.nan)
    for layer in (0, 1, 3, 4, 5):
        matrix[0, layer, layer] = 1
    for (below, above), cosine in {(0, 1): 0.5, (1, 3): 0.25, (3, 4): 0.75, (4, 5): 1.0}.items():
        matrix[0, below, above] = matrix[0, above, below] = cosine
    found = map_statistics(measure(matrix))
    assert (found.mean, found.largest, found.smallest) == (0.625, 1.0, 0.25)
    assert found.top_less_bottom == (0.75 + 1.0) / 2 - (0.5 + 0.25) / 2
    assert found.deviation == pytest.approx(np.std([0.5, 0.25, 0.75, 1.0]))
    alone = np.full((1, 2, 2), np.nan)
    alone[0, 0, 0] = 1
    assert map_statistics(measure(alone)) is None
