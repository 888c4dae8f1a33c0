"""Documents from a file, a dataset or the embedded corpus."""

import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosslayer.output.progress import say

DATA = Path(__file__).parent.parent / "data"
DOCUMENT_LINE = "<|doc|>"  # a line that separates documents in a .txt file


@dataclass(frozen=True)
class TextSource:
    """Where text comes from: `name` None is the embedded corpus; the rest is for tables and `datasets`."""

    name: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"

    def describe(self) -> str:
        """Return a short name for reports, without any folder."""
        if self.name is None:
            return "embedded corpus (Moby Dick, Opticks, two Austen novels, State of the Union)"
        path = Path(self.name).expanduser()
        return path.name if path.exists() else "/".join(filter(None, (self.name, self.config, self.split)))


def load_documents(source: TextSource, seed: int = 0) -> Iterable[str]:
    """Return the documents of a source; a `datasets` name is streamed in an order shuffled by `seed`.

    Raises:
        ValueError: the file is missing, empty or binary, the column is unknown, or the dataset cannot be reached.

    """
    if source.name is None:
        return embedded_documents("default_corpus")
    path = Path(source.name).expanduser()
    if not path.exists():
        if path.suffix in READERS:
            raise ValueError(f"text file {source.name!r} does not exist")
        return _dataset_documents(source, seed)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"{source.name!r} is {kind}; give a .txt, .jsonl or .parquet file, or a datasets name")
    if path.suffix not in READERS:
        raise ValueError(f"{path.name!r} has the suffix {path.suffix!r}; text files end in .txt, .jsonl or .parquet")
    documents = [d for d in READERS[path.suffix](path, source.column) if d.strip()]
    if not documents:
        raise ValueError(f"{path.name!r} holds no text")
    return documents


def embedded_documents(archive: str, files: Sequence[str] = ()) -> list[str]:
    """Return the documents of the named files (without suffix) of an embedded archive; without names, whole files."""
    documents = []
    with tarfile.open(DATA / f"{archive}.tar.xz", "r:xz") as opened:
        for member in sorted((m for m in opened.getmembers() if m.isfile()), key=lambda m: m.name):
            if not files or Path(member.name).stem in files:
                text = opened.extractfile(member).read().decode("utf-8")  # type: ignore[union-attr]
                documents += _separated(text) if files else [text]
    return documents


def _separated(text: str) -> list[str]:
    return text.split(f"\n{DOCUMENT_LINE}\n")


def _decode(path: Path) -> str:
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"text file {path.name!r} is empty")
    try:
        if b"\0" in data:
            raise UnicodeError
        return data.decode("utf-8")
    except UnicodeError:
        raise ValueError(f"{path.name!r} is not UTF-8 text (it looks binary)") from None


def _txt_documents(path: Path, column: str) -> list[str]:
    return _separated(_decode(path))


def _jsonl_documents(path: Path, column: str) -> list[str]:
    documents, skipped = [], 0
    for number, line in enumerate(_decode(path).split("\n"), 1):  # no other character ends a line of .jsonl
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{path.name!r}, line {number}: not JSON; .jsonl holds one object a line") from None
        if isinstance(row, dict) and column in row and row[column] is None:
            skipped += 1
            continue
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{path.name!r}, line {number}: no text in column {column!r}; it has {keys}")
        if not _encodable(row[column]):
            raise ValueError(f"{path.name!r}, line {number}: column {column!r} holds half of a character (a surrogate)")
        documents.append(row[column])
    _say_skipped(path.name, skipped)
    return documents


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _say_skipped(name: str, rows: int) -> None:
    if rows:
        say(f"{name}: skipped {rows} row{'s' if rows > 1 else ''} without text")


def _parquet_documents(path: Path, column: str) -> list[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("reading .parquet needs pyarrow: pip install 'crosslayer[train]'") from error
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        values = file.read([column])[column].to_pylist() if column in names else []
    except Exception as error:  # pyarrow raises many kinds, also for a page that is damaged
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path.name!r} is not a parquet file, or is damaged: {reason}") from error
    if column not in names:
        raise ValueError(f"{path.name!r} has no column {column!r}; it has {', '.join(names)}")
    texts = [value for value in values if value is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path.name!r}: column {column!r} holds {file.schema_arrow.field(column).type}, not text")
    _say_skipped(path.name, len(values) - len(texts))
    return texts


READERS = {".txt": _txt_documents, ".jsonl": _jsonl_documents, ".parquet": _parquet_documents}


def _dataset_documents(source: TextSource, seed: int) -> Iterator[str]:
    """Open a dataset at once, so that one that cannot be read is said before a model is loaded; stream its texts."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source.name!r} is no local file, and a datasets name needs: pip install 'crosslayer[train]'"
        ) from error
    assert source.name is not None
    with _dataset_errors(source):
        rows = datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
        return _texts_of(source, rows.shuffle(seed=seed, buffer_size=1000))


def _texts_of(source: TextSource, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    skipped = 0
    with _dataset_errors(source):
        for row in rows:
            if source.column not in row:
                raise KeyError(f"column {source.column!r} is not there; it has {', '.join(row)}")
            if isinstance(row[source.column], str):
                yield row[source.column]
            else:
                skipped += 1
    _say_skipped(source.describe(), skipped)


@contextmanager
def _dataset_errors(source: TextSource) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets raises many kinds; all mean that this source cannot be read
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{source.name!r} is no local file, and as a dataset it cannot be read ({reason or type(error).__name__})"
        ) from error
