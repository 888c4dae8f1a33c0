"""Tokens of a text in files, which are written once, completely or not at all, and memory-mapped.

A folder holds `tokens.bin` (unsigned 16- or 32-bit little-endian numbers, documents in sequence), `ends.bin` (64-bit:
the end of each document) and `index.json` (sizes and the fingerprint). Opening a folder, which every process of a run
does, reads `ends.bin` and the sizes of files, not the tokens.

While a folder `out` is written, its files are in `.out.crosslayer-begun`, where `begun.json` says from time to time how
far they are. An interrupted tokenization continues there, with the same result.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from crosslayer.corpus.files import Reading
from crosslayer.corpus.windows import next_word, special_tokens
from crosslayer.output.folder import exclusive, staged_folder, write_whole
from crosslayer.output.progress import progress, say
from crosslayer.output.record import validation_message
from crosslayer.training.checkpoints import sync

INDEX, TOKENS, ENDS, BEGUN = "index.json", "tokens.bin", "ends.bin", "begun.json"
SCHEMA = "crosslayer/shards/3"
# tokens after which an interrupted tokenization can continue: so many take a core 4 s (bytes) to 40 s (byte pairs)
SAVED = 2**24
LARGEST = 2**16  # bytes of an index
# characters that are encoded at once, so that all cores have work
BATCH = 2**20
# characters; longer documents are split before a word: faster, and in less memory
PART = 2**16
TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END_TYPE = np.dtype("<i8")
DELETE = "delete the folder to tokenize the text again"


class Index(BaseModel):
    """What `index.json` holds; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    schema_: Literal["crosslayer/shards/3"] = Field(alias="schema")
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    documents: int = Field(gt=0)
    tokens: int = Field(gt=0)


class PartialShards(BaseModel):
    """What `begun.json` holds: the text and tokenizer of the files, and how far they are written."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: str
    tokens: int = Field(default=0, ge=0)
    pieces: int = Field(default=0, ge=0)  # of the text, that have these tokens
    documents: int = Field(default=0, ge=0)  # that end among these tokens
    ended: int = Field(default=0, ge=0)  # tokens up to the end of the last of these documents


@dataclass(frozen=True)
class Shards:
    """The tokens of a text in a memory-mapped file; cheap to send to another process."""

    folder: Path
    fingerprint: str  # of the text, the tokenizer and the format
    dtype: str  # "uint16" or "uint32"
    documents: int  # each has at least one token
    tokens: int

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count), (count,) int64."""
        assert start >= 0 and count > 0 and start + count <= self.tokens
        return self.ids[start : start + count].astype(np.int64)

    def starts(self, start: int, count: int) -> np.ndarray:
        """Return where documents start in [start, start + count), relative to `start`: int64, ascending."""
        first, last = np.searchsorted(self.ends, (start, start + count))
        inside = self.ends[first:last] - start
        return np.concatenate(([0], inside)) if start == 0 else inside

    @cached_property
    def ends(self) -> np.ndarray:
        """The end of each document in tokens, (documents,)."""
        return np.asarray(np.memmap(self.folder / ENDS, dtype=END_TYPE, mode="r"))

    @cached_property
    def ids(self) -> np.ndarray:
        """The token ids, (tokens,)."""
        return np.asarray(np.memmap(self.folder / TOKENS, dtype=TYPES[self.dtype], mode="r"))

    def __getstate__(self) -> dict[str, Any]:
        # without the maps, which would be copied into every process that loads data
        return {field.name: getattr(self, field.name) for field in fields(self)}


