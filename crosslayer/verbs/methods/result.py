"""The list of methods as the command line prints it."""

from dataclasses import dataclass
from typing import Any

from crosslayer.output.formatting import Shown, Table


@dataclass(frozen=True)
class Catalogue(Shown):
    """A row of texts by column for each method, at a number of layers; for a single method its description too."""

    rows: list[dict[str, str]]
    layers: int
    description: str | None = None

    def tables(self) -> list[Table]:
        """Return the table of all methods, narrow enough for a line each in a terminal."""
        if self.description is not None:
            return []
        rows = [[row["method"], row["cache"], row["flows"]] for row in self.rows]
        return [("", ["method", "KV cache", "what flows between layers"], rows)]

    def sentences(self) -> list[str]:
        """Return the description of a single method, or how to get one."""
        hint = f"KV cache: share kept with {self.layers} layers. `crosslayer methods NAME` describes a method."
        return [self.description or hint]

    def headline(self) -> dict[str, Any]:
        """Return the share of the KV cache that each method keeps."""
        if self.description is not None:
            return dict(self.rows[0])
        return {row["method"]: row["cache"] for row in self.rows}
