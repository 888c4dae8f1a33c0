"""Formatting for sentences and tables (numbers, lists, ranges of layers), and what a result shows in a terminal."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

UNKNOWN = "–"  # a cell without a value
Table = tuple[str, list[str], list[list[Any]]]  # title, head, rows of cells


def signed(number: float) -> str:
    """Return a number with its sign and a true minus: −0.0312, +0.0005."""
    return f"{number:+.4f}".replace("-", "−")


def percent(share: float, digits: int = 0) -> str:
    """Return a share as a percentage with a true minus: 45%, −3.1%."""
    return f"{share:.{digits}%}".replace("-", "−")


def folder_name(name: str) -> str:
    """Return how a result calls a model: a hub name as it is, of a path the last part alone, of a run its folder."""
    # the folders above a model's would tell where its user keeps things
    path = Path(name).expanduser()
    if not name or not (path.is_absolute() or path.exists()):
        return name
    path = path.resolve()
    # `crosslayer train --out runs/first` writes runs/first/model
    is_of_run = path.name == "model" and (path.parent / "record.json").is_file()
    return path.parent.name if is_of_run else path.name


def readable_bytes(count: float) -> str:
    """Return a number of bytes with three digits in the largest fitting unit: 512 bytes, 96.0 MiB, 1.50 GiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            digits = 2 if count < 10 * size else 1 if count < 100 * size else 0
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:,.0f} bytes"


def readable_seconds(seconds: float) -> str:
    """Return seconds with three digits, below 1 s as milliseconds: 1.18 s, 52.3 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def listed(items: Sequence[str]) -> str:
    """Return items as a sentence lists them: a; a and b; a, b and c."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in increasing order, neighbors as a range: 7, 0, 1, 2 → "0-2, 7"."""
    ends: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1] = (ends[-1][0], number)
        else:
            ends.append((number, number))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)


def named_layers(layers: Iterable[int]) -> str:
    """Return layers as a sentence names them: 7 → "layer 7"; 0, 1, 2, 7 → "layers 0-2 and 7"."""
    text = ranges(layers)
    return f"layer{'' if text.isdigit() else 's'} {listed(text.split(', '))}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 seed, 2 seeds."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, spelled out up to ten: no layers, one layer, nine layers, 11 layers."""
    digits = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return f"{digits[count] if count < len(digits) else count} {noun}{'' if count == 1 else 's'}"


class Shown:
    """Printed are tables, sentences, the next command, and a line of JSON.

    Attributes:
        exit_status: of the command: 1 if checks failed.
    """

    exit_status: ClassVar[int] = 0

    def tables(self) -> Sequence[Table]:
        """Return the tables."""
        return ()

    def sentences(self) -> list[str]:
        """Return the findings in sentences."""
        return []

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the next command to suggest, or None."""
        return None

    @abstractmethod
    def headline(self) -> dict[str, Any]:
        """Return the few key figures of the last line, as JSON data."""
