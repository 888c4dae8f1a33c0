"""Weights over depth: what is recorded is what was read."""

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.core.method import Residual
from crosslayer.probe.depth import depth_reads
from crosslayer.testing.tiny import build, config_of
from tests.helpers.tiny import tokens

FORMS = [
    {},
    {"block": 1},
    {"block": 5},
    {"weights": "static", "block": 3},
    {"weights": "sigmoid", "query": "input"},
    {"window": 2, "key_norm": False},
]
READERS = [f"{layer} {site}" for layer in range(6) for site in ("attn", "mlp")] + ["output"]


def recorded(model, ids):
    with torch.no_grad(), depth_reads(model) as reads:
        model(ids, use_cache=False)
    return reads


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_weights_times_sources_are_what_was_read(options, monkeypatch):
    """With a single token a mean over tokens is the weight itself."""
    model, calls = build(config_of([{"name": "attnres", **options}])), []
    for residual in (module for module in model.modules() if isinstance(module, Residual)):

        def spied(stream, carry, read=residual.read):
            result = read(stream, carry)
            calls.append(((*carry.get("attnres.sources", ()), stream), result[0]))
            return result

        monkeypatch.setattr(residual, "read", spied)
    reads = recorded(model, tokens(batch=1, length=1))
    table = reads.table()
    assert reads.readers == READERS and len(calls) == len(table) == 13
    for row, (sources, result) in zip(table, calls, strict=True):
        assert np.isnan(row[len(sources) :]).all()
        expected = sum(weight * source for weight, source in zip(row, sources, strict=False))
        assert torch.allclose(result, expected, atol=1e-10)


def test_the_table_is_a_mean_over_tokens_and_passes():
    model, ids = build(config_of(["attnres"])), tokens(length=6)
    whole = recorded(model, ids).table()
    assert whole.shape == (13, 13) and np.allclose(np.nansum(whole, axis=1), 1)
    assert (np.isnan(whole) == np.triu(np.ones((13, 13), dtype=bool), 1)).all()
    with torch.no_grad(), depth_reads(model) as reads:
        for row in ids:
            model(row[None], use_cache=False)
    assert np.allclose(reads.table(), whole, equal_nan=True)


def test_zero_queries_read_all_sources_alike_and_a_block_of_one_is_the_full_form():
    one, other = (build(config_of([{"name": "attnres", "block": block}])) for block in (None, 1))
    other.load_state_dict(one.state_dict())
    assert np.array_equal(recorded(one, tokens()).table(), recorded(other, tokens()).table(), equal_nan=True)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if name.endswith("residual.query"):
                parameter.zero_()
    table = recorded(one, tokens()).table()
    assert np.allclose(
        table,
        [[1 / (row + 1) if column <= row else np.nan for column in range(13)] for row in range(13)],
        equal_nan=True,
    )


def test_the_model_is_as_before_also_after_an_error():
    model = build(config_of(["attnres"]))
    with pytest.raises(RuntimeError), depth_reads(model):
        raise RuntimeError
    assert not any("read" in vars(module) for module in model.modules())
    assert recorded(build(config_of(["resformer"])), tokens()).readers == []


def test_a_diagnosis_shows_the_weights(tmp_path):
    model = build(config_of([{"name": "attnres", "block": 4}])).float()
    ids = tokens(length=16)
    result = crosslayer.diagnose(model, ids)
    depth = result.depth_weights
    assert depth.readers == READERS and depth.weights.array.shape == (13, 4)
    means = np.stack([recorded(model, row[None]).table() for row in ids]).mean(axis=0)
    assert np.allclose(depth.weights.array, means, atol=1e-6, equal_nan=True)
    result.save(tmp_path / "folder")
    again = crosslayer.load_result(tmp_path / "folder")
    assert again.depth_weights == depth
    assert (tmp_path / "folder" / "report.html").read_text().count("Weights over depth") >= 1
    assert crosslayer.diagnose(build(config_of([])).float(), ids).depth_weights is None
