"""Tokens of a text in files, which are written once, completely or not at all, and memory-mapped.

A folder holds `tokens-00000.bin`, `tokens-00001.bin`, … (unsigned 16- or 32-bit little-endian numbers, documents in
sequence), `ends.bin` (64-bit: the end of each document) and `index.json` (sizes and the fingerprint). Opening a folder,
which every process of a run does, reads `ends.bin` and the sizes of files, not the tokens.

While a folder `out` is written, its files are in `.out.crosslayer-begun`, with a list of the complete ones in
`begun.json`. An interrupted tokenisation continues after these, with the same result.
"""

import bisect
import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerFast

from crosslayer.corpus.files import Reading
from crosslayer.output.folder import exclusive, filled, write_whole
from crosslayer.output.progress import progress, say
from crosslayer.output.record import validation_message
from crosslayer.training.checkpoints import sync
from crosslayer.training.tokenizers import PART, batches, encoder, frame, pieces

INDEX, ENDS, BEGUN = "index.json", "ends.bin", "begun.json"
SCHEMA = "crosslayer/shards/2"
FILE = 2**24  # minimum tokens of a file; it ends with the batch that reaches them
OPEN = 64  # files that are mapped at once; each has a descriptor, and a process may have 1,024
LARGEST = 2**24  # bytes of an index; 10¹² tokens need fewer
TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END_TYPE = np.dtype("<i8")
DELETE = "delete the folder to tokenise the text again"
Count = Annotated[int, Field(gt=0)]


class Index(BaseModel):
    """What `index.json` holds; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    schema_: Literal["crosslayer/shards/2"] = Field(alias="schema")
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    documents: int = Field(gt=0)
    files: list[Count] = Field(min_length=1)  # tokens of each


class Begun(BaseModel):
    """What `begun.json` holds: the text and tokenizer of the files, and how far they are written."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: str
    files: list[Count] = []  # tokens of each complete file
    pieces: int = Field(default=0, ge=0)  # of the text, in these files
    documents: int = Field(default=0, ge=0)  # that end in these files
    ended: int = Field(default=0, ge=0)  # tokens up to the end of the last of these documents


