"""Cells of rows of tables, which are untrusted."""

from collections.abc import Mapping
from typing import Any


def row_text(row: Any, location: str, column: str) -> str | None:
    """Return the text in a column of a row, None where it is null."""
    if not isinstance(row, dict) or column not in row:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{location}: no text in column {column!r}; it has {keys}")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{location}: no text in column {column!r}; it holds a value of type {type(text).__name__}")
    if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{location}: column {column!r} holds half of a character (a surrogate)")
    return text


def is_chosen(row: Any, location: str, where: Mapping[str, Any]) -> bool:
    """Return whether a row has all values of `where`, by column; a dot leads into a column that holds an object."""
    for column, wanted in where.items():
        value = row
        for name in column.split("."):
            if not isinstance(value, dict) or name not in value:
                keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise ValueError(f"{location}: no column {column!r} for `where`; at {name!r} it has {keys}")
            value = value[name]
        if value != wanted:
            return False
    return True
