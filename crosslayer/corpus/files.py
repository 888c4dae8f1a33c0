"""Documents of local files: .txt, .md, .jsonl and .parquet, also packed as .gz or .xz. A file may come from anyone."""

import glob
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from crosslayer.corpus.rows import document_of, is_chosen
from crosslayer.extras import check_extra
from crosslayer.output.formatting import plural
from crosslayer.output.progress import say

DOCUMENT_LINE = "<|doc|>"  # a line that separates documents in a .txt file
READ = 2**20  # bytes that are unpacked at once
HARMLESS, DENSEST = 2**26, 200  # bytes that a packed file may hold in any case; text is packed to a third or an eighth
LONGEST = 2**24  # characters of a document or a row: what is longer in a .txt is cut, in a .jsonl refused


@dataclass
class Reading:
    """How many bytes of files have been read, before unpacking; the total is unknown for input other than files."""

    total: int = 0
    done: int = 0


def local_files(name: str) -> list[Path]:
    """Return the files that a name means: all text files in a folder, or what matches a pattern (`*`, `?`, `[…]`).

    In a folder a README.md is left out: it is about the texts.

    Any other name without the suffix of a text file is a dataset's: no files.

    Raises:
        ValueError: a file does not exist or is a device or a pipe, a folder holds no text files, or nothing matches a
            pattern.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        texts = [file for file in sorted(path.rglob("*")) if file_kind(file) in READERS and file.name != "README.md"]
        files = [file for file in texts if file.is_file()]
        if not files:
            raise ValueError(f"{name!r} has no text files; their names end in {SUFFIXES}")
        return files
    if path.is_file():
        return [path]
    if path.exists():
        raise ValueError(f"{name!r} is a device or a pipe; use a .txt, .md, .jsonl or .parquet file, or a Hub dataset")
    if glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = [match for match in matches if match.is_file()]
        if not files:
            raise ValueError(f"no file matches {name!r}")
        return files
    if file_kind(path) in READERS:
        raise ValueError(f"text file {name!r} does not exist")
    return []


def file_kind(path: Path) -> str:
    """Return what a file is by its name, without how it is packed: ".txt" for a.txt.xz."""
    return Path(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def stream_file(path: Path, column: str, reading: Reading | None, where: Mapping[str, Any]) -> Iterator[str]:
    """Yield the documents of a file, of a table the `column` of rows that `where` chooses, if any; `reading` counts."""
    if where and file_kind(path) in PLAIN:
        raise ValueError(f"`where` needs columns, and {path.name!r} has none; give .jsonl, .parquet or a dataset")
    if file_kind(path) not in READERS:
        raise ValueError(f"{path.name!r} has the suffix {path.suffix!r}; text files end in {SUFFIXES}")
    empty = True
    for text in READERS[file_kind(path)](path, column, reading or Reading(), where):
        if text.strip():
            empty = False
            yield with_line_feeds(text)
    if empty and not where:
        raise ValueError(f"{path.name!r} {'holds no text' if path.stat().st_size else 'is empty'}")


def with_line_feeds(text: str) -> str:
    """Return text in which every line ends in a line feed, whatever system it was saved on."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def say_skipped(name: str, rows: int) -> None:
    """Say how many rows of a table hold no text, if there are any."""
    if rows:
        say(f"{name}: skipped {plural(rows, 'row')} without text or response")


def _txt_documents(path: Path, column: str, reading: Reading, where: Mapping[str, Any]) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for line in _lines(path, reading):
        separates = line.rstrip("\n") == DOCUMENT_LINE
        if separates or size + len(line) > LONGEST:
            yield "".join(lines).strip("\n")
            lines, size = [], 0
        if not separates:
            lines.append(line)
            size += len(line)
    yield "".join(lines).strip("\n")


def _jsonl_documents(path: Path, column: str, reading: Reading, where: Mapping[str, Any]) -> Iterator[str]:
    return row_texts(jsonl_rows(path, reading), path.name, column, where)


