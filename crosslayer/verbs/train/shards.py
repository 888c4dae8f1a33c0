"""Tokens of a text in files: written once, whole or not at all, and memory-mapped.

A folder holds `tokens-00000.bin`, `tokens-00001.bin`, … (unsigned 16- or 32-bit numbers, little-endian, documents one
after the other), `ends.bin` (64-bit: where each document ends) and `index.json` (sizes and the fingerprint). Who opens
them reads `ends.bin` and the sizes of files, not the tokens: every process of a run does.

While a folder `out` is cut its files lie in `.out.crosslayer-begun`, with `begun.json`: which are whole. What is
interrupted goes on behind these, with the same tokens.
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
from crosslayer.output.progress import Meter, Silent, say
from crosslayer.output.record import validation_message
from crosslayer.verbs.train.checkpoints import sync
from crosslayer.verbs.train.tokenizers import PART, batches, encoder, frame, pieces

INDEX, ENDS, BEGUN = "index.json", "ends.bin", "begun.json"
SCHEMA = "crosslayer/shards/2"
FILE = 2**24  # tokens of a file at least; the batch with the last of them goes into it too
OPEN = 64  # files that are mapped at once; each holds a descriptor, and a process may have no more than 1,024
LARGEST = 2**24  # bytes of an index; that of 10¹² tokens needs fewer
TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END_TYPE = np.dtype("<i8")
ANEW = "remove the folder, and the text is cut into tokens anew"
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
    """What `begun.json` holds: of what the files beside it are, and how far."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: str
    files: list[Count] = []  # tokens of those that are whole
    pieces: int = Field(default=0, ge=0)  # of the text, that are in them
    documents: int = Field(default=0, ge=0)  # that have ended
    ended: int = Field(default=0, ge=0)  # tokens, when the last of them had


