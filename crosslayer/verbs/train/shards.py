"""Tokens of a text in files: written once, whole or not at all, and memory-mapped.

A folder holds `tokens-00000.bin`, `tokens-00001.bin`, … (unsigned 16- or 32-bit numbers, little-endian, documents one
after the other), `ends.bin` (64-bit: where each document ends) and `index.json` (sizes and the fingerprint). Who opens
them reads `ends.bin` and the sizes of files, not the tokens: every process of a run does.

While a folder `out` is cut its files lie in `.out.crosslayer-begun`, with `begun.json`: how far they are right. What is
interrupted goes on from there, with the same bytes.
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
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerFast

from crosslayer.corpus.files import Reading
from crosslayer.output.folder import exclusive, filled, write_whole
from crosslayer.output.progress import Meter, Silent, say
from crosslayer.verbs.train.encode import PART, batches, encoder, frame, pieces

INDEX, ENDS, BEGUN = "index.json", "ends.bin", "begun.json"
SCHEMA = "crosslayer/shards/2"
FILE = 2**27  # tokens of a file
SAVED = 2**24  # tokens between two points that an interrupted cutting goes on from
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


class Begun(BaseModel):
    """What `begun.json` holds: how far the files beside it are right, and of what they are."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: str
    pieces: int = Field(default=0, ge=0)  # of the text, that are cut
    tokens: int = Field(default=0, ge=0)
    documents: int = Field(default=0, ge=0)  # that have ended
    ended: int = Field(default=0, ge=0)  # tokens, when the last of them had


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
    `TOKENIZERS_PARALLELISM=false` limit that); the files are the same for any number.

    Args:
        documents: read only if they must be; those without text are left out.
        tokenizer: a fast one.
        folder: with shards of another fingerprint it is replaced; what is no folder of shards is not touched.
        fingerprint: of the text and the tokenizer, such as `fingerprint` gives.
        parts: how many documents belong together, such as 2 for a prompt and its response: the first alone begins,
            and the last alone ends, with special tokens. None may be blank then.
        meter: shows what is being done.
        reading: counts what is read of the documents' files, where they come from files; for a percentage.

    Raises:
        ValueError: the folder cannot be written or holds something else, its files are damaged, or there is no text.

    """
    folder = folder.expanduser().resolve()
    if not _is_there(folder, fingerprint):  # what is there may lie where nothing can be written, not even a lock
        try:
            with exclusive(folder, wait=True):
                if not _is_there(folder, fingerprint):
                    with _begun(folder) as begun:
                        steps = _write(documents, tokenizer, begun, fingerprint, parts)
                        _show(steps, f"cutting {folder.name} into tokens", meter, reading or Reading())
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


def _show(steps: Generator[int], title: str, meter: Meter, reading: Reading) -> None:
    """Take all steps, each the number of documents that are done; show that, or how much of their files is read."""
    known = reading.total > 0
    with contextlib.closing(steps), meter(f"{title} (%)" if known else title, 100 * known) as bar:
        for done in steps:
            bar.step(min(100, 100 * reading.done // reading.total) if known else done, 100 * known)


def _write(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerFast, folder: Path, fingerprint: str, parts: int
) -> Generator[int]:
    """Write all files of a folder, or those that are not there yet; yield from time to time how many documents are."""
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
    first, last = (np.array(ids, dtype=np.int64) for ids in frame(tokenizer))
    encode = encoder(tokenizer)
    with contextlib.closing(_Writer(folder, TYPES[dtype], f"{fingerprint}/{FILE}/{PART}")) as writer:
        if writer.at.tokens:
            say(f"going on from {writer.at.tokens:,} tokens, which an interrupted run has cut")
        for batch in batches(itertools.islice(pieces(documents, parts), writer.at.pieces, None)):
            for piece, ids in zip(batch, encode(batch), strict=True):
                writer.add(np.concatenate([*[first] * piece.opens, ids, *[last] * piece.closes]))
                if piece.ends:
                    ended = writer.end()
                    assert ended or parts == 1, "a document has no tokens"
            writer.at.pieces += len(batch)
            writer.save()
            yield writer.at.documents
        yield writer.at.documents  # now the text is at its end
    if not writer.at.tokens:
        raise ValueError("there is no text to cut into tokens")
    whole, rest = divmod(writer.at.tokens, FILE)
    index = Index(
        schema=SCHEMA,
        fingerprint=fingerprint,
        dtype=dtype,
        documents=writer.at.documents,
        files=[FILE] * whole + [rest] * (rest > 0),
    )
    (folder / INDEX).write_text(index.model_dump_json(by_alias=True, indent=1), encoding="utf-8")


class _Writer:
    """Writes tokens into files of `FILE` tokens, and where documents end; begins where it was saved last, if ever."""

    def __init__(self, folder: Path, dtype: np.dtype, key: str):
        self.folder, self.dtype = folder, dtype
        self.at = _saved(folder, dtype, key)
        self.saved = self.at.tokens
        self.file: IO[bytes] | None = None
        self.ends = _opened(folder / ENDS, self.at.documents * END_TYPE.itemsize)

    def add(self, ids: np.ndarray) -> None:
        """Append tokens."""
        while len(ids):
            number, inside = divmod(self.at.tokens, FILE)
            if self.file is None:
                self.file = _opened(self.folder / _file_name(number), inside * self.dtype.itemsize)
            part = ids[: FILE - inside]
            self.file.write(part.astype(self.dtype).tobytes())
            self.at.tokens += len(part)
            ids = ids[len(part) :]
            if self.at.tokens % FILE == 0:
                self._close_file()

    def end(self) -> bool:
        """End a document here; return whether it is one: it has tokens."""
        if self.at.tokens == self.at.ended:
            return False
        self.ends.write(np.array([self.at.tokens], dtype=END_TYPE).tobytes())
        self.at.ended = self.at.tokens
        self.at.documents += 1
        return True

    def save(self) -> None:
        """Make the present point one to go on from, if the last is `SAVED` tokens away."""
        if self.at.tokens - self.saved >= SAVED:
            for file in filter(None, (self.file, self.ends)):
                _settle(file)
            write_whole(self.folder / BEGUN, self.at.model_dump_json())
            self.saved = self.at.tokens

    def close(self) -> None:
        """Complete the files that are being written."""
        self._close_file()
        self.ends.close()

    def _close_file(self) -> None:
        if self.file is not None:
            _settle(self.file)
            self.file.close()
            self.file = None


def _saved(folder: Path, dtype: np.dtype, key: str) -> Begun:
    """Return how far the files of a folder are right; of what was begun otherwise, or is damaged, nothing is."""
    try:
        at = Begun.model_validate_json((folder / BEGUN).read_bytes())
        tokens = sum((folder / _file_name(number)).stat().st_size for number in range(-(-at.tokens // FILE)))
        ends = (folder / ENDS).stat().st_size
        if at.key == key and tokens >= at.tokens * dtype.itemsize and ends >= at.documents * END_TYPE.itemsize:
            return at
    except (FileNotFoundError, ValidationError):
        pass
    shutil.rmtree(folder)
    folder.mkdir()
    return Begun(key=key)


def _opened(path: Path, size: int) -> IO[bytes]:
    """Open a file to write behind its first `size` bytes; what is there beyond them goes."""
    file = path.open("ab")
    file.truncate(size)
    return file


def _settle(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
