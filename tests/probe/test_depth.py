"""Depth mixing: the weights that are read off are those with which a method reads."""

from unittest import mock

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.probe.depth import Read, depth_mixing
from crosslayer.testing.tiny import build, config_of
from tests.helpers.shipped import families, needs, shipped
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
    mixing._reads = [Read(one.read[4:5], one.known) for one in mixing._reads]
    mixing._sources = [source[4:5] for source in mixing._sources]
    table, outputs = mixing.table(), sources_of(mixing)
    for row, (read, count, _) in zip(table, mixing._reads, strict=True):
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
    largest = depth.sources[int(np.nanmean(means[:, :7], axis=0).argmax())]
    (most,) = [row[1] for _, _, rows in result.tables() for row in rows if "over depth" in row[0]]
    assert most.split(", ")[0] == largest
    shares = {(top.share, layer) for layer, tops in enumerate(result.top_tokens) for top in tops if not top.first}
    (other,) = [row for _, _, rows in result.tables() for row in rows if "another token" in row[0]]
    assert f"{max(shares)[0]:.1%}" in other[2] and other[1] == str(max(shares)[1])
    plain = crosslayer.diagnose(build(config_of([])).float(), ids)
    assert not any("over depth" in row[0] for _, _, rows in plain.tables() for row in rows)
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


def released(family):
    """A random model in float64, whose parts that compute in float32 do not; and its recorded pass."""
    model, ids = shipped(family, hidden_size=64), tokens(batch=1, length=17)
    if family == "glm5_next_text":  # its linear attention needs float32
        return model, recorded(model, ids), ids
    model.double().config._experts_implementation = "eager"  # the others take no float64
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return model, recorded(model, ids), ids


@needs("inkling2_text")
def test_inkling_2_reads_with_its_softmax():
    """By a loop over blocks: α of a normed block, so that of each of its outputs it takes α / rms(block)."""
    model, mixing, _ = released("inkling2_text")
    table, outputs = mixing.table(), sources_of(mixing)
    readers = [getattr(layer, f"{name}_input") for layer in model.model.layers for name in ("attention", "mlp")]
    assert len(mixing.sources) == len(readers) + 1 == 9
    for row, reader in enumerate([*readers, model.model.final_input]):
        if row == 0:
            assert reader is None and table[0, 0] == pytest.approx(1)
            continue
        blocks = [[0]] + [list(range(1 + start, min(5 + start, row + 1))) for start in range(0, row, 4)]
        values = [outputs[block].sum(dim=0) for block in blocks]  # (T, C)
        query = reader.query.detach().double().reshape(-1, 64)[0] / 8  # over √C; of three, that of queries
        inverse = [1 / (v.square().mean(-1) + 1e-6).sqrt() for v in values]
        alpha = torch.stack([v @ query * r for v, r in zip(values, inverse, strict=True)]).softmax(dim=0)
        taken = (alpha * torch.stack(inverse)).mean(dim=1)
        for weight, members in zip(taken.tolist(), blocks, strict=True):
            assert np.allclose(table[row, members], weight, atol=1e-5), row


def test_deepseek_v4_reads_with_its_own_pre_and_comb():
    """By a loop over sublayers: a stream holds Σ comb of what the streams held, and post of the new output."""
    model, seen = shipped("deepseek_v4", hidden_size=64, num_hidden_layers=4, layer_types=None).double(), []
    model.config._experts_implementation = "eager"

    def keep(module, args, outputs):
        streams, (post, comb, _) = args[0][0], outputs  # (T, S, C), (1, T, S), (1, T, S, S)
        flat = module.input_norm(streams.flatten(1))
        pre = torch.sigmoid(flat @ module.fn[:4].T * module.scale[0] + module.base[:4]) + module.hc_eps
        seen.append((pre, post[0], comb[0]))

    for layer in model.model.layers:
        for part in (layer.attn_hc, layer.ffn_hc):
            part.register_forward_hook(keep)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        mixing = recorded(model, tokens(batch=1, length=17))
    table, found, held = mixing.table(), mixing.by_stream(), torch.ones(17, 1, 4, dtype=torch.float64)  # (T, N, S)
    assert mixing.why.endswith("(0 attn, 0 mlp, 1 attn)")
    for row, (pre, post, comb) in enumerate(seen):
        pairs = (held * pre[:, None]).detach().numpy()
        assert np.allclose(table[row, : row + 1], pairs.sum(axis=-1).mean(axis=0), atol=1e-5)
        if row < 3:  # fewer outputs than streams
            assert np.isnan(found.weights[row]).all() and np.isnan(found.pairs[row]).all()
        else:
            assert np.allclose(found.weights[row], pre.detach().mean(dim=0), atol=1e-5)
            assert np.allclose(found.pairs[row, : row + 1], pairs.mean(axis=0), atol=1e-5)
            assert np.isnan(found.pairs[row, row + 1 :]).all()
        held = torch.cat([torch.einsum("tnj,tjk->tnk", held, comb), post[:, None]], dim=1)