@dataclass(frozen=True)
class Shards:
    """The tokens of a text, read where they lie in files; cheap to send to another process."""

    folder: Path
    fingerprint: str  # of the text, the tokenizer and the format
    dtype: str  # "uint16" or "uint32"
    documents: int  # each has at least a single token
    files: tuple[int, ...]  # tokens of each

    @cached_property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(self.files)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count), (count,) int64, wherever files end."""
        assert start >= 0 and count > 0 and start + count <= self.tokens
        ids = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number = bisect.bisect_right(self._offsets, start + done) - 1
            inside = start + done - self._offsets[number]
            tokens = _mapped(self.folder / _file_name(number), self.dtype, self.fingerprint)
            part = tokens[inside : inside + count - done]
            ids[done : done + len(part)] = part
            done += len(part)
        return ids

    def starts(self, start: int, count: int) -> np.ndarray:
        """Return where documents start in [start, start + count), counted from `start`: int64, rising."""
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
        return {field.name: getattr(self, field.name) for field in fields(self)}  # no maps: they would be copied


@lru_cache(maxsize=OPEN)
def _mapped(path: Path, dtype: str, fingerprint: str) -> np.ndarray:
    """Map a file; what is written later under its name has another fingerprint."""
    return np.memmap(path, dtype=TYPES[dtype], mode="r")


def fingerprint(text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a SHA-256 of a text (by what says which it is, such as `source_digest`), a tokenizer and the format."""
    parts = [SCHEMA, text, tokenizer.backend_tokenizer.to_str(), frame(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def tokenise(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    fingerprint: str,
    parts: int = 1,
    meter: Meter = Silent,
    reading: Reading | None = None,
) -> Shards:
    """Write the tokens of documents into a folder, or take what lies there with the same fingerprint.

    A document begins and ends with what the tokenizer puts there, and with its end token where it has any; special
    tokens written out in the text stay text. The folder is whole or not there. Processes that want the same one wait
    for the first. What was interrupted goes on where it was. All cores are used (`RAYON_NUM_THREADS`,
    `TOKENIZERS_PARALLELISM=false` limit that); the files are the same for any number. A folder with shards of another
    fingerprint is replaced; what is no folder of shards is not touched.

    Documents are read only if they must be; those without text are left out. Of `parts` that belong together, such as 2
    for a prompt and its response, the first alone begins, and the last alone ends, with special tokens; none may be
    blank then. `reading` counts what is read of the documents' files, for a percentage.
    """
    folder = folder.expanduser().resolve()
    if not _is_there(folder, fingerprint):  # what is there may lie where nothing can be written, not even a lock
        reading = reading or Reading()
        known = reading.total > 0
        title = f"cutting {folder.name} into tokens"
        try:
            with exclusive(folder, wait=True):
                if not _is_there(folder, fingerprint):
                    with _begun(folder) as begun, meter(f"{title} (%)" if known else title, 100 * known) as bar:
                        for done in _write(documents, tokenizer, begun, fingerprint, parts):
                            bar.step(min(100, 100 * reading.done // reading.total) if known else done, 100 * known)
        except OSError as error:
            raise ValueError(f"the folder {str(folder)!r} cannot be written: {error.strerror or error}") from error
    return open_shards(folder)


def open_shards(folder: Path) -> Shards:
    """Open a folder of shards, whose files have the sizes that its index says."""
    index = _read_index(folder)
    sizes = {_file_name(number): tokens * TYPES[index.dtype].itemsize for number, tokens in enumerate(index.files)}
    for name, size in {**sizes, ENDS: index.documents * END_TYPE.itemsize}.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} of {folder.name!r} is missing; {ANEW}")
        there = (folder / name).stat().st_size
        if there != size:
            raise ValueError(f"{name} of {folder.name!r} has {there:,} bytes, not {size:,}; {ANEW}")
    shards = Shards(folder, index.fingerprint, index.dtype, index.documents, tuple(index.files))
    if np.diff(shards._ends, prepend=0).min() < 1 or shards._ends[-1] != shards.tokens:
        raise ValueError(f"{ENDS} of {folder.name!r} does not fit the tokens; {ANEW}")
    return shards


def _is_there(folder: Path, fingerprint: str) -> bool:
    return folder.exists() and _read_index(folder).fingerprint == fingerprint


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise ValueError(f"{folder.name!r} is no folder of shards: it has no {INDEX}; name another folder")
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{INDEX} of {folder.name!r}: {validation_message(error)}; {ANEW}") from None


def _file_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


@contextlib.contextmanager
def _begun(folder: Path) -> Iterator[Path]:
    """Give the folder that files are cut in, whose files become `folder` when the block ends; else it is kept."""
    begun = folder.with_name(f".{folder.name}.crosslayer-begun")
    try:
        begun.mkdir(exist_ok=True)
        yield begun
        with filled(folder) as partial:
            (begun / BEGUN).unlink(missing_ok=True)
            for path in [begun / INDEX, begun / ENDS, *begun.glob("tokens-*.bin")]:
                path.rename(partial / path.name)
    finally:
        if not (begun / BEGUN).is_file():  # nothing to go on from
            shutil.rmtree(begun, ignore_errors=True)


def _write(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerFast, folder: Path, fingerprint: str, parts: int
) -> Generator[int]:
    """Write all files of a folder, or those that are not there yet; yield from time to time how many documents are."""
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
    first, last = frame(tokenizer)
    encode = encoder(tokenizer)
    at = _saved(folder, f"{fingerprint}/{FILE}/{PART}", TYPES[dtype].itemsize)
    before, tokens = sum(at.files), sum(at.files)  # those of whole files, and all
    if tokens:
        say(f"going on from {tokens:,} tokens, which an interrupted run has cut")
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
        raise ValueError("there is no text to cut into tokens")
    if tokens > before:
        at.files.append(tokens - before)
    else:  # what followed the last whole file had no tokens
        (folder / _file_name(len(at.files))).unlink(missing_ok=True)
    for name in (_file_name(len(at.files) - 1), ENDS):
        sync(folder / name)
    index = Index(schema=SCHEMA, fingerprint=fingerprint, dtype=dtype, documents=at.documents, files=at.files)
    (folder / INDEX).write_text(index.model_dump_json(by_alias=True, indent=1), encoding="utf-8")
    yield at.documents


def _saved(folder: Path, key: str, size: int) -> Begun:
    """Return how far the files of a folder are right, and remove what is not; `size` is the bytes of a token."""
    try:
        at = Begun.model_validate_json((folder / BEGUN).read_bytes())
        whole = {_file_name(number): tokens * size for number, tokens in enumerate(at.files)}
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.bin")}
        ends = at.documents * END_TYPE.itemsize
        if at.key == key and whole.items() <= sizes.items() and sizes[ENDS] >= ends:
            (folder / _file_name(len(at.files))).unlink(missing_ok=True)
            os.truncate(folder / ENDS, ends)
            return at
    except (FileNotFoundError, KeyError, ValidationError):
        pass
    shutil.rmtree(folder)
    folder.mkdir()
    return Begun(key=key)
