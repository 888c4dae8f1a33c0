"""Entropy coding of a layer's codes: a fixed table for each class of channels, and asymmetric numeral systems (ANS).

A channel belongs to one of 240 classes: scale mixtures of a normal density with 60 scales and 4 spreads of the scale.
A code q stands for |z| from q − ½ + `ZONE` on, z in steps, and is decoded to the mean of its class over that cell. A
table holds whole frequencies of sum 2^24 for the codes −m … m and, last, an escape: such a code follows as it is.
`constriction` codes the symbols of all channels of a class at once; 5 ns a symbol to encode, 10 to 30 to decode.

Shapes: R channels of a layer, T tokens, K classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from scipy.special import erf
from torch import Tensor

from crosslayer.extras import check_extra

ZONE = 0.1  # a code grows only beyond ½ + this
PRECISION = 24  # bits of the frequencies, as in constriction
MOST = 2047  # the largest code that a table has
LARGEST = 2**15 - 1  # the largest code
SCALES = np.geomspace(0.05, 900, 60)  # root mean square of a class, in steps
SPREADS = (0.0, 0.45, 0.8, 1.2)  # standard deviation of the scale's logarithm
TAIL = 2e-3  # mass of a heavy tail in every class
BEYOND = 2.0**-14  # mass beyond a table
Part = tuple[bytes | memoryview, int]  # what `Coder.encode` returned for some tokens, and their number


@dataclass(frozen=True)
class Table:
    """The table of a class: frequencies (m + 1,) of the codes 0 … m, of the escape, and what codes are decoded to."""

    frequencies: np.ndarray  # int64, of one sign
    escape: int
    centers: np.ndarray  # (m + 1,) float32, in steps

    @property
    def most(self) -> int:
        """The largest code of the table."""
        return len(self.frequencies) - 1

    def of_symbols(self) -> np.ndarray:
        """The frequencies of the symbols 0 … 2m + 1."""
        return np.concatenate([self.frequencies[:0:-1], self.frequencies, [self.escape]])

    @cached_property
    def model(self) -> Any:
        """Constriction's model of the symbols."""
        # it adds 1 to each symbol and shares out the rest in proportion: these weights give the frequencies exactly
        return _library().model.Categorical((self.of_symbols() - 1).astype(np.float64), perfect=False)

    @cached_property
    def values(self) -> np.ndarray:
        """What the symbols 0 … 2m + 1 are decoded to, (2m + 2,) float32; 0 for the escape."""
        return np.concatenate([-self.centers[:0:-1], self.centers, [0]]).astype(np.float32)

    @cached_property
    def bits(self) -> np.ndarray:
        """Bits of the codes 0 … `MOST` of either sign, (MOST + 1,) float32."""
        escaped = PRECISION - math.log2(self.escape) + 16
        own = PRECISION - np.log2(self.frequencies)
        return np.concatenate([own, np.full(MOST - self.most, escaped)]).astype(np.float32)


@lru_cache(maxsize=1)
def all_tables() -> dict[int, Table]:
    """Return the tables of all K classes."""
    kinds = [(scale, spread) for spread in SPREADS for scale in SCALES]
    return {number: _table(*kind) for number, kind in enumerate(kinds)}


def _table(scale: float, spread: float) -> Table:
    nodes, weights = np.polynomial.hermite_e.hermegauss(11)
    codes = np.arange(MOST + 2)
    edges = np.where(codes == 0, 0, codes - 0.5 + ZONE)  # |z| from edges[q] to edges[q + 1] is the code q
    sigma = scale * np.exp(spread * nodes - spread**2)[:, None]  # mean square scale²
    below = 0.5 * (1 + erf(edges / sigma / math.sqrt(2)))
    density = np.exp(-0.5 * (edges / sigma) ** 2) / math.sqrt(2 * math.pi) * sigma
    mass = weights / weights.sum() @ (below[:, 1:] - below[:, :-1])  # (MOST + 1,), of one sign
    moment = weights / weights.sum() @ (density[:, :-1] - density[:, 1:])
    centers = np.where(mass > 1e-14, moment / np.maximum(mass, 1e-14), codes[:-1])
    centers[0], mass[0] = 0, 2 * mass[0]
    tail = 1 / (1.0 + codes[:-1]) ** 2
    both = np.where(codes[:-1] == 0, 1, 2)
    chance = (1 - TAIL) * mass / (mass * both).sum() + TAIL * tail / (tail * both).sum()
    beyond = np.cumsum((chance * both)[::-1])[::-1]  # of this code and all larger ones
    most = max(1, int((beyond > BEYOND).sum()) - 1)
    chance = np.append(chance[: most + 1], max(1 - (chance * both)[: most + 1].sum(), BEYOND))
    chance /= chance[0] + 2 * chance[1:-1].sum() + chance[-1]
    frequencies = np.maximum(1, np.floor(chance * 2**PRECISION)).astype(np.int64)
    escape = int(frequencies[-1])
    frequencies = frequencies[:-1]
    frequencies[0] += 2**PRECISION - (frequencies[0] + 2 * frequencies[1:].sum() + escape)
    assert frequencies.min() > 0, "a table's frequencies are above 0"
    return Table(frequencies, escape, centers[: most + 1].astype(np.float32))


def quantized(z: Tensor) -> Tensor:
    """Return the codes of coefficients in steps."""
    return z.sign() * (z.abs() + (0.5 - ZONE)).floor().clamp_max(LARGEST)