def test_outputs_of_gemma_3n_fade_by_the_square_root_of_two_a_layer():
    """Its LAuReL block divides the sum by √2; what a linear map reads of the streams at the end is no sum of them."""
    _, mixing, _ = released("gemma3n_text")
    table = mixing.table()
    assert mixing.sources[:6] == [*(f"embedding, stream {k}" for k in range(4)), "0 attn", "0 laurel"]
    assert np.isnan(table[-1]).all() and mixing.why.endswith("(output)")
    weights = mixing.by_stream().weights
    assert np.isnan(weights[1::2]).all() and not np.isnan(weights[:-1:2]).any()  # an MLP reads attention's output, too
    assert np.allclose(np.nanmean(weights, axis=0), [1, 0, 0, 0], atol=0.05)  # a prediction is nearly the active stream
    numbers = [mixing.sources.index(f"{layer} attn") for layer in range(6)]
    for layer in range(6):
        assert table[2 * layer + 1, numbers[layer]] == pytest.approx(0.5**0.5, abs=0.01)


@pytest.mark.parametrize("family", families("deepseek_v4", "glm5_next_text", "hy_v4", "gemma3n_text", "gemma4_text"))
def test_weights_times_outputs_are_what_a_released_model_reads(family):
    """Of a single token a mean over tokens is the weight itself; linear attention and other blocks are sources too."""
    _, mixing, _ = released(family)
    mixing._reads = [Read(one.read[4:5], one.known) for one in mixing._reads]
    mixing._sources = [source[4:5] for source in mixing._sources]
    table, outputs = mixing.table(), sources_of(mixing)
    for row, one in zip(table, mixing._reads, strict=True):
        if not np.isnan(row).all():
            expected = torch.einsum("n,ntc->tc", torch.tensor(row[: one.known]), outputs[: one.known])
            assert (one.read - expected).abs().max() <= 1e-4 * one.read.abs().max()  # float32: rounding of seven reads
    assert np.isnan(table[:-1]).all(axis=1).sum() == 0


@needs("qwen4_exp_text")
def test_where_channels_have_weights_of_their_own_it_says_so():
    """Qwen4-Exp norms the streams and weighs each channel by itself before a sublayer reads them."""
    _, mixing, _ = released("qwen4_exp_text")
    assert mixing.table() is None and mixing.by_stream() is None and "0 attn, 0 mlp" in mixing.why


def test_a_diagnosis_shows_the_weights_of_streams(tmp_path):
    model, ids = shipped("deepseek_v4", hidden_size=64), tokens(length=20)
    result = crosslayer.diagnose(model, ids)
    depth = result.depth_weights
    assert depth.streams.array().shape == (7, 4) and depth.pairs.array().shape == (7, 7 * 4)
    known = ~np.isnan(depth.pairs.array()).all(axis=1)
    total = np.nansum(depth.pairs.array().reshape(7, 7, 4)[known], axis=-1)
    expected = np.nan_to_num(depth.weights.array()[known])
    assert list(known) == [False] * 3 + [True] * 4
    assert np.allclose(total, expected, rtol=0.2)  # means over the tokens whose streams differ, and over all
    assert any("(0 attn, 0 mlp, 1 attn)" in line for line in result.sentences())
    result.save(tmp_path / "folder")
    assert crosslayer.load_result(tmp_path / "folder") == result
    assert {"depth_weights", "stream_weights", "depth_pairs"} <= {panel.key for panel in result.layout().panels}