@dataclass(frozen=True)
class Shards:
    """The tokens of a text in memory-mapped files; cheap to send to another process."""

    folder: Path
    fingerprint: str  # of the text, the tokenizer and the format
    dtype: str  # "uint16" or "uint32"
    documents: int  # each has at least one token
    files: tuple[int, ...]  # tokens of each

    @cached_property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(self.files)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count), (count,) int64, also across files."""
        assert start >= 0 and count > 0 and start + count <= self.tokens
        ids = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number = bisect.bisect_right(self._offsets, start + done) - 1
            inside = start + done - self._offsets[number]
            tokens = _mapped(self.folder / _file_name(number), self.dtype, self.fingerprint)
            chunk = tokens[inside : inside + count - done]
            ids[done : done + len(chunk)] = chunk
            done += len(chunk)
        return ids

    def starts(self, start: int, count: int) -> np.ndarray:
        """Return where documents start in [start, start + count), relative to `start`: int64, ascending."""
        first, last = np.searchsorted(self._ends, (start, start + count))
        inside = self._ends[first:last] - start
        return np.concatenate(([0], inside)) if start == 0 else inside

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.asarray(np.memmap(self.folder / ENDS, dtype=END_TYPE, mode="r"))

    @cached_property
    def _offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.files)][:-1]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # without maps, which would be copied


@lru_cache(maxsize=OPEN)
def _mapped(path: Path, dtype: str, fingerprint: str) -> np.ndarray:
    """Map a file; the fingerprint distinguishes it from a later file of the same name."""
    return np.memmap(path, dtype=TYPES[dtype], mode="r")


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
    spelled out in the text stay text. The folder is complete or absent, an interrupted tokenisation continues, and
    processes that need the same folder wait for the first. All cores are used (limit them with `RAYON_NUM_THREADS` or
    `TOKENIZERS_PARALLELISM=false`), with the same result for any number. Shards of another fingerprint are replaced;
    other folders are refused.

    Documents are read only if needed, and empty ones are skipped. With `parts` > 1, such as 2 for a prompt and its
    response, that many documents belong together: only the first starts, and only the last ends, with special tokens,
    and none may be blank. `reading` counts the bytes read from the documents' files, for the percentage of progress.
    """
    folder = folder.expanduser().resolve()
    if not _exists(folder, fingerprint):  # checked without a lock, since the folder may be read-only
        reading = reading or Reading()
        known = reading.total > 0
        title = f"tokenising {folder.name}"
        try:
            with exclusive(folder, wait=True):
                if not _exists(folder, fingerprint):
                    with _begun(folder) as begun, progress(f"{title} (%)" if known else title, 100 * known) as bar:
                        for done in _write(documents, tokenizer, begun, fingerprint, parts):
                            bar.step(min(100, 100 * reading.done // reading.total) if known else done, 100 * known)
        except OSError as error:
            raise ValueError(f"the folder {str(folder)!r} cannot be written: {error.strerror or error}") from error
    return open_shards(folder)


def open_shards(folder: Path) -> Shards:
    """Open a folder of shards and check the sizes of its files."""
    index = _read_index(folder)
    sizes = {_file_name(number): tokens * TYPES[index.dtype].itemsize for number, tokens in enumerate(index.files)}
    for name, size in {**sizes, ENDS: index.documents * END_TYPE.itemsize}.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} of {folder.name!r} is missing; {DELETE}")
        actual = (folder / name).stat().st_size
        if actual != size:
            raise ValueError(f"{name} of {folder.name!r} must have {size:,} bytes, got {actual:,}; {DELETE}")
    shards = Shards(folder, index.fingerprint, index.dtype, index.documents, tuple(index.files))
    if np.diff(shards._ends, prepend=0).min() < 1 or shards._ends[-1] != shards.tokens:
        raise ValueError(f"{ENDS} of {folder.name!r} does not match the tokens; {DELETE}")
    return shards


def _exists(folder: Path, fingerprint: str) -> bool:
    return folder.exists() and _read_index(folder).fingerprint == fingerprint


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise ValueError(f"{folder.name!r} is not a folder of tokens: it has no {INDEX}; use another folder")
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{INDEX} of {folder.name!r}: {validation_message(error)}; {DELETE}") from None


def _file_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


@contextlib.contextmanager
def _begun(folder: Path) -> Iterator[Path]:
    """Yield the folder of unfinished files; they become `folder` when the block ends, and are kept if it fails."""
    begun = folder.with_name(f".{folder.name}.crosslayer-begun")
    try:
        begun.mkdir(exist_ok=True)
        yield begun
        with filled(folder) as partial:
            (begun / BEGUN).unlink(missing_ok=True)
            for path in [begun / INDEX, begun / ENDS, *begun.glob("tokens-*.bin")]:
                path.rename(partial / path.name)
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
    at = _saved(folder, f"{fingerprint}/{FILE}/{PART}", TYPES[dtype].itemsize)
    before, tokens = sum(at.files), sum(at.files)  # tokens in complete files, and all
    if tokens:
        say(f"continuing after the {tokens:,} tokens of an interrupted run")
    for batch in batches(itertools.islice(pieces(documents, parts), at.pieces, None)):
        ends = [at.ended]
        with (folder / _file_name(len(at.files))).open("ab") as file:
            for piece, inner in zip(batch, encode(batch), strict=True):
                ids = np.array([*first * piece.opens, *inner, *last * piece.closes], TYPES[dtype])
                file.write(ids.tobytes())
                tokens += len(ids)
                if piece.ends and tokens > ends[-1]:
                    ends.append(tokens)
                elif piece.ends:
                    assert parts == 1, "a document has no tokens"
        with (folder / ENDS).open("ab") as file:
            file.write(np.array(ends[1:], END_TYPE).tobytes())
        at.pieces, at.documents, at.ended = at.pieces + len(batch), at.documents + len(ends) - 1, ends[-1]
        if tokens - before >= FILE:
            sync(folder / _file_name(len(at.files)))
            sync(folder / ENDS)
            at.files.append(tokens - before)
            write_whole(folder / BEGUN, at.model_dump_json())
            before = tokens
        yield at.documents
    if not tokens:
        raise ValueError("there is no text to tokenise")
    if tokens > before:
        at.files.append(tokens - before)
    else:  # the text after the last complete file had no tokens
        (folder / _file_name(len(at.files))).unlink(missing_ok=True)
    for name in (_file_name(len(at.files) - 1), ENDS):
        sync(folder / name)
    index = Index(schema=SCHEMA, fingerprint=fingerprint, dtype=dtype, documents=at.documents, files=at.files)
    (folder / INDEX).write_text(index.model_dump_json(by_alias=True, indent=1), encoding="utf-8")
    yield at.documents


def _saved(folder: Path, key: str, size: int) -> Begun:
    """Return how far the files of a folder are valid, and delete the others; `size` is the bytes per token."""
    try:
        at = Begun.model_validate_json((folder / BEGUN).read_bytes())
        complete = {_file_name(number): tokens * size for number, tokens in enumerate(at.files)}
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.bin")}
        ends = at.documents * END_TYPE.itemsize
        if at.key == key and complete.items() <= sizes.items() and sizes[ENDS] >= ends:
            (folder / _file_name(len(at.files))).unlink(missing_ok=True)
            os.truncate(folder / ENDS, ends)
            return at
    except (FileNotFoundError, KeyError, ValidationError):
        pass
    shutil.rmtree(folder)
    folder.mkdir()
    return Begun(key=key)
