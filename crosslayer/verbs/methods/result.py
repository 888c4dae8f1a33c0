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
        """Return the table of all methods, a line each on a terminal of usual width."""
        if self.description is not None:
            return []
        rows = [[row["method"], row["cache"], row["flows"]] for row in self.rows]
        return [("", ["method", "KV cache", "what flows between layers"], rows)]

    def sentences(self) -> list[str]:
        """Return the description of a single method, or how to get one."""
        more = f"KV cache: what an example of {self.layers} layers keeps. `crosslayer methods NAME` describes a method."
        return [self.description or more]

    def headline(self) -> dict[str, Any]:
        """Return the share of the cache that each method keeps."""
        if self.description is not None:
            return dict(self.rows[0])
        return {row["method"]: row["cache"] for row in self.rows}
