"""Documents of a source: a file, a dataset, or the corpus in the package."""

import contextlib
import functools
import glob
import hashlib
import re
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from crosslayer.corpus.files import (
    DOCUMENT_LINE,
    Reading,
    file_kind,
    jsonl_rows,
    local_files,
    row_texts,
    stream_file,
    with_line_feeds,
)
from crosslayer.extras import check_extra
from crosslayer.hub import dataset_revision, reading_dataset
from crosslayer.output.progress import QUIET, say

DATA = Path(__file__).parent.parent / "data"
# rows of the buffer from which a dataset is drawn: a stream can be shuffled only within what is in memory
SHUFFLED = 1000
NAMED = re.compile(r"([A-Za-z0-9][\w.-]{0,63})=(.+)", re.ASCII | re.DOTALL)
SETTINGS = ("config", "split", "column")
WITH_SETTINGS = re.compile(rf"(.+?)((?:,(?:{'|'.join(SETTINGS)})=[^,=]+)+)", re.DOTALL)


@dataclass(frozen=True)
class TextSource:
    """Where text comes from.

    Args:
        name: a .txt, .md, .jsonl or .parquet file (also with .gz or .xz), a folder or a pattern of such files, or the
            name of a dataset; None is the embedded corpus.
        config: configuration of a dataset.
        split: split of a dataset.
        column: text column of a table or dataset.
        domain: the text's name in results; default a short name of the source.
        where: only rows of a table or dataset with these values, by column: {"meta.redpajama_set_name": "RedPajamaC4"}.
    """

    name: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"
    domain: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def named(cls, text: str) -> "TextSource":
        """Return the source that a shell names: DOMAIN=SOURCE,config=…,split=…,column=…, or a part of that.

        What exists as a path is one.
        """
        # before anything is parted: the name of a file may hold "=" and ","
        if Path(text).expanduser().exists():
            return cls(text)
        domain: str | None = None
        options: dict[str, Any] = {}
        match = NAMED.fullmatch(text)
        if match is not None:
            domain, text = match.groups()
        match = None if Path(text).expanduser().exists() else WITH_SETTINGS.fullmatch(text)
        if match is not None:
            text, settings = match.groups()
            options = dict(setting.split("=") for setting in settings[1:].split(","))
        return cls(text, domain=domain, **options)

    def describe(self) -> str:
        """Return the domain's name, or a short name of the source for reports, without any folder."""
        if self.domain is not None:
            return self.domain
        if self.name is None:
            return "embedded corpus (Moby Dick, Opticks, two Austen novels, State of the Union)"
        path = Path(self.name).expanduser()
        if path.exists() or glob.has_magic(self.name):
            return path.name
        return "/".join(filter(None, (self.name, self.config, self.split)))


def load_documents(source: TextSource, seed: int = 0) -> Iterable[str]:
    """Return the documents of a source: a list, or a stream of a dataset in an order shuffled by `seed`.

    Raises:
        ValueError: the file is missing, empty, binary or too large for the memory, the column is unknown, or the
            dataset cannot be reached.
    """
    if source.name is None:
        return embedded_documents("default_corpus")
    if not local_files(source.name):
        # opened at once, so that an unreadable name is an error before a model is loaded
        rows = _opened_dataset(source).shuffle(seed=seed, buffer_size=SHUFFLED)
        return _some(_texts(source, rows), source)

    documents: list[str] = []
    size = 0
    # half of the memory, since text is not all that a command keeps
    most = psutil.virtual_memory().available // 2
    said = time.monotonic()
    for text in stream_documents(source):
        size += len(text)  # characters, of a byte at the least
        if size > most:
            raise ValueError(
                f"the text of {source.describe()} takes more than half of the free memory; use a part of it"
            )
        if time.monotonic() - said >= QUIET:
            said = time.monotonic()
            say(f"reading {source.describe()}: {size / 1e6:,.0f} million characters so far")
        documents.append(text)
    return documents


