"""The cross-layer methods as a terminal shows them."""

from dataclasses import dataclass
from typing import Any

from crosslayer.output.shown import Shown, Table


@dataclass(frozen=True)
class Catalogue(Shown):
    """A row for each method, as texts by column, at a number of layers; of a single method its description too."""

    rows: list[dict[str, str]]
    layers: int
    description: str | None = None

    def tables(self) -> list[Table]:
        """Return the table of all methods."""
        if self.description is not None:
            return []
        head = [f"KV cache, {self.layers} layers" if key == "cache" else key for key in self.rows[0]]
        return [("", head, [[*row.values()] for row in self.rows])]

    def sentences(self) -> list[str]:
        """Return the description of a single method."""
        return [] if self.description is None else [self.description]

    def headline(self) -> dict[str, Any]:
        """Return the share of the cache that each method keeps."""
        if self.description is not None:
            return dict(self.rows[0])
        return {row["method"]: row["cache"] for row in self.rows}
