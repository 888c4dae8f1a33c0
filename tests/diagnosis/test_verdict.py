"""Groups of layers, shares of the cache, and the sentences."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crosslayer
from crosslayer.diagnosis.groups import paper_groups, similar_groups
from crosslayer.diagnosis.verdict import ranges, verdict
from crosslayer.probe.shapes import LayerShape, may_share
from tests.helpers.tiny import tiny, tokens

FULL = LayerShape(9, 3, 64, 64, causal=True)
SLIDING = LayerShape(9, 3, 64, 64, causal=True, window=8)


def test_windows_longer_than_the_text_still_differ():
    record = crosslayer.diagnose(tiny("gemma2", sliding_window=4096), tokens()).record()
    assert record["verdict"]["superblocks"] == {
        "paper": [],
        "similar": [],
        "resting_on": "map_similarity_without_first",
    }


def test_even_attention_is_no_sink():
    model = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    for length in (2, 3, 5, 24):
        sink = crosslayer.diagnose(model, tokens(length=length)).record()["verdict"]["sink"]
        assert sink["layers"] == [] and sink["over_even"] == pytest.approx(1, abs=1e-5)


def test_layers_that_store_nothing_do_not_count():
    stored = [LayerShape(2, 2, 8, 8, causal=True, stored=s) for s in (("keys", "values"), ("values",), ())]
    assert [shape.cached(10) for shape in stored] == [(160, 160), (0, 160), (0, 0)]
    assert may_share(stored[0], stored[2])


def measures(layers, similarity=None):
    row = {"mean": [0.5] * layers}
    matrix = {"mean": (np.eye(layers) if similarity is None else similarity).tolist()}
    names = (
        "first_token_share",
        "hidden_norm_ratio",
        "value_norm_ratio",
        "attention_io_similarity",
        "layer_io_similarity",
    )
    return {**{name: row for name in names}, "map_similarity": matrix, "map_similarity_without_first": matrix}


def test_paper_groups_of_30_32_and_42_layers():
    assert paper_groups([FULL] * 30) == [[18, 19, 20, 21], [22, 23, 24, 25], [26, 27, 28, 29]]
    assert paper_groups([FULL] * 32) == [list(range(s, s + 4)) for s in (16, 20, 24, 28)]
    assert paper_groups([FULL] * 42) == [list(range(s, s + 4)) for s in (22, 26, 30, 34, 38)]  # Gemma-2 9B
    assert len([i for g in paper_groups([FULL] * 30, size=2) for i in g[1:]]) == 7


@pytest.mark.parametrize(("layers", "uniattn", "cla"), [(30, 0.85, 0.70), (32, 0.8125, 0.625)])
def test_shares_are_the_papers(layers, uniattn, cla):
    found = verdict(measures(layers), [FULL] * layers, 512)["kv_share"]
    assert found["paper"]["uniattn"] == pytest.approx(uniattn) and found["paper"]["cla"] == pytest.approx(cla)
    assert found["llmdrop"]["kv"] == pytest.approx(cla)  # as many layers


def test_layers_with_different_masks_are_never_grouped():
    shapes = [FULL, SLIDING] * 8
    assert paper_groups(shapes) == [] and similar_groups(np.ones((16, 16)), shapes, 5) == []
    assert not may_share(FULL, SLIDING) and not may_share(None, None)


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
def test_similar_groups_are_contiguous_and_have_the_asked_followers(layers, followers, random):
    matrix = np.array([[random.random() for _ in range(layers)] for _ in range(layers)])
    groups = similar_groups((matrix + matrix.T) / 2, [FULL] * layers, followers)
    assert all(group == list(range(group[0], group[-1] + 1)) for group in groups)
    assert sum(len(group) - 1 for group in groups) == min(followers, layers - 1)


def test_ranges():
    assert ranges([7, 1, 2, 3]) == "1-3, 7" and ranges([]) == ""


def test_encoders_have_no_cache_to_save():
    found = crosslayer.diagnose(tiny("bert"), tokens()).record()["verdict"]
    assert found["kv_share"] is None and any("keeps no KV cache" in word for word in found["words"])


def test_gemma2_says_that_masks_alternate():
    found = crosslayer.diagnose(tiny("gemma2"), tokens()).record()
    assert found["model"]["masks"] == ["causal, window 8", "causal", "causal, window 8"]
    assert any("masks differ" in word for word in found["verdict"]["words"])


def test_it_is_explained_why_both_rules_save_the_same_and_that_they_agree():
    blocks = np.kron(np.eye(4), np.ones((4, 4)))
    blocks[:8, :8] = np.eye(8)
    said = verdict(measures(16, blocks), [FULL] * 16, 512)["words"]
    assert any("followers (6) and so for the same shares, gives the same superblocks: what depth" in w for w in said)
    blocks = np.kron(np.eye(8), np.ones((2, 2)))
    said = verdict(measures(16, blocks), [FULL] * 16, 512)["words"]
    assert any("(6) and so for the same shares, gives the candidate superblocks [0-1] [2-3]" in w for w in said)
    shapes = [SLIDING] * 4 + [FULL] * 4  # as many followers, of smaller layers
    blocks = np.kron(np.eye(2), np.array([[1.0, 0.9], [0.9, 1.0]]).repeat(2, 0).repeat(2, 1))
    blocks[4:, 4:] = np.eye(4)
    said = verdict(measures(8, blocks), shapes, 512)["words"]
    assert any("without the first column gives the candidate superblocks [0-3]: the KV cache" in w for w in said)
