"""What the command line prints of a verb's result."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

Table = tuple[str, list[str], list[list[Any]]]  # title, head, rows of cells


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
        """Return the command that most readers type next; None if there is none."""
        return None

    @abstractmethod
    def headline(self) -> dict[str, Any]:
        """Return the few key figures of the last line, as JSON data."""
