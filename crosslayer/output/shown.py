"""What a terminal shows of what a verb returns."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

Table = tuple[str, list[str], list[list[Any]]]  # title, head, rows of cells


class Shown:
    """Tables, then sentences, then a line of figures.

    Attributes:
        exit_status: of the command that returns it: 1 where checks failed.

    """

    exit_status: ClassVar[int] = 0

    def tables(self) -> Sequence[Table]:
        """Return the tables that come first."""
        return ()

    def sentences(self) -> list[str]:
        """Return what was found, in sentences."""
        return []

    @abstractmethod
    def headline(self) -> dict[str, Any]:
        """Return the few figures that the last line of the command line holds, as JSON."""
