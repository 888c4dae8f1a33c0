"""Instructions with their responses: read from tables or datasets, tokenized, and packed into rows.

An example is two consecutive documents of a shard, prompt and response. A row holds whole examples, which do not attend
to each other; its loss counts responses only, with their end tokens, or prompts too. The rest of a row is padding.

Shapes: T tokens of a row, E examples.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor
from torch.utils.data import Dataset

from crosslayer.corpus.documents import TextSource, stream_rows
from crosslayer.corpus.files import Reading, say_skipped, with_line_feeds
from crosslayer.corpus.instructions import PROMPT, Example, example_of
from crosslayer.training.mixture import IGNORED
from crosslayer.training.recipe_file import Part, WrongKey
from crosslayer.training.shards import Shards
from crosslayer.training.texts import FIRST, Domain


class Columns(Part):
    """The columns of a table of instructions."""

    instruction: str = "instruction"
    """The column of the instruction."""
    input: str | None = None
    """The column of the input that the instruction refers to, or null."""
    choices: str | None = None
    """The column of a list of answers to choose from, added after the input, one per line; or null."""
    response: str = "response"
    """The column of the response."""
    messages: str | None = None
    """Instead of these: the column of a conversation, a list of {role, content}; those of a single turn are read."""

    @model_validator(mode="after")
    def _check_messages(self) -> Self:
        for key, field in type(self).model_fields.items():
            if self.messages is not None and key != "messages" and vars(self)[key] != field.default:
                raise WrongKey(key, "has no effect with messages; remove it")
        return self


@dataclass(frozen=True)
class Instructions(Domain):
    """A domain of instructions in .jsonl files or a dataset; every 20th is held out, or those in `validation` are."""

    columns: Columns = Columns()
    parts: ClassVar[int] = 2

    def training(self, reading: Reading | None = None) -> Iterator[str]:
        """Yield prompt and response of each example to train on; errors as `read_examples`."""
        return _documents(self._examples(False, reading))

    def held_out(self, reading: Reading | None = None) -> Iterator[str]:
        """Yield prompt and response of each example that is not trained on."""
        documents = list(_documents(self._examples(True, reading)))
        if not documents:
            raise ValueError(f"{FIRST} instructions or fewer are too few to hold any out; set `validation`")
        yield from documents

    def digest(self) -> str:
        """Return a SHA-256 of the text, its columns and the prompt template."""
        columns = tuple(self.columns.model_dump().values())
        return hashlib.sha256(f"{super().digest()}/{columns}/{PROMPT}".encode()).hexdigest()

    def _examples(self, held_out: bool, reading: Reading | None) -> Iterator[Example]:
        source = self.validation if held_out and self.validation is not None else self.source
        for number, example in enumerate(read_examples(source, self.columns, reading)):
            if self.validation is not None or (number % self.every == FIRST) == held_out:
                yield example


def read_examples(source: TextSource, columns: Columns, reading: Reading | None = None) -> Iterator[Example]:
    """Yield prompt and response of every row that has a response; `reading` counts what is read of files."""
    skipped = 0
    for location, row in stream_rows(source, reading):
        example = example_of(row, location, **columns.model_dump())
        if example is None:
            skipped += 1
        else:
            prompt, response = example
            yield with_line_feeds(prompt), with_line_feeds(response)
    say_skipped(source.describe(), skipped)


def _documents(examples: Iterable[Example]) -> Iterator[str]:
    for example in examples:
        yield from example


class ExampleRows(Dataset[dict[str, Tensor]]):
    """Rows of whole examples in their order, as many as fit into T tokens; examples longer than that are `left_out`."""

    def __init__(self, shards: Shards, length: int, padding: int, name: str, responses_alone: bool = True):
        """Pack examples into rows of T = `length` tokens, filled up with `padding`.

        The shards hold prompts and responses alternately; prompts have labels unless `responses_alone`.
        """
        self.shards, self.length, self.padding, self.responses_alone = shards, length, padding, responses_alone
        starts = np.append(shards.starts(0, shards.tokens), shards.tokens)  # (2 E + 1,)
        self.borders = starts
        self.rows, self.left_out = _packed(np.diff(starts[::2]), length)
        if not self.rows:
            raise ValueError(
                f"{name}: all {self.left_out:,} instructions are longer than data.length = {length}; raise it"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return a row: `input_ids`, `position_ids` and `labels`, each (T,) int64; positions restart per example."""
        first, last = self.rows[item]
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
        position_ids[count:] = torch.arange(self.length - count)  # padding is a document of its own
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def _packed(lengths: np.ndarray, length: int) -> tuple[list[tuple[int, int]], int]:
    """Return the examples [first, last) of every row, and how many fit into none; `lengths` are their tokens (E,)."""
    rows: list[tuple[int, int]] = []
    first, tokens, left_out = 0, 0, 0
    for number, count in enumerate(lengths.tolist()):
        if tokens + count > length:
            if number > first:
                rows.append((first, number))
            first, tokens = number, 0
        if count > length:
            first, left_out = number + 1, left_out + 1
        else:
            tokens += count
    if len(lengths) > first:
        rows.append((first, len(lengths)))
    return rows, left_out
