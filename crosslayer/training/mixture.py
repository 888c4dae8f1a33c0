"""The rows of a training run: windows of several domains in proportion to their weights, each determined by its index.

The order of a domain's windows depends only on the seed, its name and the epoch, so it is the same for any number of
processes, and a run is resumed by starting at another index.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from crosslayer.training.shards import Shards

ORDER = "drawn"  # by `permutation`; runs of earlier releases had another order and cannot be paired with these
IGNORED = -100  # the label of a token that is not predicted
UNITS = 2**32  # weights are rounded to multiples of their sum / UNITS


class Rows(Protocol):
    """Rows of a domain by index, each with `input_ids`, `position_ids` and `labels`, (T,) int64."""

    def __len__(self) -> int: ...
    def __getitem__(self, item: int, /) -> dict[str, Tensor]: ...


class Mixture(Dataset[dict[str, Tensor]]):
    """A data set of `items` rows, each a window of a domain.

    In any prefix the number of rows of a domain differs from its share by less than the number of domains. A domain's
    windows do not overlap, and have another order in each epoch. Of two mixtures that differ only in `items`, the
    shorter is a prefix of the longer. Weights need not sum to 1. `rows` replaces the windows of a domain, by name, with
    other rows of `length` tokens.
    """

    def __init__(
        self,
        domains: Mapping[str, Shards],
        weights: Mapping[str, float],
        length: int,
        seed: int,
        items: int,
        rows: Mapping[str, Rows] | None = None,
    ):
        assert domains and domains.keys() == weights.keys() and items > 0, "a recipe guarantees this"
        assert all(0 < weight < math.inf for weight in weights.values()), "a recipe refuses such weights"
        self.domains, self.length, self.seed, self.items = dict(domains), length, seed, items
        self.rows: dict[str, Rows] = dict(rows or {})
        for name, shards in domains.items():
            if name not in self.rows:
                self.rows[name] = FixedRows(shards, length, name)
        self.windows = {name: len(self.rows[name]) for name in domains}
        total = math.fsum(weights[name] for name in domains)
        self.units = [max(1, round(weights[name] / total * UNITS)) for name in domains]
        self.phase = _key(seed, "phase") % UNITS
        self.orders: dict[str, tuple[int, np.ndarray]] = {}  # domain → the current epoch and its order

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return a row: `input_ids`, `position_ids` and `labels`, each (T,) int64, as `row` makes them."""
        name, window = self.window(item)
        return self.rows[name][window]

    def window(self, item: int) -> tuple[str, int]:
        """Return the domain of a row, and the index of its window in the domain."""
        if not 0 <= item < self.items:
            raise IndexError(f"row must be 0 to {self.items - 1}, got {item}")
        name, index = self._domain(item)
        epoch, index = divmod(index, self.windows[name])
        if name not in self.orders or self.orders[name][0] != epoch:
            self.orders[name] = epoch, permutation(self.windows[name], _key(self.seed, name, epoch))
        return name, int(self.orders[name][1][index])

    def passes(self) -> dict[str, float]:
        """Return the number of passes over each domain; above 1 its text is repeated."""
        total = sum(self.units)
        names = zip(self.domains, self.units, strict=True)
        return {name: self.items * units / total / self.windows[name] for name, units in names}

    def _domain(self, item: int) -> tuple[str, int]:
        """Return the domain of a row, and the number of earlier rows of that domain.

        Each domain in turn takes its share of the rows that the domains before it have left: of n rows the integer part
        of n · share + phase, so that n determines both the domain and the count.
        """
        left = sum(self.units)
        for name, units in zip(self.domains, self.units, strict=True):
            phase = self.phase * left // UNITS
            before = (item * units + phase) // left
            if ((item + 1) * units + phase) // left > before:
                return name, before
            item, left = item - before, left - units
        raise AssertionError("the last domain takes all rows that are left")


class FixedRows(Dataset[dict[str, Tensor]]):
    """The windows of `length` tokens of a domain, in order, without an incomplete one at the end."""

    def __init__(self, shards: Shards, length: int, name: str):
        if length < 2:
            raise ValueError(
                f"{name}: rows must have at least 2 tokens, since the first is not predicted, got {length}"
            )
        if shards.tokens < length:
            raise ValueError(
                f"{name}: its text must have at least {length:,} tokens, one window, got {shards.tokens:,}"
            )
        self.shards, self.length = shards, length

    def __len__(self) -> int:
        return self.shards.tokens // self.length

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return a row, as `row` makes it."""
        return row(self.shards, item, self.length)


def spread(rows: Any, count: int) -> Subset[dict[str, Tensor]]:
    """Return `count` of the rows, or all if there are fewer, at even distances; always the same ones."""
    count = min(count, len(rows))
    return Subset(rows, [len(rows) * number // count for number in range(count)])


def row(shards: Shards, window: int, length: int) -> dict[str, Tensor]:
    """Return a window of a text for training a causal model, each entry (T,) int64.

    `position_ids` restart at 0 with every document, which makes transformers keep attention within documents (only with
    `use_cache=False`). `labels` are the ids, since models shift them themselves, but -100 at the first token of each
    document, which is not predicted from the document before.
    """
    input_ids = torch.from_numpy(shards.read(window * length, length))  # (T,)
    starts = torch.from_numpy(shards.starts(window * length, length))  # (documents that begin in it,)
    labels = input_ids.clone()
    labels[0] = IGNORED
    labels[starts] = IGNORED
    begin = torch.zeros(length, dtype=torch.int64)  # (T,): index at which the document of each token starts
    begin[starts] = starts
    position_ids = torch.arange(length) - begin.cummax(0).values  # (T,)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def permutation(size: int, key: int) -> np.ndarray:
    """Return the random order of the numbers below `size` for a `key`, in the smallest integer type.

    It sorts raw random numbers, whose stream is the same in all versions of numpy.
    """
    return np.random.PCG64(key).random_raw(size).argsort(kind="stable").astype(np.min_scalar_type(size))


def _key(seed: int, name: str, epoch: int = 0) -> int:
    """Return 64 bits of SHA-256, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}/{name}".encode()).digest()[:8], "little")
