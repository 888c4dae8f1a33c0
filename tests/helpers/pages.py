"""Blocks of random codes whose layers hold different tokens, and a plain reader of their pages."""

import numpy as np
import torch

from crosslayer.codec.device import Prepared
from crosslayer.codec.entropy import Coder

CHANNELS = 20  # of each layer
UNSET = -9999


def blocks_of(seed: int, wide: bool = True):
    """Return a coder, codes (R, T) of layers, of each block the tokens that layers hold and where it stops, and parts.

    With `wide`, a code has up to 14 bits in some channels.
    """
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    classes = [torch.randint(10, 24 if wide else 13, (CHANNELS,)).sort().values for _ in range(4)]
    coder = Coder(classes)
    # two layers with a window, one of them longer; a block before it, at its edge, and ragged ends
    counts = [[0, 22, 22, 0], [16, 25, 25, 16], [25, 25, 25, 25], [7, 7, 7, 7]]
    stops = np.cumsum([25, 25, 25, 7]).tolist()
    spread = [2.0 ** ((own.numpy()[:, None] - 14) / 2) for own in classes]
    codes = [np.round(generator.laplace(0, 1, (CHANNELS, stops[-1])) * own).astype(np.int16) for own in spread]
    parts = []
    for own, stop in zip(counts, stops, strict=True):
        parts.append(coder.encode([code[:, stop - count : stop] for code, count in zip(codes, own, strict=True)]))
    return coder, codes, counts, stops, parts


def expected(codes, counts, stops) -> np.ndarray:
    """Return the codes (C, T) of all layers, `UNSET` where no block has them."""
    out = np.full((CHANNELS * len(codes), stops[-1]), UNSET, np.int16)
    for own, stop in zip(counts, stops, strict=True):
        for layer, count in enumerate(own):
            rows = slice(CHANNELS * layer, CHANNELS * (layer + 1))
            out[rows, stop - count : stop] = codes[layer][:, stop - count : stop]
    return out


def read_naively(prepared: Prepared, out: np.ndarray) -> None:
    """Read all pages bit by bit, as pcodec's format says: four states take turns, and batches of 256."""
    words, facts, rows, nodes, bins = (tensor.numpy() for tensor in prepared)
    stream = int.from_bytes(words.tobytes(), "little")

    def bits(at: int, count: int) -> int:
        return stream >> at & (1 << count) - 1

    for begin, log, tokens, first_node, first_bin, column, pace, row, channels in facts.T.tolist():
        at, states = 8 * begin, []
        for _ in range(4):
            states.append(bits(at, log))
            at += log
        at = -(-at // 8) * 8
        count = tokens * channels
        for batch in range(0, count, 256):
            picked = []
            for number in range(batch, min(batch + 256, count)):
                node = int(nodes[first_node + states[number % 4]])
                picked.append(int(bins[first_bin + (node >> 18)]))
                states[number % 4] = (node & 0x3FFF) + bits(at, node >> 14 & 15)
                at += node >> 14 & 15
            for number, found in enumerate(picked, batch):
                code = (found & 0xFFFF) + bits(at, found >> 16) & 0xFFFF
                at += found >> 16
                out[rows[row + number // tokens], column + number % tokens * pace] = np.uint16(code).view(np.int16)
