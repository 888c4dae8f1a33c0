"""The result of a push."""

from typing import Any

from crosslayer.output.record import Frozen
from crosslayer.output.shown import Shown


class Pushed(Shown, Frozen):
    """What was uploaded, or would be: the size of each file in bytes, and the card; `url` is None for a dry run."""

    repo: str
    url: str | None
    files: dict[str, int]
    card: str
    eval_results: str | None

    def sentences(self) -> list[str]:
        """Return the address of the upload, or the card for a dry run."""
        return [self.card if self.url is None else f"uploaded: {self.url}"]

    def headline(self) -> dict[str, Any]:
        """Return the few numbers that the command line prints last."""
        return {"repo": self.repo, "url": self.url, "files": len(self.files), "bytes": sum(self.files.values())}
