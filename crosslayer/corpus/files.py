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
# bytes that a packed file may hold in any case, and the most times its size beyond that: text is packed to a third or
# an eighth, and a small file from a stranger must not fill the memory
HARMLESS, DENSEST = 2**26, 200
# characters of a document or a row: what is longer in a .txt is cut, in a .jsonl refused, since half a row is no JSON
LONGEST = 2**24
PACKINGS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open}
PLAIN = (".txt", ".md")  # whose text has no columns
KINDS = (*PLAIN, ".jsonl", ".parquet")
SUFFIXES = ".txt, .md, .jsonl or .parquet (also with .gz or .xz)"


@dataclass
class Reading:
    """How many bytes of files have been read, before unpacking; the total is unknown for input other than files."""

    total: int = 0
    done: int = 0


def local_files(name: str | None) -> list[Path]:
    """Return the files that a name means: all text files in a folder, or what matches a pattern (`*`, `?`, `[…]`).

    Any other name without the suffix of a text file is a dataset's, and None the embedded corpus: no files.

    Raises:
        ValueError: a file does not exist or is a device or a pipe, a folder holds no text files, or nothing matches a
            pattern.
    """
    if name is None:
        return []
    path = Path(name).expanduser()
    if path.is_dir():
        # a README.md is about the texts
        texts = [file for file in sorted(path.rglob("*")) if file_kind(file) in KINDS and file.name != "README.md"]
        files = [file for file in texts if file.is_file()]
        if not files:
            raise ValueError(f"{name!r} has no text files; their names end in {SUFFIXES}")
        return files
    if path.is_file():
        return [path]
    # reading these may never end
    if path.exists():
        raise ValueError(f"{name!r} is a device or a pipe; use a .txt, .md, .jsonl or .parquet file, or a Hub dataset")
    if glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = [match for match in matches if match.is_file()]
        if not files:
            raise ValueError(f"no file matches {name!r}")
        return files
    # else a misspelled file would be asked for at the hub
    if file_kind(path) in KINDS:
        raise ValueError(f"text file {name!r} does not exist")
    return []


def file_kind(path: Path) -> str:
    """Return what a file is by its name, without how it is packed: ".txt" for a.txt.xz."""
    return Path(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def stream_file(path: Path, column: str, reading: Reading | None, where: Mapping[str, Any]) -> Iterator[str]:
    """Yield the documents of a file, of a table the `column` of rows that `where` chooses, if any; `reading` counts."""
    kind = file_kind(path)
    if where and kind in PLAIN:
        raise ValueError(f"`where` needs columns, and {path.name!r} has none; give .jsonl, .parquet or a dataset")
    if kind not in KINDS:
        raise ValueError(f"{path.name!r} has the suffix {path.suffix!r}; text files end in {SUFFIXES}")
    reading = reading or Reading()
    if kind in PLAIN:
        texts = _plain_documents(path, reading)
    elif kind == ".jsonl":
        texts = row_texts(jsonl_rows(path, reading), path.name, column, where)
    else:
        texts = row_texts(_parquet_rows(path, column, where, reading), path.name, column, where)
    empty = True
    for text in texts:
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


def _plain_documents(path: Path, reading: Reading) -> Iterator[str]:
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
    for index, line in enumerate(_lines(path, reading or Reading()), 1):
        if not line.strip():
            continue
        location = f"{path.name!r}, line {index}"
        if len(line) == LONGEST:
            raise ValueError(f"{location}: a row must have fewer than {LONGEST:,} characters, got more")
        try:
            row = json.loads(line)
        # RecursionError: brackets that are nested thousands deep
        except (ValueError, RecursionError):
            raise ValueError(f"{location}: not JSON; each line of .jsonl holds an object") from None
        yield location, row


def _parquet_rows(path: Path, column: str, where: Mapping[str, Any], reading: Reading) -> Iterator[tuple[str, Any]]:
    """Yield the needed columns of each row, with the file's name; a batch counts as its share of the file."""
    check_extra("train", "reading .parquet", "pyarrow")
    import pyarrow.parquet as parquet

    # parquet is read from its end, which a packed file does not give: it is unpacked as a whole
    with _readable_table(path), _opened(path) as (_, unpacked):
        file = parquet.ParquetFile(io.BytesIO(unpacked.read()) if path.suffix in PACKINGS else path)
        names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path.name!r} has no column {column!r}; it has {', '.join(names)}")

    before = reading.done
    count = 0  # of rows that are read
    with _readable_table(path):
        for batch in file.iter_batches(columns=[*{column, *where}]):
            count += batch.num_rows
            reading.done = before + path.stat().st_size * count // file.metadata.num_rows
            for row in batch.to_pylist():
                yield repr(path.name), row


@contextmanager
def _readable_table(path: Path) -> Iterator[None]:
    try:
        yield
    # pyarrow raises many kinds of errors, also for a page that is damaged
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path.name!r} is not a parquet file, or is damaged: {reason}") from error


def _lines(path: Path, reading: Reading) -> Iterator[str]:
    """Yield the lines of a text, whatever ends them, each with a line feed; of one longer than `LONGEST`, parts."""
    before = reading.done
    try:
        # -sig: files saved on Windows may begin with a byte order mark, which must change no document
        with _opened(path) as (packed, file), io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            while line := text.readline(LONGEST):
                # valid UTF-8, but in no text: the file is binary
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


@dataclass(eq=False)
class _Unpacked(io.RawIOBase):
    """Reads a packed file, and refuses one that unpacks to far more than text does."""

    name: str
    packed: IO[bytes]
    file: IO[bytes]
    size: int = 0  # bytes that were read, unpacked

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
