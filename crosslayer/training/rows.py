"""The rows of a training run: windows of several domains in proportion to their weights, each determined by its index.

The order of a domain's windows depends only on the seed, its name and the epoch, so it is the same for any number of
processes, and a run is resumed by starting at another index. A row of instructions holds whole examples, which do not
attend to each other; its loss counts responses only, with their end tokens, or prompts too. The rest is padding.

Shapes: T tokens of a row, E examples.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedTokenizerFast

from crosslayer.models.embedded import cache_folder
from crosslayer.training.recipe import Recipe
from crosslayer.training.record import TrainedDomain
from crosslayer.training.shards import Shards
from crosslayer.training.tokenizers import TOKENS

# by `permutation`; runs of earlier releases had another order and cannot be paired with these
ORDER = "drawn"
IGNORED = -100  # the label of a token that is not predicted
# weights are rounded to multiples of their sum / UNITS, so that rows are shared out in integers: exactly, also far on
UNITS = 2**32


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

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a window for training a causal model, each entry (T,) int64.

        `position_ids` restart at 0 with every document, which makes transformers keep attention within documents (only
        with `use_cache=False`). `labels` are the ids, since models shift them themselves, but -100 at the first token
        of each document, which is not predicted from the document before.
        """
        first, length = index * self.length, self.length
        input_ids = torch.from_numpy(self.shards.read(first, length))  # (T,)
        starts = torch.from_numpy(self.shards.starts(first, length))  # (documents that begin in it,)
        labels = input_ids.clone()
        labels[0] = IGNORED  # its predecessor is in another window
        labels[starts] = IGNORED
        begin = torch.zeros(length, dtype=torch.int64)  # (T,): index at which the document of each token starts
        begin[starts] = starts
        position_ids = torch.arange(length) - begin.cummax(0).values  # (T,)
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