def row_texts(rows: Iterable[tuple[str, Any]], name: str, column: str, where: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of rows that `where` chooses, each with its location in words; say how many have no text."""
    skipped = 0
    for location, row in rows:
        if not is_chosen(row, location, where):
            continue
        text = document_of(row, location, column)
        if text is None:
            skipped += 1
        else:
            yield text
    say_skipped(name, skipped)


def jsonl_rows(path: Path, reading: Reading | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what the lines of a .jsonl file hold, each with its file and line in words."""
    for number, line in enumerate(_lines(path, reading or Reading()), 1):
        if not line.strip():
            continue
        location = f"{path.name!r}, line {number}"
        if len(line) == LONGEST:
            raise ValueError(f"{location}: a row must have fewer than {LONGEST:,} characters, got more")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{location}: not JSON; each line of .jsonl holds an object") from None
        yield location, row


def _parquet_documents(path: Path, column: str, reading: Reading, where: Mapping[str, Any]) -> Iterator[str]:
    check_extra("train", "reading .parquet", "pyarrow")
    import pyarrow.parquet as parquet

    with _readable_table(path), _opened(path) as (_, unpacked):
        file = parquet.ParquetFile(io.BytesIO(unpacked.read()) if path.suffix in PACKINGS else path)
        names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path.name!r} has no column {column!r}; it has {', '.join(names)}")
    return row_texts(_parquet_rows(path, file, [*{column, *where}], reading), path.name, column, where)


def _parquet_rows(path: Path, file: Any, columns: list[str], reading: Reading) -> Iterator[tuple[str, Any]]:
    """Yield rows of some columns, each with the file's name; a batch that is read counts as its share of the file."""
    before, rows = reading.done, 0
    with _readable_table(path):
        for batch in file.iter_batches(columns=columns):
            rows += batch.num_rows
            reading.done = before + path.stat().st_size * rows // file.metadata.num_rows
            for row in batch.to_pylist():
                yield repr(path.name), row


@contextmanager
def _readable_table(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # pyarrow raises many kinds, also for a page that is damaged
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path.name!r} is not a parquet file, or is damaged: {reason}") from error


def _lines(path: Path, reading: Reading) -> Iterator[str]:
    """Yield the lines of a text, whatever ends them, each with a line feed; of one longer than `LONGEST`, parts."""
    before = reading.done
    try:
        with _opened(path) as (packed, file), io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            while line := text.readline(LONGEST):
                if "\0" in line:
                    raise UnicodeError
                reading.done = before + packed.tell()
                yield line
    except UnicodeError:
        raise ValueError(f"{path.name!r} is not UTF-8 text (it looks binary)") from None
    reading.done = before + path.stat().st_size


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file for reading: as it is, and unpacked."""
    try:
        with path.open("rb") as packed, PACKINGS.get(path.suffix, nullcontext)(packed) as file:
            yield packed, file if file is packed else io.BufferedReader(_Unpacked(path.name, packed, file), READ)
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path.name!r} is damaged or cut short: {error}") from error
    except OSError as error:
        raise ValueError(f"{path.name!r} cannot be read: {error.strerror or error}") from error


class _Unpacked(io.RawIOBase):
    """Reads a packed file, and refuses one that unpacks to far more than text does."""

    def __init__(self, name: str, packed: IO[bytes], file: IO[bytes]):
        self.name, self.packed, self.file, self.size = name, packed, file, 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return how many bytes."""
        content = self.file.read(len(buffer))
        buffer[: len(content)] = content
        self.size += len(content)
        if self.size > HARMLESS and self.size > DENSEST * self.packed.tell():
            raise ValueError(
                f"{self.name!r} unpacks to more than {DENSEST} times its size, so it is not text; give another file"
            )
        return len(content)


PACKINGS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open}
PLAIN = (".txt", ".md")  # whose text has no columns
READERS: dict[str, Callable[[Path, str, Reading, Mapping[str, Any]], Iterator[str]]] = {
    **dict.fromkeys(PLAIN, _txt_documents),
    ".jsonl": _jsonl_documents,
    ".parquet": _parquet_documents,
}
SUFFIXES = ".txt, .md, .jsonl or .parquet (also with .gz or .xz)"
