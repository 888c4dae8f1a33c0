"""Ways to store a cache are measured on the same windows, with all their bytes, and compared at equal bytes."""

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from crosslayer.codec.chain import code_layers
from crosslayer.codec.states import new_cache, read_states
from crosslayer.core.transformers_versions import CACHE
from crosslayer.corpus.windows import Windows
from tests.helpers.codecs import cache_of, random_ids
from tests.helpers.tiny import tiny

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
PROMPT, CONTINUED, WINDOWS = 40, 12, 3
PER_TOKEN = 2 * 3 * 2 * (8 + 8)  # bytes in the 16-bit cache of the tiny model
NAMES = ("paired", "parts", "rivals", "ways")


@pytest.fixture(scope="module")
def modules():
    """The modules of the benchmark; its script is loaded under another name than the standard library's `codecs`."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(f"codec_rivals.{name}") for name in NAMES}
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def script(modules):
    spec = importlib.util.spec_from_file_location("codecs_benchmark", BENCHMARKS / "codecs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ways(modules):
    model = tiny("llama").float()
    return modules["ways"].Ways(model, random_ids(12, 60), random_ids(2, PROMPT, 1), PROMPT, 0)


@pytest.fixture(scope="module")
def prompts(modules, ways, tmp_path_factory):
    ids = random_ids(WINDOWS, PROMPT + CONTINUED, 2)
    prompts = modules["paired"].Prompts(ways.model, ids, PROMPT, tmp_path_factory.mktemp("prompts"))
    prompts.read()
    return prompts


def test_the_exact_cache_costs_nothing_and_zeros_cost_what_a_loop_says(prompts, ways):
    def zeros(cache, ids):
        empty = [torch.zeros(PROMPT, shape.width) for shape in ways.shapes]
        return new_cache([empty], ways.shapes, [0], PROMPT, torch.float32), 7

    def same(cache, ids):
        states = read_states(cache, 0, 0, PROMPT, ways.shapes)
        return new_cache([states], ways.shapes, [0], PROMPT, torch.float32), 5

    found, _ = prompts.measure({"zeros": zeros, "same": same})
    assert np.abs(found["same"][:, 0]).max() < 1e-5  # of float32
    assert found["same"][:, 1].tolist() == [5] * WINDOWS
    for row, (kl, _) in zip(prompts.ids, found["zeros"], strict=True):
        with torch.no_grad():
            exact = ways.model(row[None]).logits[0, PROMPT:].log_softmax(-1)
            cache, _ = zeros(None, None)
            other = ways.model(row[None, PROMPT:], use_cache=True, **{CACHE: cache}).logits[0].log_softmax(-1)
        assert kl == pytest.approx(float((exact.exp() * (exact - other)).sum(-1).mean()), rel=1e-4)


def test_more_bytes_cost_less(prompts, ways):
    costs = {}
    for unit in ("codec@25", "kvtc@25", "aqua@2", "aqua@4", "int@4", "unrotated-int@4", "fp8"):
        made = ways.units()[unit]()
        found, _ = prompts.measure(made.ways)
        costs |= {(name, unit): values.mean(0) for name, values in found.items()}
    assert costs["aqua-0", "aqua@4"][0] < costs["aqua-0", "aqua@2"][0]
    by_exact = [costs[f"kvtc-{name}", "kvtc@25"] for name in ("0", "1", "4")]
    assert by_exact[0][1] < by_exact[1][1] < by_exact[2][1]
    share = by_exact[2][1] / PROMPT / PER_TOKEN
    assert share == pytest.approx(0.25, rel=0.25)  # groups of 16 of 48 components are coarse
    assert costs["codec", "codec@25"][1] / PROMPT / PER_TOKEN == pytest.approx(0.25, rel=0.6)  # with its headers
    exact = 2 * PROMPT * 96 / 2  # with one byte a number
    assert costs["fp8", "fp8"][1] == exact


def test_bytes_of_aqua_and_integers_are_counted_by_hand(modules, ways):
    ids = random_ids(1, PROMPT, 3)
    cache = cache_of(ways.model, ids)
    header = modules["rivals"].HEADER
    made = ways.aqua(2).ways
    # 32 numbers a layer: 4 bits in the first of three, 2 in the others, and six scales of 16 bits
    a_token = 32 * (4 + 2 + 2) / 8 + 6 * 2
    assert made["aqua-0"](cache, ids)[1] == PROMPT * a_token + header
    assert made["aqua-4"](cache, ids)[1] == (PROMPT - 4) * a_token + 4 * PER_TOKEN + header
    # 8 channels of a head: 4 bytes of codes, a scale and a smallest value
    assert ways.integers(4).ways["unrotated-int"](cache, ids)[1] == PROMPT * 3 * 2 * 2 * (4 + 4) + header


def test_exact_tokens_are_as_they_were(ways):
    ids = random_ids(1, PROMPT, 3)
    cache = cache_of(ways.model, ids)
    stored, _ = ways.aqua(2).ways["aqua-4"](cache, ids)
    for layer, (own, other) in enumerate(zip(cache.layers, stored.layers, strict=True)):
        assert (own.keys[:, :, :4] - other.keys[:, :, :4]).abs().max() < 4e-3 * own.keys.abs().max()  # float16
        assert (own.keys[:, :, 4:] - other.keys[:, :, 4:]).abs().max() > 0.01, layer


def test_the_plan_of_kvtc_is_the_best_of_all(modules, ways):
    basis = modules["rivals"].bases_of(ways.data, 0)[0]
    assert len(basis.mean) == 48 and set(basis.errors) == {(16, 2), (16, 4), (16, 8)}
    for price in (1e-3, 1e-2, 0.1):
        groups, bits = basis.plan(price)
        costs = []
        for count in range(4):
            for choice in itertools.product((2, 4, 8), repeat=count):
                errors = sum(basis.errors[16, bits][at] for at, bits in enumerate(choice))
                costs.append(errors + basis.left[count] + price * sum(16 * bits + 32 for bits in choice))
        errors = sum(basis.errors[group.size, group.bits][group.start // 16] for group in groups)
        assert errors + basis.left[len(groups)] + price * bits == pytest.approx(min(costs), rel=1e-9)


def test_the_components_of_kvtc_hold_all_energy(modules, ways):
    basis = modules["rivals"].bases_of(ways.data, 0)[1]
    identity = basis.vectors.T @ basis.vectors
    assert (identity - torch.eye(48)).abs().max() < 1e-4
    values = torch.cat([own[:, 16:] for own in ways.data.states], 1)
    assert basis.left[0] == pytest.approx(float((values - values.mean(0)).square().sum(1).mean()), rel=1e-3)
    assert basis.left == sorted(basis.left, reverse=True) and basis.left[-1] == 0


def test_lloyd_max_is_that_of_the_tables(modules):
    assert modules["rivals"].lloyd_max(1)[1] == pytest.approx((2 / np.pi) ** 0.5, abs=1e-4)
    assert modules["rivals"].lloyd_max(2).tolist() == pytest.approx([-1.5104, -0.4528, 0.4528, 1.5104], abs=1e-3)


@pytest.mark.parametrize("part", ["depth", "metric", "steps", "entropy"])
def test_the_codec_without_a_part_decodes_what_it_codes(prompts, ways, part):
    made = ways.codec(25, part)
    found, _ = prompts.measure(made.ways)
    assert np.isfinite(found[part]).all() and (found[part][:, 1] < PROMPT * PER_TOKEN).all()
    if part == "depth":
        whole = ways.codec(25)
        assert made.parameters < whole.parameters


def test_codes_of_a_fixed_length_come_back(modules, ways):
    chain = modules["parts"].with_fixed_lengths(ways.fitting().chain(0.25), ways.data)
    codes, _ = code_layers(chain.layers, *ways.data.held_out)
    for layer, own in zip(chain.layers, codes, strict=True):
        assert (own >= layer.low.numpy()).all() and (own <= layer.high.numpy()).all()
    parts = chain.coder.encode(codes)
    tokens = [own.shape[1] for own in codes]
    for data, lengths, count in zip(parts, chain.coder.lengths, tokens, strict=True):
        assert len(data) == -(-int(lengths.sum()) * count // 8)
    found = [np.empty_like(own) for own in codes]
    chain.coder.decode(parts, found)
    for own, other in zip(codes, found, strict=True):
        assert np.array_equal(own, other)


def test_a_curve_is_read_at_equal_bytes(modules):
    paired = modules["paired"]
    shares = np.array([0.2, 0.1, 0.05])
    scale = np.array([1.0, 2.0, 3.0, 4.0])  # of the windows
    rows = [
        {"share": share, "share_by_window": [share] * 4, "kl_by_window": (scale * share**-1.5 / 1e3).tolist()}
        for share in shares
    ]
    for share in (0.15, 0.06, 0.05 / 1.05):
        costs, at = paired.cost_at(rows, np.full(4, share))
        assert np.exp(costs) == pytest.approx(scale * share**-1.5 / 1e3) and at == pytest.approx(share, rel=1e-5)
    costs, at = paired.cost_at(rows, np.full(4, 0.02))  # not so few bytes
    assert np.exp(costs) == pytest.approx(scale * 0.05**-1.5 / 1e3) and at == 0.05
    assert paired.cost_at(rows, np.full(4, 0.3)) is None
    own = {"share": 0.1, "share_by_window": [0.1] * 4, "kl_by_window": (0.25 * scale * 0.1**-1.5 / 1e3).tolist()}
    ratio = paired.ratio_of(own, rows, [0, 0, 1, 1])
    assert ratio["ratio"] == pytest.approx([0.25] * 3, rel=1e-5) and ratio["better_on"] == ratio["of"] == 4


def given_for(path, **changes):
    options = {"model": "tiny", "windows": 2, "prompt": PROMPT, "continued": CONTINUED, "calibration": 12, "length": 60}
    options |= {"seed": 0, "bos": "auto", "matrix": False, "share": 25.0, "out": path, "ways": "", "text": []}
    return argparse.Namespace(**{**options, "fit_text": [], "zone": 0.1, "save": None, **changes})


def windows_of(script, monkeypatch):
    judged = Windows(random_ids(4, PROMPT + CONTINUED, 2), (0, 1, 2, 3), ("a", "a", "b", "b"))
    held = Windows(random_ids(2, PROMPT + CONTINUED, 1), (0, 1), ("a", "b"))
    fit = Windows(random_ids(12, 60), tuple(range(12)), ("c",) * 12)
    own = Windows(random_ids(24, 60, 5), tuple(range(24)), ("a",) * 12 + ("b",) * 12)
    monkeypatch.setattr(script, "cut", lambda *_: {"judged": judged, "held out": held, "fit": fit, "own": own})


def test_a_run_goes_on_where_it_stopped(script, ways, monkeypatch, tmp_path):
    windows_of(script, monkeypatch)
    path = tmp_path / "codecs.json"
    script.run(given_for(path, ways="int@4,unrotated-int"), ways.model, None)
    before = json.loads(path.read_text())
    assert [row["unit"] for row in before["rows"]] == ["int@4", "unrotated-int@4"] and before["ratios"] == []
    record = script.run(given_for(path, ways="codec@25,int@4", save=tmp_path), ways.model, None)
    assert (tmp_path / "codec@25" / "codec.safetensors").is_file()
    assert record["rows"][:2] == before["rows"] and record["rows"][2]["way"] == "codec"
    assert {one["other"] for one in record["ratios"]} == {"int", "unrotated-int"}
    assert all(len(row["kl_by_window"]) == 4 and len(row["kl"]) == 3 for row in record["rows"])
    assert "codec" in script.table(record) and json.loads(path.read_text())["rows"] == record["rows"]
    with pytest.raises(SystemExit, match="--out"):
        script.run(given_for(path, seed=1), ways.model, None)
    with pytest.raises(SystemExit, match="--ways"):
        script.run(given_for(path, ways="zip"), ways.model, None)


def test_a_matrix_has_every_fit_on_every_domain(script, ways, monkeypatch, tmp_path):
    windows_of(script, monkeypatch)
    record = script.run(given_for(tmp_path / "matrix.json", matrix=True), ways.model, None)
    cells = {(cell["fitted"], cell["tested"]): cell for cell in record["matrix"]}
    assert set(cells) == set(itertools.product(("mixed", "a", "b", "c"), ("all", "a", "b")))
    assert all(("ratio" in cell) == (fitted != "mixed") for (fitted, _), cell in cells.items())
    worst = max(cells[key]["ratio"][0] for key in cells if key[0] != "mixed" and key[1] != "all")
    assert record["worst"]["ratio"][0] == worst
