"""The kernel that reads pages of stored codes, in Triton's interpreter, against what pcodec wrote."""

import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("pcodec")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from crosslayer.codec import decoder as decoder_module  # noqa: E402
from crosslayer.codec import entropy  # noqa: E402
from crosslayer.codec.device import Reader  # noqa: E402
from crosslayer.codec.entropy import Coder  # noqa: E402
from crosslayer.core.kernels import pages  # noqa: E402
from tests.helpers.codecs import cache_of, fitted, random_ids  # noqa: E402
from tests.helpers.pages import CHANNELS, UNSET, blocks_of, expected  # noqa: E402

CPU = torch.device("cpu")
GPU = Path(__file__).parents[3] / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def real():
    """Codes and classes of a model's layers, out of the benchmark's file; read before pages are made small."""
    sys.path.insert(0, str(GPU))
    try:
        import real_codes

        return {name: real_codes.load(name) for name in real_codes.names()}
    finally:
        sys.path.remove(str(GPU))


@pytest.fixture(autouse=True)
def small(real, monkeypatch):
    """Many pages, though the codes are few: the interpreter reads some hundred codes in a second."""
    monkeypatch.setattr(entropy, "CHANNELS", 8)
    monkeypatch.setattr(entropy, "NUMBERS", 64)


def read(prepared, shape, scales=None):
    out = torch.full(shape, UNSET, dtype=torch.int16 if scales is None else torch.float16)
    pages.read(*prepared, out, scales, block=32)
    return out


def test_codes_and_coefficients():
    """Layers with windows, ragged pages, and codes of up to 14 bits."""
    coder, codes, counts, stops, parts = blocks_of(0)
    prepared, shape = Reader(coder, [CHANNELS] * len(codes)).prepare(parts, counts, stops, CPU), (80, stops[-1])
    oracle = torch.from_numpy(expected(codes, counts, stops))
    assert torch.equal(read(prepared, shape), oracle)
    generator = torch.Generator().manual_seed(0)
    shifts, steps = torch.rand(80, generator=generator) / 5, torch.rand(stops[-1], generator=generator) + 0.5
    values = ((oracle.float() + oracle.sign() * shifts[:, None]) * steps).half()
    values[oracle == UNSET] = UNSET
    assert torch.equal(read(prepared, shape, (shifts, steps)), values)


def test_a_batch_is_256_codes(monkeypatch):
    """A page of more codes has their bins in several parts."""
    monkeypatch.setattr(entropy, "NUMBERS", 600)
    monkeypatch.setattr(entropy, "CHANNELS", 40)
    coder, codes, counts, stops, parts = blocks_of(1, wide=False)
    prepared = Reader(coder, [CHANNELS] * len(codes)).prepare(parts, counts, stops, CPU)
    assert (prepared.facts[2] * prepared.facts[8]).max() > 256
    assert np.array_equal(read(prepared, (80, stops[-1])).numpy(), expected(codes, counts, stops))


def test_codes_of_real_models(real):
    """Every 40th channel of three layers, one of them with a window; the first three tokens have no codes."""
    counts, stops = [[29, 0, 29], [32, 20, 32], [9, 9, 9]], [32, 64, 73]
    for every, kinds in real.values():
        picked = (1, len(every) // 2, len(every) - 1)
        codes, classes = [every[at][::40, :70] for at in picked], [kinds[at][::40].clone() for at in picked]
        coder, channels, parts = Coder(classes), [len(own) for own in classes], []
        for own, stop in zip(counts, stops, strict=True):
            spans = [slice(stop - 3 - count, stop - 3) for count in own]
            parts.append(coder.encode([code[:, span] for code, span in zip(codes, spans, strict=True)]))
        found = read(Reader(coder, channels).prepare(parts, counts, stops, CPU), (sum(channels), stops[-1]))
        for code, out, first in zip(codes, found.split(channels), (0, 41, 0), strict=True):
            assert np.array_equal(out[:, 3 + first :].numpy(), code[:, first:])
            assert (out[:, : 3 + first] == UNSET).all()


def test_damaged_pages_are_read_within_bounds():
    """Bytes of pages that are changed give other codes; words before and behind all, and other rows, stay apart."""
    coder, codes, counts, stops, parts = blocks_of(0, wide=False)
    reader, generator = Reader(coder, [CHANNELS] * len(codes)), np.random.default_rng(0)
    oracle, tried = expected(codes, counts, stops), 0
    while tried < 6:
        damaged = [[bytearray(part) for part in own] for own in parts]
        for own in damaged:
            for part in own:
                if len(part) > 20:
                    part[int(generator.integers(4, len(part)))] ^= int(generator.integers(1, 256))
        try:
            prepared = reader.prepare([[bytes(part) for part in own] for own in damaged], counts, stops, CPU)
        except ValueError:
            continue
        tried += 1
        out = torch.full((82, stops[-1] + 2), UNSET, dtype=torch.int16)
        pages.read(*prepared, out[1:81, 1:-1], block=32)  # a read beyond the words would be an error
        assert (out[[0, -1]] == UNSET).all() and (out[:, [0, -1]] == UNSET).all()
        assert (out[1:81, 1:-1].numpy()[oracle == UNSET] == UNSET).all()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_is_decoded_as_without_the_kernel(family):
    """The text begins with a token three times, whose states are stored once."""
    model, codec = fitted(family)
    ids = random_ids(1, 34, 3)
    ids[0, :3] = ids[0, 0]
    data = codec.encode(cache_of(model, ids), ids, block=16)
    plain = codec.decode(data, half=True)
    with mock.patch.object(decoder_module, "reads_pages", lambda device: True):
        found = codec.decode(data, half=True)
    for own, other in zip(found.layers, plain.layers, strict=True):
        assert torch.equal(own.keys, other.keys) and torch.equal(own.values, other.values)
