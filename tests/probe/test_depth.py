"""Depth mixing: the weights that are read off are those with which a method reads."""

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.probe.depth import depth_mixing
from crosslayer.testing.tiny import build, config_of
from tests.helpers.tiny import tiny, tokens

READERS = [f"{layer} {site}" for layer in range(6) for site in ("attn", "mlp")] + ["output"]
LATER = np.triu(np.ones((13, 13), dtype=bool), 1)


def recorded(model, ids):
    with torch.no_grad(), depth_mixing(model) as mixing:
        model(ids, use_cache=False)
    return mixing


def sources_of(mixing):
    return torch.stack(mixing._sources)  # (N, T, C)


@pytest.mark.parametrize("methods", [[], ["resformer"], ["cla"]], ids=str)
def test_plain_residuals_have_ones(methods):
    mixing = recorded(build(config_of(methods)), tokens(batch=1, length=9))
    assert mixing.readers == READERS
    table = mixing.table()
    assert (np.isnan(table) == LATER).all() and np.allclose(table[~LATER], 1, atol=1e-8)


def test_other_models_have_ones():
    table = recorded(tiny("llama").float().eval(), tokens(batch=1, length=9)).table()
    assert np.allclose(table[~np.isnan(table)], 1, atol=1e-3)


@pytest.mark.parametrize("block", [1, 4])
def test_attention_residuals_have_alpha(block):
    """By a loop over blocks: the weight of a block is that of each of its sublayers."""
    model = build(config_of([{"name": "attnres", "block": block}]))
    mixing = recorded(model, tokens(batch=1, length=9))
    table, outputs = mixing.table(), sources_of(mixing)
    readers = [getattr(layer, f"{site}_residual") for layer in model.model.layers for site in ("attn", "mlp")]
    for row, reader in enumerate([*readers, model.model.final_residual]):
        if row == 0:
            assert table[0, 0] == pytest.approx(1)
            continue
        blocks = [[0]] + [list(range(1 + start, min(1 + start + block, row + 1))) for start in range(0, row, block)]
        values = [outputs[block].sum(dim=0) for block in blocks]
        direction = (reader.query * reader.gain).detach().double()
        scores = [v @ direction / (v.square().mean(-1) + model.config.rms_norm_eps).sqrt() for v in values]
        alpha = torch.stack(scores).softmax(dim=0).mean(dim=1)
        for block_weight, members in zip(alpha.tolist(), blocks, strict=True):
            assert np.allclose(table[row, members], block_weight, atol=1e-6)


def test_denseformer_has_its_trained_weights():
    """By a loop: X_i and Y_i as combinations of the embedding and the outputs."""
    model = build(config_of(["denseformer"]))
    table = recorded(model, tokens(batch=1, length=9)).table()
    stream, outputs = np.eye(13)[0], [np.eye(13)[0]]
    for number, layer in enumerate(model.model.layers):
        for row in (2 * number, 2 * number + 1):
            assert np.allclose(table[row, : row + 1], stream[: row + 1], atol=1e-6)
            stream = stream + np.eye(13)[row + 1]
        outputs.append(stream)
        weights = layer.mlp_residual.weights.detach().numpy()  # of all outputs so far
        stream = sum(weight * output for weight, output in zip(weights, outputs, strict=True))
    assert np.allclose(table[-1], stream, atol=1e-6)


@pytest.mark.parametrize("method", ["mudd", "hyper_connections", {"name": "attnres", "weights": "sigmoid"}], ids=str)
def test_weights_times_outputs_are_what_was_read(method):
    """Of a single token a mean over tokens is the weight itself."""
    mixing = recorded(build(config_of([method])), tokens(batch=1, length=9))
    mixing._reads = [(read[4:5], count) for read, count in mixing._reads]
    mixing._sources = [source[4:5] for source in mixing._sources]
    table, outputs = mixing.table(), sources_of(mixing)
    for row, (read, count) in zip(table, mixing._reads, strict=True):
        expected = torch.einsum("n,ntc->tc", torch.tensor(row[:count]), outputs[:count])
        assert np.isnan(row[count:]).all() and torch.allclose(read, expected, atol=1e-6)


@pytest.mark.parametrize(
    "methods",
    [
        [{"name": "attnres", "depth_heads": 2}],  # weights differ from channel to channel
        [{"name": "drop", "attention": (2,), "compensation": "attention"}],  # W_c is no sublayer's output
    ],
    ids=str,
)
def test_what_is_no_sum_of_outputs_has_no_weights(methods):
    assert recorded(build(config_of(methods)), tokens(batch=1, length=9)).table() is None


def test_more_sources_than_channels_have_no_weights():
    model = build(config_of([], hidden_size=8, num_attention_heads=2, num_key_value_heads=1))
    assert recorded(model, tokens(batch=1, length=9)).table() is None


def test_hooks_are_removed_also_after_an_error():
    model = build(config_of(["attnres"]))
    with pytest.raises(RuntimeError), depth_mixing(model):
        raise RuntimeError
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_diagnosis_shows_the_weights(tmp_path):
    model = build(config_of([{"name": "attnres", "block": 4}])).float()
    ids = tokens(length=16)
    result = crosslayer.diagnose(model, ids)
    depth = result.depth_weights
    assert depth.readers == READERS and depth.weights.array().shape == (13, 13)
    means = np.stack([recorded(model, row[None]).table() for row in ids]).mean(axis=0)
    assert np.allclose(depth.weights.array(), means, atol=1e-5, equal_nan=True)
    result.save(tmp_path / "folder")
    assert crosslayer.load_result(tmp_path / "folder").depth_weights == depth
    assert (tmp_path / "folder" / "report.html").read_text().count("Weights over depth") >= 1


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2"])
def test_a_norm_behind_the_mlp_is_part_of_what_it_adds(family):
    """Every sublayer reads the plain sum: before, these models silently had no matrix."""
    model = tiny(family, hidden_size=64)
    with torch.no_grad(), depth_mixing(model) as mixing:
        model(tokens(batch=1, length=60), use_cache=False)
    table = mixing.table()
    assert table.shape == (7, 7) and np.nanmax(np.abs(table - 1)) < 1e-12
