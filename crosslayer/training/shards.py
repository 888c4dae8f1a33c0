"""Tokens of a text in files: written once, whole or not at all, and memory-mapped.

A folder holds `tokens-00000.bin`, `tokens-00001.bin`, … (unsigned 16- or 32-bit numbers, little-endian, documents one
after the other), `ends.bin` (64-bit: where each document ends) and `index.json` (sizes and the fingerprint). Who opens
them reads `ends.bin` and the sizes of files, not the tokens: every process of a run does.
"""

import bisect
import contextlib
import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from crosslayer.corpus.pieces import next_word, special_tokens
from crosslayer.output.folder import exclusive, filled
from crosslayer.output.progress import Meter, Silent

INDEX, ENDS = "index.json", "ends.bin"
SCHEMA = "crosslayer/shards/2"
FILE = 2**27  # tokens of a file
BATCH = 2**20  # characters that are encoded at once
PART = 2**16  # characters; a longer document is encoded in parts, cut before a word: faster, and in less memory
LARGEST = 2**24  # bytes of an index; that of 10¹² tokens needs fewer
TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END_TYPE = np.dtype("<i8")
ANEW = "remove the folder, and the text is cut into tokens anew"


class Index(BaseModel):
    """What `index.json` holds; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    schema_: Literal["crosslayer/shards/2"] = Field(alias="schema")
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    documents: int = Field(gt=0)
    files: list[Annotated[int, Field(gt=0)]] = Field(min_length=1)  # tokens of each


@dataclass(frozen=True)
class Shards:
    """The tokens of a text, read where they lie in files; cheap to send to another process.

    Args:
        folder: where the files are.
        tokens: how many there are.
        documents: how many; each has at least a single token.
        fingerprint: of the text, the tokenizer and the format.
        dtype: "uint16" or "uint32".
        files: tokens of each file.

    """

    folder: Path
    tokens: int
    documents: int
    fingerprint: str
    dtype: str
    files: tuple[int, ...]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count), (count,) int64, wherever files end."""
        assert start >= 0 and count > 0 and start + count <= self.tokens
        ids = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number = bisect.bisect_right(self._offsets, start + done) - 1
            inside = start + done - self._offsets[number]
            part = self._maps[number][inside : inside + count - done]
            ids[done : done + len(part)] = part
            done += len(part)
        return ids

    def starts(self, start: int, count: int) -> np.ndarray:
        """Return where documents start in [start, start + count), counted from `start`: int64, rising."""
        first, last = np.searchsorted(self._ends, (start, start + count))
        inside = self._ends[first:last] - start
        return np.concatenate(([0], inside)) if start == 0 else inside

    @cached_property
    def _maps(self) -> list[np.ndarray]:
        paths = [self.folder / _file_name(number) for number in range(len(self.files))]
        return [np.memmap(path, dtype=TYPES[self.dtype], mode="r") for path in paths]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.asarray(np.memmap(self.folder / ENDS, dtype=END_TYPE, mode="r"))

    @cached_property
    def _offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.files)][:-1]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # no maps: they would be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def fingerprint(text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a SHA-256 of a text (by what says which it is, such as `source_digest`), a tokenizer and the format."""
    parts = [SCHEMA, text, tokenizer.backend_tokenizer.to_str(), _frame(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def tokenise(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    fingerprint: str,
    parts: int = 1,
    meter: Meter = Silent,
) -> Shards:
    """Write the tokens of documents into a folder, or take what lies there with the same fingerprint.

    A document begins and ends with what the tokenizer puts there, and with its end token where it has any; special
    tokens written out in the text stay text. The folder is whole or not there. Processes that want the same one wait
    for the first. All cores are used (`RAYON_NUM_THREADS`, `TOKENIZERS_PARALLELISM=false` limit that).

    Args:
        documents: read only if they must be; those without text are left out.
        tokenizer: a fast one.
        folder: with shards of another fingerprint it is replaced; what is no folder of shards is not touched.
        fingerprint: of the text and the tokenizer, such as `fingerprint` gives.
        parts: how many documents belong together, such as 2 for a prompt and its response: the first alone begins,
            and the last alone ends, with special tokens. None may be blank then.
        meter: shows what is being done.

    Raises:
        ValueError: the folder cannot be written or holds something else, its files are damaged, or there is no text.

    """
    folder = folder.expanduser().resolve()
    if not _is_there(folder, fingerprint):  # what is there may lie where nothing can be written, not even a lock
        try:
            with exclusive(folder, wait=True):
                if not _is_there(folder, fingerprint):
                    with filled(folder) as partial, meter(f"cutting {folder.name} into tokens", 0):
                        _write(documents, tokenizer, partial, fingerprint, parts)
        except OSError as error:
            raise ValueError(f"the folder {str(folder)!r} cannot be written: {error.strerror or error}") from error
    return open_shards(folder)


def open_shards(folder: Path) -> Shards:
    """Open a folder of shards, whose files have the sizes that its index says.

    Raises:
        ValueError: a file is missing or cut off; the message names it.

    """
    index = _read_index(folder)
    dtype = TYPES[index.dtype]
    for number, tokens in enumerate(index.files):
        _check(folder / _file_name(number), tokens * dtype.itemsize)
    _check(folder / ENDS, index.documents * END_TYPE.itemsize)
    files = tuple(index.files)
    shards = Shards(folder, sum(files), index.documents, index.fingerprint, index.dtype, files)
    lengths = np.diff(shards._ends, prepend=0)
    if lengths.min() < 1 or shards._ends[-1] != shards.tokens:
        raise ValueError(f"{ENDS} of {folder.name!r} does not fit the tokens; {ANEW}")
    return shards


def _is_there(folder: Path, fingerprint: str) -> bool:
    return folder.exists() and _read_index(folder).fingerprint == fingerprint


def _check(path: Path, size: int) -> None:
    """Refuse a file of another size."""
    place = f"{path.name} of {path.parent.name!r}"
    if not path.is_file():
        raise ValueError(f"{place} is missing; {ANEW}")
    if path.stat().st_size != size:
        raise ValueError(f"{place} has {path.stat().st_size:,} bytes, not {size:,}; {ANEW}")


def _read_index(folder: Path) -> Index:
    """Read and check `index.json`."""
    path = folder / INDEX
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise ValueError(f"{folder.name!r} is no folder of shards: it has no {INDEX}; name another folder")
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{INDEX} of {folder.name!r}: {place}{': ' if place else ''}{first['msg']}; {ANEW}") from None


def _file_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def _write(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerFast, folder: Path, fingerprint: str, parts: int
) -> None:
    """Write all files of a folder."""
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
    first, last = (np.array(ids, dtype=np.int64) for ids in _frame(tokenizer))
    ends, total, number = array("q", [0]), 0, 0
    with contextlib.closing(_Writer(folder, TYPES[dtype])) as writer:
        for ids, begins, finishes in _encoded(documents, tokenizer):
            opens, closes = begins and number % parts == 0, finishes and (number + 1) % parts == 0
            framed = np.concatenate([*[first] * opens, ids, *[last] * closes])
            writer.add(framed)
            total, number = total + len(framed), number + finishes
            if finishes and total > ends[-1]:
                ends.append(total)
    assert parts == 1 or len(ends) - 1 == number and number % parts == 0, "a document is blank, or lacks its others"
    if not total:
        raise ValueError("there is no text to cut into tokens")
    (folder / ENDS).write_bytes(np.array(ends[1:], dtype=END_TYPE).tobytes())
    index = Index(
        schema=SCHEMA,
        fingerprint=fingerprint,
        dtype=dtype,
        documents=len(ends) - 1,
        files=writer.files,
    )
    (folder / INDEX).write_text(index.model_dump_json(by_alias=True, indent=1), encoding="utf-8")


class _Writer:
    """Writes tokens into files of `FILE` tokens."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.folder, self.dtype = folder, dtype
        self.files: list[int] = []  # tokens of those that are complete
        self.file, self.tokens = None, 0

    def add(self, ids: np.ndarray) -> None:
        """Append tokens."""
        while len(ids):
            if self.file is None:
                self.file = (self.folder / _file_name(len(self.files))).open("wb")
                self.tokens = 0
            part = ids[: FILE - self.tokens]
            self.file.write(part.astype(self.dtype).tobytes())
            self.tokens += len(part)
            ids = ids[len(part) :]
            if self.tokens == FILE:
                self.close()

    def close(self) -> None:
        """Complete the file that is being written, if there is one."""
        if self.file is not None:
            self.file.close()
            self.file = None
            self.files.append(self.tokens)


def _encoded(documents: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[np.ndarray, bool, bool]]:
    """Yield the tokens of parts of documents, and whether a part begins and whether it finishes its document."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, whose settings are ours
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    for batch in _batches(documents):
        encodings = backend.encode_batch_fast([text for text, _, _ in batch], add_special_tokens=False)
        for encoding, (_, begins, finishes) in zip(encodings, batch, strict=True):
            yield np.array(encoding.ids, dtype=np.int64), begins, finishes


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool, bool]]]:
    """Yield parts of documents, about `BATCH` characters at once; each with whether it begins and finishes its own."""
    batch: list[tuple[str, bool, bool]] = []
    size = 0
    for number, text in enumerate(documents):
        _check_document(text, number)
        if not text.strip():
            continue
        start = 0
        while start < len(text):
            stop = next_word(text, start + PART)
            batch.append((text[start:stop], start == 0, stop == len(text)))
            size += stop - start
            start = stop
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _check_document(text: str, number: int) -> None:
    """Refuse what is no text, or none that has a form in UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"document {number} is a {type(text).__name__}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"document {number} holds half of a character (a surrogate)") from None


def _frame(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens that a document begins and ends with."""
    first, last = special_tokens(tokenizer)
    end = tokenizer.eos_token_id
    if isinstance(end, int) and end not in last:
        last = [*last, end]
    return first, last