def fitted_classes(codes: Tensor) -> Tensor:
    """Return the likeliest class (R,) of each channel, from codes (N, R)."""
    bits = torch.from_numpy(np.stack([table.bits for table in all_tables().values()]))  # (K, MOST + 1)
    size = codes.abs().long().clamp_max(MOST).T.cpu()  # (R, N)
    counts = torch.zeros(len(size), MOST + 1).scatter_add_(1, size, torch.ones(1).expand_as(size))
    return (counts @ bits.T).argmin(1)


class Coder:
    """Codes the channels of a layer, which are in the order of their classes.

    Args:
        tables: by class.
        classes: of each channel (R,), in increasing order.

    """

    def __init__(self, tables: Mapping[int, Table], classes: Sequence[int]):
        self.classes = np.asarray(classes, dtype=np.int64)
        numbers, starts = np.unique(self.classes, return_index=True)
        stops = [*starts[1:].tolist(), len(classes)]
        self.channels = len(classes)
        self.tables = {number: tables[number] for number in numbers.tolist()}
        self.runs = list(zip(self.tables.values(), starts.tolist(), stops, strict=True))

    @cached_property
    def by_channel(self) -> tuple[Tensor, Tensor, Tensor]:
        """The centers of all tables in a row, where those of each channel begin, and its largest code, (R, 1) each."""
        tables, counts = list(self.tables.values()), torch.tensor([stop - start for _, start, stop in self.runs])
        centers = torch.from_numpy(np.concatenate([table.centers for table in tables]))
        most = torch.tensor([table.most for table in tables])
        begin = (most + 1).cumsum(0) - (most + 1)
        return centers, begin.repeat_interleave(counts)[:, None], most.repeat_interleave(counts)[:, None].float()

    def rounded(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of coefficients (R, T) in steps, and what they are decoded to."""
        codes = quantized(z)
        size = codes.abs()
        centers, begin, most = (table.to(z.device) for table in self.by_channel)
        inside = centers[size.minimum(most).long() + begin]
        return codes, codes.sign() * torch.where(size > most, size, inside)

    def bits(self, codes: Tensor) -> Tensor:
        """Return the bits (T,) of codes (R, T)."""
        total = torch.zeros(codes.shape[1])
        for table, start, stop in self.runs:
            size = codes[start:stop].abs().clamp_max(MOST).long().cpu()
            total += torch.from_numpy(table.bits)[size].sum(0)
        return total

    def encode(self, codes: np.ndarray) -> bytes:
        """Return codes (R, T) as bytes: the number of ANS words (uint32), these words, then the escaped codes (int16).

        Little-endian.
        """
        ans, escaped = _library().stack.AnsCoder(), []
        for table, start, stop in reversed(self.runs):
            own = codes[start:stop].reshape(-1)
            symbols = (own + table.most).astype(np.int32)
            outside = (own > table.most) | (own < -table.most)
            if outside.any():
                symbols[outside] = 2 * table.most + 1
                escaped.append(own[outside])
            ans.encode_reverse(symbols, table.model)
        words = ans.get_compressed().astype("<u4")
        rest = np.concatenate([own.astype("<i2") for own in reversed(escaped)]) if escaped else np.empty(0, "<i2")
        return len(words).to_bytes(4, "little") + words.tobytes() + rest.tobytes()

    def decode_parts(self, parts: Sequence[Part]) -> np.ndarray:
        """Return what several parts decode to, one behind the other, (R, T) float32."""
        found = [self.decode(data, tokens) for data, tokens in parts]
        return np.concatenate(found, 1) if len(found) > 1 else found[0]

    def decode(self, data: bytes | memoryview, tokens: int) -> np.ndarray:
        """Return what the bytes of `encode` decode to, (R, T) float32.

        Raises:
            ValueError: the bytes do not hold the codes of `tokens` tokens.

        """
        words, rest = words_of(data)
        ans = _library().stack.AnsCoder(words.astype(np.uint32))
        decoded, used = np.empty((self.channels, tokens), np.float32), 0
        for table, start, stop in self.runs:
            symbols = ans.decode(table.model, (stop - start) * tokens)
            own = decoded[start:stop].reshape(-1)
            np.take(table.values, symbols, out=own, mode="clip")
            outside = np.flatnonzero(symbols == 2 * table.most + 1)
            if len(outside):
                if used + len(outside) > len(rest):
                    raise ValueError("the code of a layer has too few escaped codes")
                own[outside] = rest[used : used + len(outside)]
                used += len(outside)
        if used < len(rest):
            raise ValueError("the code of a layer has too many escaped codes")
        return decoded


def words_of(data: bytes | memoryview) -> tuple[np.ndarray, np.ndarray]:
    """Return the words (uint32) and the escaped codes (int16) in the bytes of `Coder.encode`."""
    count = int.from_bytes(data[:4], "little")
    if len(data) < 4 + 4 * count or (len(data) - 4) % 2:
        raise ValueError("the code of a layer is cut off")
    return np.frombuffer(data, "<u4", count, 4), np.frombuffer(data, "<i2", offset=4 + 4 * count)


def _library() -> Any:
    check_extra("store", "a codec", "constriction")
    import constriction  # type: ignore[import-not-found]

    return constriction.stream  # type: ignore[attr-defined]