def stream_documents(source: TextSource, reading: Reading | None = None) -> Iterator[str]:
    """Yield the documents of a source, a file at a time, always in the same order; errors as `load_documents`.

    Of files, `reading` counts the bytes that are read.
    """
    files = local_files(source.name)
    if files:
        texts = (text for path in files for text in stream_file(path, source.column, reading, source.where))
        yield from _some(texts, source)
    else:
        yield from load_documents(source)


def stream_rows(source: TextSource, reading: Reading | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the rows of .jsonl files or of a dataset, in their order, each with its location in words."""
    assert source.name is not None, "the embedded corpus has no rows"
    for path in (files := local_files(source.name)):
        if file_kind(path) != ".jsonl":
            raise ValueError(f"instructions must be in .jsonl files (.gz, .xz) or a dataset, got {path.name!r}")
        yield from jsonl_rows(path, reading)
    if not files:
        for index, row in enumerate(_opened_dataset(source), 1):
            yield f"{source.name!r}, row {index}", row


def _some(texts: Iterable[str], source: TextSource) -> Iterator[str]:
    """Yield the texts of a source; refuse a `where` that leaves none."""
    empty = True
    for text in texts:
        empty = False
        yield text
    if empty and source.where:
        wanted = ", ".join(f"{column} = {value!r}" for column, value in source.where.items())
        raise ValueError(f"`where` must choose rows with text, got {wanted}, which no row of {source.describe()!r} has")


def _opened_dataset(source: TextSource) -> Any:
    name = str(source.name)
    check_extra("train", f"{name!r} is not a local file; as the name of a dataset it", "datasets")
    import datasets

    with _readable(name), reading_dataset(name):
        return datasets.load_dataset(name, source.config, split=source.split, streaming=True)


def _texts(source: TextSource, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    name = str(source.name)
    with _readable(name):
        for text in row_texts((("a row", row) for row in rows), name, source.column, source.where):
            yield with_line_feeds(text)


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    # datasets raises many kinds of errors; all mean that this source cannot be read
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name!r} is not a local file, and cannot be read as a dataset ({reason or type(error).__name__})"
        ) from error


def source_digest(source: TextSource) -> str:
    """Return a SHA-256 of what a source is: of local files their contents, of a dataset its names and its revision.

    Where no revision is known, without the hub and with nothing in its cache, a dataset is its names.
    """
    files = [DATA / "default_corpus.tar.xz"] if source.name is None else local_files(source.name)
    # names of files do not count: the same text in another place gives the same tokens
    names = [source.column] if files else [source.name, source.config, source.split, source.column]
    if source.name is not None and not files and (revision := dataset_revision(source.name)):
        names.append(revision)
    if source.where:
        names.append(repr(sorted(source.where.items())))
    # how lines end in what is read: tokens of releases that kept carriage returns are other tokens
    if source.name is not None:
        names.append("line feeds")
    digest = hashlib.sha256(repr(names).encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def embedded_documents(archive: str, files: Sequence[str] = ()) -> list[str]:
    """Return the documents of the named files (without suffix) of an embedded archive; without names, whole files."""
    texts = _embedded_texts(archive)
    if not files:
        return [*texts.values()]
    chosen = [text.split(f"\n{DOCUMENT_LINE}\n") for name, text in texts.items() if name in files]
    return [document for documents in chosen for document in documents]


@functools.cache
def _embedded_texts(archive: str) -> dict[str, str]:
    """Return the texts of an embedded archive by file name without suffix, in the order of their names."""
    texts = {}
    with tarfile.open(DATA / f"{archive}.tar.xz", "r:xz") as opened:
        # in the order of the archive: going back would unpack it again (0.39 s for six domains; now 0.08)
        for member in opened:
            content = opened.extractfile(member)
            if content is not None:  # None: a folder
                texts[member.name] = content.read().decode("utf-8")
    return {Path(name).stem: texts[name] for name in sorted(texts)}
