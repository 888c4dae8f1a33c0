"""Rows of a training run: windows of several domains in proportion to their weights, each row a function of its number.

The order of a domain's windows follows from the seed, its name and the epoch, so it is the same for any number of
processes, and to resume is to begin at another number.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from crosslayer.verbs.train.shards import Shards

ORDER = "drawn"  # by `permutation`; a run of an earlier release, with another order, is not its pair
IGNORED = -100  # the label of a token that is not predicted
UNITS = 2**32  # weights are rounded to such parts of their sum


class Rows(Protocol):
    """Rows of a domain by number, each with `input_ids`, `position_ids` and `labels`, (T,) int64."""

    def __len__(self) -> int: ...
    def __getitem__(self, item: int, /) -> dict[str, Tensor]: ...


class Mixture(Dataset[dict[str, Tensor]]):
    """Row i, for i from 0 to before `items`, is a window of a domain.

    Of the first n rows a domain has its share of n, but for less than the number of domains. Its windows do not
    overlap, and come in another order in each epoch. Of two mixtures that differ in `items` alone, the shorter is the
    beginning of the longer. Weights need not sum to 1. `rows` are those of a domain, by name, that are cut otherwise
    than into windows; each is of `length` tokens, too.
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
        assert domains and domains.keys() == weights.keys() and items > 0, "a recipe has these from a single list"
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
        self.orders: dict[str, tuple[int, np.ndarray]] = {}  # of each domain the newest epoch, and its order

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return a row: `input_ids`, `position_ids` and `labels`, each (T,) int64, as `row` makes them."""
        name, window = self.place(item)
        return self.rows[name][window]

    def place(self, item: int) -> tuple[str, int]:
        """Return the domain of a row, and which of the domain's windows it is."""
        if not 0 <= item < self.items:
            raise IndexError(f"row {item} of a mixture of {self.items}")
        name, index = self._domain(item)
        epoch, index = divmod(index, self.windows[name])
        if name not in self.orders or self.orders[name][0] != epoch:
            self.orders[name] = epoch, permutation(self.windows[name], _key(self.seed, name, epoch))
        return name, int(self.orders[name][1][index])

    def passes(self) -> dict[str, float]:
        """Return how often all rows together go through each domain; above 1 its text is repeated."""
        total = sum(self.units)
        names = zip(self.domains, self.units, strict=True)
        return {name: self.items * units / total / self.windows[name] for name, units in names}

    def _domain(self, item: int) -> tuple[str, int]:
        """Return the domain of a row, and how many rows before it have the same.

        Each domain in turn takes its share of the rows that those before it have left: of n rows the whole part of
        n · share + phase, so that both the choice and the count follow from n.
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
    """The windows of `length` tokens of a domain, in their order; what is left at its end belongs to none."""

    def __init__(self, shards: Shards, length: int, name: str):
        if length < 2:
            raise ValueError(f"{name}: rows of {length} tokens; they need at least 2, since the first is not predicted")
        if shards.tokens < length:
            raise ValueError(f"{name}: its text has {shards.tokens:,} tokens, less than a window of {length:,}")
        self.shards, self.length = shards, length

    def __len__(self) -> int:
        return self.shards.tokens // self.length

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return a row, as `row` makes it."""
        return row(self.shards, item, self.length)


def spread(rows: Any, count: int) -> Subset[dict[str, Tensor]]:
    """Return `count` of the rows, or as many as there are, spread evenly over them; always the same."""
    count = min(count, len(rows))
    return Subset(rows, [len(rows) * number // count for number in range(count)])


def row(shards: Shards, window: int, length: int) -> dict[str, Tensor]:
    """Return a window of a text as a causal model is trained on it, each entry (T,) int64.

    `position_ids` begin at 0 with every document, which is how transformers sees that several are in a row, and keeps
    attention within each (without a cache alone: `use_cache=False`). `labels` are the ids, as models shift them
    themselves, but -100 where a document begins: nothing of it comes before, and the end of another does not count.
    """
    input_ids = torch.from_numpy(shards.read(window * length, length))  # (T,)
    starts = torch.from_numpy(shards.starts(window * length, length))  # (documents that begin in it,)
    labels = input_ids.clone()
    labels[0] = IGNORED
    labels[starts] = IGNORED
    begin = torch.zeros(length, dtype=torch.int64)  # (T,): where the document of a token begins in the window
    begin[starts] = starts
    position_ids = torch.arange(length) - begin.cummax(0).values  # (T,)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def permutation(size: int, key: int) -> np.ndarray:
    """Return a random order of the numbers below `size`, which `key` chooses, in as few bytes as hold them.

    It is the order of numbers that are drawn raw, whose stream is the same in all versions of numpy.
    """
    return np.random.PCG64(key).random_raw(size).argsort(kind="stable").astype(np.min_scalar_type(size))


def _key(seed: int, name: str, epoch: int = 0) -> int:
    """Return 64 bits of SHA-256, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}/{name}".encode()).digest()[:8], "little")