def fingerprint(text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a SHA-256 of a text (by an identifier, such as `source_digest`), a tokenizer and the format."""
    identifiers = [SCHEMA, text, tokenizer.backend_tokenizer.to_str(), frame(tokenizer)]
    return hashlib.sha256(json.dumps(identifiers).encode()).hexdigest()


def tokenise(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    fingerprint: str,
    parts: int = 1,
    reading: Reading | None = None,
) -> Shards:
    """Write the tokens of documents into a folder, or open the folder if it has the same fingerprint.

    Each document gets the special tokens that the tokenizer adds, and its end token if there is one; special tokens
    spelled out in the text stay text. The folder is complete or absent, an interrupted tokenization continues, and
    processes that need the same folder wait for the first. All cores are used (limit them with `RAYON_NUM_THREADS` or
    `TOKENIZERS_PARALLELISM=false`), with the same result for any number. Shards of another fingerprint are replaced;
    other folders are refused.

    Documents are read only if needed, and empty ones are skipped. With `parts` > 1, such as 2 for a prompt and its
    response, that many documents belong together: only the first starts, and only the last ends, with special tokens,
    and none may be blank. `reading` counts the bytes read from the documents' files, for the percentage of progress.
    """
    folder = folder.expanduser().resolve()
    # first without the lock, which needs a file: tokens that are there may be on a read-only disk
    if not (folder.exists() and _read_index(folder).fingerprint == fingerprint):
        reading = reading or Reading()
        known = reading.total > 0
        title = f"tokenizing {folder.name}"
        try:
            with exclusive(folder, wait=True):
                # another process may have written it meanwhile
                if not (folder.exists() and _read_index(folder).fingerprint == fingerprint):
                    with _begun(folder) as begun, progress(f"{title} (%)" if known else title, 100 * known) as bar:
                        for done in _write(documents, tokenizer, begun, fingerprint, parts):
                            bar.step(min(100, 100 * reading.done // reading.total) if known else done, 100 * known)
        except OSError as error:
            raise ValueError(f"the folder {str(folder)!r} cannot be written: {error.strerror or error}") from error
    return open_shards(folder)


def open_shards(folder: Path) -> Shards:
    """Open a folder of shards and check the sizes of its files."""
    # sizes, not contents: every process of a run opens all shards, and the tokens may be many gigabytes
    index = _read_index(folder)
    sizes = {TOKENS: index.tokens * TYPES[index.dtype].itemsize, ENDS: index.documents * END_TYPE.itemsize}
    for name, size in sizes.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} of {folder.name!r} is missing; {DELETE}")
        actual = (folder / name).stat().st_size
        if actual != size:
            raise ValueError(f"{name} of {folder.name!r} must have {size:,} bytes, got {actual:,}; {DELETE}")
    shards = Shards(folder, index.fingerprint, index.dtype, index.documents, index.tokens)
    if np.diff(shards.ends, prepend=0).min() < 1 or shards.ends[-1] != shards.tokens:
        raise ValueError(f"{ENDS} of {folder.name!r} does not match the tokens; {DELETE}")
    return shards


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise ValueError(f"{folder.name!r} is not a folder of tokens: it has no {INDEX}; use another folder")
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{INDEX} of {folder.name!r}: {validation_message(error)}; {DELETE}") from None


@contextlib.contextmanager
def _begun(folder: Path) -> Iterator[Path]:
    """Yield the folder of unfinished files; they become `folder` when the block ends, and are kept if it fails."""
    begun = folder.with_name(f".{folder.name}.crosslayer-begun")
    try:
        begun.mkdir(exist_ok=True)
        yield begun
        with staged_folder(folder) as partial:
            # first: files that are only partly moved must not be continued
            (begun / BEGUN).unlink(missing_ok=True)
            for name in (INDEX, TOKENS, ENDS):
                (begun / name).rename(partial / name)
    finally:
        if not (begun / BEGUN).is_file():  # nothing to continue from
            shutil.rmtree(begun, ignore_errors=True)


def _write(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerFast, folder: Path, fingerprint: str, parts: int
) -> Generator[int]:
    """Write the missing files of a folder; yield the number of finished documents from time to time."""
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
    first, last = frame(tokenizer)
    encode = encoder(tokenizer)
    # a release with another `PART` would count other pieces
    at = _saved(folder, f"{fingerprint}/{PART}", TYPES[dtype].itemsize)
    saved = at.tokens
    if saved:
        say(f"continuing after the {saved:,} tokens of an interrupted run")
    with (folder / TOKENS).open("ab") as tokens, (folder / ENDS).open("ab") as ends:
        for batch in batches(itertools.islice(pieces(documents, parts), at.pieces, None)):
            for piece, inner in zip(batch, encode(batch), strict=True):
                ids = np.array([*first * piece.opens, *inner, *last * piece.closes], TYPES[dtype])
                tokens.write(ids.tobytes())
                at.tokens += len(ids)
                # a tokenizer may make no token of a text, which is then no document
                if piece.ends and at.tokens > at.ended:
                    ends.write(np.array(at.tokens, END_TYPE).tobytes())
                    at.documents += 1
                    at.ended = at.tokens
                elif piece.ends:
                    assert parts == 1, "a document has no tokens"
            at.pieces += len(batch)
            # tokens before the file that counts them, or it may count some that a power cut has taken
            if at.tokens - saved >= SAVED:
                for file in (tokens, ends):
                    file.flush()
                    sync(Path(file.name))
                write_whole(folder / BEGUN, at.model_dump_json())
                saved = at.tokens
            yield at.documents
    if not at.tokens:
        raise ValueError("there is no text to tokenize")
    for name in (TOKENS, ENDS):
        sync(folder / name)
    index = Index(schema=SCHEMA, fingerprint=fingerprint, dtype=dtype, documents=at.documents, tokens=at.tokens)
    (folder / INDEX).write_text(index.model_dump_json(by_alias=True, indent=1), encoding="utf-8")
    yield at.documents


def _saved(folder: Path, key: str, size: int) -> PartialShards:
    """Return how far the files of a folder are valid, and cut them there; `size` is the bytes per token."""
    try:
        at = PartialShards.model_validate_json((folder / BEGUN).read_bytes())
        sizes = {folder / TOKENS: at.tokens * size, folder / ENDS: at.documents * END_TYPE.itemsize}
        if at.key == key and all(path.stat().st_size >= wanted for path, wanted in sizes.items()):
            # what was written after the last state is encoded again
            for path, wanted in sizes.items():
                os.truncate(path, wanted)
            return at
    except (FileNotFoundError, ValidationError):
        pass
    shutil.rmtree(folder)
    folder.mkdir()
    return PartialShards(key=key)


class Piece(NamedTuple):
    """A document or a chunk of one: whether special tokens come before and after it, and whether its document ends."""

    text: str
    opens: bool
    closes: bool
    ends: bool


def encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[Piece]], list[list[int]]]:
    """Return a function that encodes pieces; special tokens spelled out in the text stay text."""
    # a copy: truncation and padding are settings of the tokenizer, which its owner may need
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    return lambda batch: [
        encoding.ids
        for encoding in backend.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    ]


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces, about `BATCH` characters at once."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def pieces(documents: Iterable[str], parts: int) -> Iterator[Piece]:
    """Yield chunks of documents; the first chunk of `parts` documents that belong together opens, the last closes."""
    count = 0  # of documents that are not blank
    for index, text in enumerate(documents):
        if not isinstance(text, str):
            raise ValueError(f"document {index} must be text, got {type(text).__name__}")
        # the tokenizer's own error would not say which document
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"document {index} contains a lone surrogate, which is not valid text") from None
        if not text.strip():
            assert parts == 1, "a document that belongs to others is blank"
            continue
        opens = count % parts == 0
        closes = (count + 1) % parts == 0
        start = 0
        while start < len(text):
            stop = next_word(text, start + PART)
            last = stop == len(text)
            yield Piece(text[start:stop], opens and start == 0, closes and last, last)
            start = stop
        count += 1
    assert count % parts == 0, "the last documents that belong together are incomplete"


def frame(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a document."""
    first, last = special_tokens(tokenizer)
    # few tokenizers add an end token by themselves, and without one a model never learns to stop
    end = tokenizer.eos_token_id
    if isinstance(end, int) and end not in last:
        last = [*last, end]
    return first, last
