"""What a kernel gets to read pages with: tables and places, against a reader in plain Python and against pcodec."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from crosslayer.codec import decoder as decoder_module
from crosslayer.codec import entropy, format
from crosslayer.codec.chain import half_product
from crosslayer.codec.device import Reader
from crosslayer.codec.entropy import Coder
from tests.helpers.codecs import cache_of, fitted, random_ids
from tests.helpers.pages import CHANNELS, UNSET, blocks_of, expected, read_naively

CPU = torch.device("cpu")


@pytest.fixture(params=[(8, 64), (512, 8192)], ids=["many pages", "one page"])
def pages(request, monkeypatch):
    """Limit the channels and codes of a page: the pages of tiny models are never full otherwise."""
    monkeypatch.setattr(entropy, "CHANNELS", request.param[0])
    monkeypatch.setattr(entropy, "NUMBERS", request.param[1])


def test_tables_and_places_of_pages(pages):
    coder, codes, counts, stops, parts = blocks_of(0)
    prepared = Reader(coder, [CHANNELS] * len(codes)).prepare(parts, counts, stops, CPU)
    out = np.full((CHANNELS * len(codes), stops[-1]), UNSET, np.int16)
    read_naively(prepared, out)
    assert np.array_equal(out, expected(codes, counts, stops))


def test_a_library_of_another_format_is_left_to_the_library(pages):
    coder, codes, counts, stops, parts = blocks_of(0)
    reader = Reader(coder, [CHANNELS] * len(codes))
    parts[1][0] = b"\x05" + parts[1][0][1:]
    assert reader.prepare(parts, counts, stops, CPU) is None


def test_damaged_bytes_are_errors_or_other_codes(pages):
    """Every byte of a small block, changed to others: tables stay consistent, or the block is refused."""
    coder, codes, counts, stops, parts = blocks_of(0, wide=False)
    reader, generator = Reader(coder, [CHANNELS] * len(codes)), np.random.default_rng(0)
    refused = changed = 0
    for kind, part in enumerate(parts[0]):
        for at in range(len(part)):
            damaged = bytearray(part)
            damaged[at] ^= int(generator.integers(1, 256))
            others = [[*parts[0][:kind], bytes(damaged), *parts[0][kind + 1 :]], *parts[1:]]
            try:
                prepared = reader.prepare(others, counts, stops, CPU)
            except ValueError:
                refused += 1
                continue
            if prepared is None:
                continue
            changed += 1
            words, facts, _, nodes, bins = prepared
            begin, log, _, first_node, first_bin = facts[:5].long()
            assert (begin >= 0).all() and (begin < 4 * len(words)).all()
            assert (first_node + (1 << log) <= len(nodes)).all() and (first_bin < len(bins)).all()
            for low, size in {(int(node), 1 << int(table)) for node, table in zip(first_node, log, strict=True)}:
                own = nodes[low : low + size].long()
                assert ((own & 0x3FFF) + (1 << (own >> 14 & 15)) <= size).all()  # the next state is in the table
            assert ((bins >> 16) <= 16).all()
    assert refused > 20 and changed > 20  # both kinds were met


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_cut_parts_are_errors(pages, cut):
    coder, codes, counts, stops, parts = blocks_of(0)
    reader = Reader(coder, [CHANNELS] * len(codes))
    for kind in range(len(coder.runs)):
        others = [parts[0], [*parts[1][:kind], parts[1][kind][:-cut], *parts[1][kind + 1 :]], *parts[2:]]
        with pytest.raises(ValueError, match="damaged"):
            reader.prepare(others, counts, stops, CPU)
    with pytest.raises(ValueError, match="tokens"):
        reader.prepare(parts, [[0] * len(codes), *counts[1:]], stops, CPU)


def test_products_of_float16_are_summed_in_float32():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(3, 4096, generator=generator).half(), torch.randn(4096, 5, generator=generator).half())
    base = torch.randn(3, 5, generator=generator).half()
    exact = left.double() @ right.double() + base.double()
    assert (half_product(left, right, base).double() - exact).abs().max() <= 2**-10 * exact.abs().max()  # rounded once


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_float16_decodes_what_float32_does(family, pages):
    """Of states less their means; mistral has sliding windows, and keys of a token that begins the text repeat."""
    model, codec = fitted(family)
    ids = random_ids(2, 50, 3)
    data = codec.encode(cache_of(model, ids), ids, block=16)
    exact, half = codec.decode(data), codec.decode(data, half=True)
    for own, other in zip(exact.layers, half.layers, strict=True):
        assert own.keys.shape == other.keys.shape and own.get_seq_length() == other.get_seq_length()
        for one, two in ((own.keys, other.keys), (own.values, other.values)):
            assert (one - two).norm() <= 2e-3 * one.norm()  # float16 has 2^-11 = 5e-4 of each number, over some layers


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("length", [16, 47, 50])
def test_runs_of_blocks_decode_as_all_together(family, length, monkeypatch):
    """On a GPU, long prompts are decoded in runs; windows begin within one of them."""
    model, codec = fitted(family)
    ids = random_ids(1, 50, 4)
    data = codec.encode(cache_of(model, ids), ids, block=16)
    ((_, packed),) = format.unpack_file(data)
    blocks = [format.unpack(block, codec.widths, len(codec.chain.coder.runs)) for block in packed]
    together = list(codec.decoder.layers(blocks, length, CPU, half=True))
    monkeypatch.setattr(decoder_module, "AT_ONCE", 20)
    for own, other in zip(codec.decoder.layers(blocks, length, CPU, half=True), together, strict=True):
        assert own.shape == other.shape and torch.allclose(own, other, atol=1e-3)  # sums of other lengths


def test_a_codec_of_no_codes_is_read():
    """All of a text of one token is exact."""
    model, codec = fitted()
    ids = random_ids(1, 1, 0)
    ((_, (packed,)),) = format.unpack_file(codec.encode(cache_of(model, ids), ids))
    block = format.unpack(packed, codec.widths, len(codec.chain.coder.runs))
    counts = [codec.decoder.coded(block)]
    assert not any(map(len, block.parts))
    prepared = codec.decoder.pages.prepare([block.parts], counts, [1], CPU)
    assert prepared.facts.shape == (9, 0)
    with pytest.raises(ValueError, match="tokens"):
        codec.decoder.pages.prepare([replace(block, parts=[b"1", *block.parts[1:]]).parts], counts, [1], CPU)


def test_coder_of_layers_without_channels():
    coder = Coder([torch.zeros(0, dtype=torch.long), torch.tensor([3, 3])])
    codes = [np.zeros((0, 5), np.int16), np.arange(10, dtype=np.int16).reshape(2, 5)]
    prepared = Reader(coder, [0, 2]).prepare([coder.encode(codes)], [[5, 5]], [5], CPU)
    out = np.full((2, 5), UNSET, np.int16)
    read_naively(prepared, out)
    assert np.array_equal(out, codes[1])
