"""What the command line prints of a verb's result."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

Table = tuple[str, list[str], list[list[Any]]]  # title, head, rows of cells


class Shown:
    """Printed are tables, then sentences, then a line of JSON.

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

    @abstractmethod
    def headline(self) -> dict[str, Any]:
        """Return the few key figures of the last line, as JSON data."""
