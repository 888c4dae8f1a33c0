"""What crosslayer runs with, as a terminal shows it."""

from dataclasses import dataclass
from typing import Any

from crosslayer.output.formatting import Shown


@dataclass(frozen=True)
class Info(Shown):
    """Versions, optional packages, devices, embedded models and cache folders, each as a text by name."""

    rows: dict[str, str]

    def sentences(self) -> list[str]:
        """Return a line for each entry."""
        width = max(map(len, self.rows)) + 2
        return [f"{name:<{width}}{text}" for name, text in self.rows.items()]

    def headline(self) -> dict[str, Any]:
        """Return every entry."""
        return dict(self.rows)
