"""The training and the held-out text of a domain, plain or instructions with their responses, and the tokens of both.

An example of instructions is two consecutive documents of a shard, prompt and response.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator
from transformers import PreTrainedTokenizerFast

from crosslayer.corpus.documents import (
    TextSource,
    embedded_documents,
    source_digest,
    stream_documents,
    stream_rows,
)
from crosslayer.corpus.domains import EMBEDDED
from crosslayer.corpus.files import Reading, local_files, say_skipped, with_line_feeds
from crosslayer.corpus.rows import PROMPT, Example, example_of
from crosslayer.corpus.windows import next_word
from crosslayer.training.recipe_file import Part, WrongKey
from crosslayer.training.shards import Shards, fingerprint, tokenise

# chunks 3, 23, 43, … are held out, so that a text of four chunks has one
EVERY, FIRST = 20, 3
PIECE = 2**14  # characters of a chunk; a shorter document is one chunk


@dataclass(frozen=True)
class Domain:
    """A text domain; every 20th chunk is held out, which is a document, or 16,384 characters of a long one."""

    name: str  # of an embedded domain, if `source` is the embedded corpus
    source: TextSource
    validation: TextSource | None = None  # held-out text, instead of chunks of `source`
    every: int = EVERY
    parts: ClassVar[int] = 1  # number of documents that belong together, as in `tokenise`

    def training(self, reading: Reading | None = None) -> Iterator[str]:
        """Yield the training documents; a document with held-out chunks is split at these."""
        if self.validation is not None:
            yield from self._documents(reading)
            return
        # chunks on both sides of a held-out one are no neighbors: joined, they would read as contiguous text
        run: list[str] = []
        for piece, begins, held in _pieces(self._documents(reading), self.every):
            if run and (begins or held):
                yield "".join(run)
                run = []
            if not held:
                run.append(piece)
        if run:
            yield "".join(run)

    def held_out(self, reading: Reading | None = None) -> Iterator[str]:
        """Yield the held-out documents or chunks."""
        if self.validation is not None:
            yield from stream_documents(self.validation, reading)
            return
        count = 0
        for piece, _, held in _pieces(self._documents(reading), self.every):
            if held:
                yield piece
                count += 1
        if not count:
            raise ValueError("the text is too short to hold out a chunk; set validation to another source")

    def shards(self, tokenizer: PreTrainedTokenizerFast, folder: Path) -> tuple[Shards, Shards]:
        """Return the training and the held-out tokens; they are written into `folder`, unless they are there."""
        text = self.digest()
        short = re.sub(r"[^A-Za-z0-9]+", "-", self.name)
        splits = {
            "training": (self.training, self.source),
            "validation": (self.held_out, self.validation or self.source),
        }
        both: list[Shards] = []
        try:
            for split, (documents, source) in splits.items():
                reading = Reading(sum(path.stat().st_size for path in local_files(source.name)))
                digest = fingerprint(f"{split}/{text}", tokenizer)
                options = {"fingerprint": digest, "parts": self.parts, "reading": reading}
                target = folder / f"{short}-{split}-{digest[:16]}"
                both.append(tokenise(documents(reading), tokenizer, target, **options))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        training, held_out = both
        return training, held_out

    def _documents(self, reading: Reading | None = None) -> Iterator[str]:
        if self.source.name is None and self.name in EMBEDDED:
            yield from embedded_documents(*EMBEDDED[self.name])
        else:
            yield from stream_documents(self.source, reading)

    def digest(self) -> str:
        """Return a SHA-256 of the text and of how it is split."""
        try:
            # of an embedded domain the text itself: it may change with a release, and its archive holds other domains
            if self.source.name is None:
                source = hashlib.sha256("\0".join(self._documents()).encode()).hexdigest()
            else:
                source = source_digest(self.source)
            rule = f"{self.every}/{FIRST}/{PIECE}" if self.validation is None else source_digest(self.validation)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return hashlib.sha256(f"{source}/{rule}".encode()).hexdigest()


def _pieces(documents: Iterable[str], every: int) -> Iterator[tuple[str, bool, bool]]:
    """Yield chunks of documents, each with whether it begins a document and whether it is held out."""
    # counted over all documents, so that of many short ones some are held out too
    chunk = 0
    for text in documents:
        start = 0
        while start < len(text):
            stop = next_word(text, start + PIECE)
            yield text[start:stop], start == 0, chunk % every == FIRST
            start = stop
            chunk += 1


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
        for example in self._examples(False, reading):
            yield from example

    def held_out(self, reading: Reading | None = None) -> Iterator[str]:
        """Yield prompt and response of each example that is not trained on."""
        examples = list(self._examples(True, reading))
        if not examples:
            raise ValueError(f"more than {FIRST} instructions are needed to hold some out; set `validation`")
        for example in examples:
            yield from example

    def digest(self) -> str:
        """Return a SHA-256 of the text, its columns and the prompt template."""
        columns = tuple(self.columns.model_dump().values())
        return hashlib.sha256(f"{super().digest()}/{columns}/{PROMPT}".encode()).hexdigest()

    def _examples(self, held_out: bool, reading: Reading | None) -> Iterator[Example]:
        source = self.validation if held_out and self.validation is not None else self.source
        for index, example in enumerate(read_examples(source, self.columns, reading)):
            if self.validation is not None or (index % self.every == FIRST) == held_out:
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