class ExampleRows(Dataset[dict[str, Tensor]]):
    """Rows of whole examples in their order, as many as fit into T tokens; examples longer than that are `left_out`."""

    def __init__(self, shards: Shards, length: int, padding: int, name: str, responses_alone: bool = True):
        """Pack examples into rows of T = `length` tokens, filled up with `padding`.

        The shards hold prompts and responses alternately; prompts have labels unless `responses_alone`.
        """
        self.shards, self.length, self.padding, self.responses_alone = shards, length, padding, responses_alone
        self.borders = np.append(shards.starts(0, shards.tokens), shards.tokens)  # (2 E + 1,)
        self.rows: list[tuple[int, int]] = []  # the examples [first, last) of every row
        self.left_out = 0

        lengths = np.diff(self.borders[::2]).tolist()  # of examples, prompt and response
        first = tokens = 0  # of the row that is being filled
        for example, count in enumerate(lengths):
            if tokens + count > length:
                if example > first:
                    self.rows.append((first, example))
                first, tokens = example, 0
            if count > length:
                first = example + 1
                self.left_out += 1
            else:
                tokens += count
        if len(lengths) > first:
            self.rows.append((first, len(lengths)))
        if not self.rows:
            raise ValueError(
                f"{name}: all {self.left_out:,} instructions are longer than data.length = {length}; raise it"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row: `input_ids`, `position_ids` and `labels`, each (T,) int64; positions restart per example."""
        first, last = self.rows[index]
        borders = self.borders[2 * first : 2 * last + 1]  # prompt, response, prompt, …, end
        count = int(borders[-1] - borders[0])
        inside = (borders - borders[0]).tolist()
        input_ids = torch.full((self.length,), self.padding, dtype=torch.int64)
        input_ids[:count] = torch.from_numpy(self.shards.read(int(borders[0]), count))
        labels = torch.full((self.length,), IGNORED, dtype=torch.int64)
        labels[:count] = input_ids[:count]
        position_ids = torch.arange(self.length)
        for prompt, response, end in zip(inside[:-1:2], inside[1::2], inside[2::2], strict=True):
            labels[prompt : response if self.responses_alone else prompt + 1] = IGNORED
            position_ids[prompt:end] = torch.arange(end - prompt)
        # padding is a document of its own, so that no attention mask is needed, which would be dense
        position_ids[count:] = torch.arange(self.length - count)
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


DomainRows = FixedRows | ExampleRows  # each row has `input_ids`, `position_ids` and `labels`, (T,) int64


class Mixture(Dataset[dict[str, Tensor]]):
    """A data set of `items` rows, each a window of a domain.

    In any prefix the number of rows of a domain differs from its share by less than the number of domains. A domain's
    windows do not overlap, and have another order in each epoch. Of two mixtures that differ only in `items`, the
    shorter is a prefix of the longer. Weights need not sum to 1.
    """

    def __init__(self, rows: Mapping[str, DomainRows], weights: Mapping[str, float], seed: int, items: int):
        assert rows and rows.keys() == weights.keys() and items > 0, "a recipe guarantees this"
        assert all(0 < weight < math.inf for weight in weights.values()), "a recipe refuses such weights"
        self.rows, self.seed, self.items = dict(rows), seed, items
        self.windows = {name: len(rows[name]) for name in rows}
        total = math.fsum(weights[name] for name in rows)
        self.units = [max(1, round(weights[name] / total * UNITS)) for name in rows]
        self.phase = _key(seed, "phase") % UNITS
        self.orders: dict[str, tuple[int, np.ndarray]] = {}  # domain → the current epoch and its order

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row: `input_ids`, `position_ids` and `labels`, each (T,) int64."""
        name, window = self.window(index)
        return self.rows[name][window]

    def window(self, item: int) -> tuple[str, int]:
        """Return the domain of a row, and the index of its window in the domain."""
        if not 0 <= item < self.items:
            raise IndexError(f"row must be 0 to {self.items - 1}, got {item}")
        name, index = self._domain(item)
        epoch, index = divmod(index, self.windows[name])
        # rows are read in order, so that an epoch's order is made once, and kept until the next epoch
        if name not in self.orders or self.orders[name][0] != epoch:
            self.orders[name] = epoch, permutation(self.windows[name], _key(self.seed, name, epoch))
        return name, int(self.orders[name][1][index])

    def passes(self) -> dict[str, float]:
        """Return the number of passes over each domain; above 1 its text is repeated."""
        total = sum(self.units)
        names = zip(self.rows, self.units, strict=True)
        return {name: self.items * units / total / self.windows[name] for name, units in names}

    def _domain(self, item: int) -> tuple[str, int]:
        """Return the domain of a row, and the number of earlier rows of that domain.

        Each domain in turn takes its share of the rows that the domains before it have left: of n rows the integer part
        of n · share + phase, so that n determines both the domain and the count.
        """
        left = sum(self.units)
        for name, units in zip(self.rows, self.units, strict=True):
            phase = self.phase * left // UNITS
            before = (item * units + phase) // left
            if ((item + 1) * units + phase) // left > before:
                return name, before
            item, left = item - before, left - units
        raise AssertionError("the last domain takes all rows that are left")


def permutation(size: int, key: int) -> np.ndarray:
    """Return the random order of the numbers below `size` for a `key`, in the smallest integer type."""
    # numpy promises the same raw numbers in all versions, but not the same `Generator.permutation`; so these are sorted
    return np.random.PCG64(key).random_raw(size).argsort(kind="stable").astype(np.min_scalar_type(size))


def _key(seed: int, name: str, epoch: int = 0) -> int:
    """Return 64 bits of SHA-256, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}/{name}".encode()).digest()[:8], "little")


def evenly_spaced(rows: Any, count: int) -> Subset[dict[str, Tensor]]:
    """Return `count` of the rows, or all if there are fewer, at even distances; always the same ones."""
    count = min(count, len(rows))
    return Subset(rows, [len(rows) * index // count for index in range(count)])


@dataclass(frozen=True)
class Rows:
    """The rows of a recipe by domain: those to train on, and held-out ones, spread evenly over their text."""

    domains: dict[str, DomainRows]
    held_out: dict[str, Subset[dict[str, Tensor]]]
    weights: dict[str, float]
    seed: int
    objective: str
    tokenizer: PreTrainedTokenizerFast

    def training(self, items: int) -> Mixture:
        """Return `items` rows to train on; fewer are the first of more."""
        return Mixture(self.domains, self.weights, self.seed, items)

    def trained(self, items: int) -> tuple[TrainedDomain, ...]:
        """Return what training on `items` rows reads of each domain."""
        mixture = self.training(items)
        passes = mixture.passes()
        total = sum(mixture.units)
        # `compare` pairs runs of the same fingerprint; losses of other tokens are not compared
        counted = [] if self.objective == "next-token" else [self.objective]
        return tuple(
            TrainedDomain(
                name=name,
                share=units / total,
                tokens=rows.shards.tokens,
                documents=rows.shards.documents,
                validation_tokens=len(self.held_out[name]) * rows.length,
                passes=passes[name],
                fingerprint="-".join([rows.shards.fingerprint, ORDER, *counted]),
            )
            for (name, rows), units in zip(self.domains.items(), mixture.units, strict=True)
        )

    def probed(self, count: int) -> Tensor | None:
        """Return `count` held-out windows (N, T), alternating between domains, or all if there are fewer; 0: None."""
        if count == 0:
            return None
        windows = []
        for index in range(max(len(rows) for rows in self.held_out.values())):
            windows += [rows[index]["input_ids"] for rows in self.held_out.values() if index < len(rows)]
        return torch.stack(windows[:count])


def read_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Rows:
    """Tokenize the text of a recipe, or read its tokens from the cache."""
    length = recipe.data.length
    count = recipe.judge.held_out if recipe.stages else recipe.eval.windows
    # any token pads if there is no token for it: what is behind the last example has no labels
    padding = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0
    training: dict[str, DomainRows] = {}
    held_out = {}
    for part in recipe.data.domains:
        text = part.text(held_out_often=bool(recipe.stages))
        both: list[DomainRows] = []  # to train on, and held out
        for shards in text.shards(tokenizer, cache_folder() / TOKENS):
            if part.columns is None:
                both.append(FixedRows(shards, length, part.name))
            else:
                both.append(ExampleRows(shards, length, padding, part.name, recipe.objective == "response"))
        training[part.name] = both[0]
        held_out[part.name] = evenly_spaced(both[1], count)
    weights = {part.name: part.weight for part in recipe.data.domains}
    return Rows(training, held_out, weights, recipe.seed, recipe.objective, tokenizer)
