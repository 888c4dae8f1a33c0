"""Documents of local files: .txt, .jsonl and .parquet. A file may come from anyone."""

import json
from collections.abc import Callable
from pathlib import Path

from crosslayer.output.progress import say

DOCUMENT_LINE = "<|doc|>"  # a line that separates documents in a .txt file


def read_file(path: Path, column: str) -> list[str]:
    """Return the documents of a file; `column` names the text in a table.

    Raises:
        ValueError: the file is empty, binary or damaged, is none of `READERS`, or has no such column.

    """
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"{str(path)!r} is {kind}; give a .txt, .jsonl or .parquet file, or a datasets name")
    if path.suffix not in READERS:
        raise ValueError(f"{path.name!r} has the suffix {path.suffix!r}; text files end in .txt, .jsonl or .parquet")
    documents = [text for text in READERS[path.suffix](path, column) if text.strip()]
    if not documents:
        raise ValueError(f"{path.name!r} holds no text")
    return documents


def separated(text: str) -> list[str]:
    """Return the documents of a plain text."""
    return text.split(f"\n{DOCUMENT_LINE}\n")


def say_skipped(name: str, rows: int) -> None:
    """Say how many rows of a table hold no text, if there are any."""
    if rows:
        say(f"{name}: skipped {rows} row{'s' if rows > 1 else ''} without text")


def _txt_documents(path: Path, column: str) -> list[str]:
    return separated(_decode(path))


def _jsonl_documents(path: Path, column: str) -> list[str]:
    documents, skipped = [], 0
    for number, line in enumerate(_decode(path).split("\n"), 1):  # no other character ends a line of .jsonl
        if not line.strip():
            continue
        text = _row_text(line, f"{path.name!r}, line {number}", column)
        if text is None:
            skipped += 1
        else:
            documents.append(text)
    say_skipped(path.name, skipped)
    return documents


def _row_text(line: str, place: str, column: str) -> str | None:
    """Return the text of a row of .jsonl, None where it is null."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{place}: not JSON; each line of .jsonl holds an object") from None
    if isinstance(row, dict) and column in row and row[column] is None:
        return None
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{place}: no text in column {column!r}; it has {keys}")
    if any("\ud800" <= character <= "\udfff" for character in row[column]):
        raise ValueError(f"{place}: column {column!r} holds half of a character (a surrogate)")
    return row[column]


def _parquet_documents(path: Path, column: str) -> list[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("reading .parquet needs pyarrow: pip install 'crosslayer[train]'") from error
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        rows = file.read([column])[column].to_pylist() if column in names else []
    except Exception as error:  # pyarrow raises many kinds, also for a page that is damaged
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path.name!r} is not a parquet file, or is damaged: {reason}") from error
    if column not in names:
        raise ValueError(f"{path.name!r} has no column {column!r}; it has {', '.join(names)}")
    texts = [text for text in rows if text is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path.name!r}: column {column!r} holds {file.schema_arrow.field(column).type}, not text")
    say_skipped(path.name, len(rows) - len(texts))
    return texts


def _decode(path: Path) -> str:
    content = path.read_bytes()
    if not content.strip():
        raise ValueError(f"text file {path.name!r} is empty")
    try:
        if b"\0" in content:
            raise UnicodeError
        return content.decode("utf-8")
    except UnicodeError:
        raise ValueError(f"{path.name!r} is not UTF-8 text (it looks binary)") from None


READERS: dict[str, Callable[[Path, str], list[str]]] = {
    ".txt": _txt_documents,
    ".jsonl": _jsonl_documents,
    ".parquet": _parquet_documents,
}
