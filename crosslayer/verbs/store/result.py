"""What a store of prompts holds."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from crosslayer.output.formatting import Shown, readable_bytes


@dataclass(frozen=True)
class Stored(Shown):
    """What a store holds.

    Attributes:
        url: of the store.
        blocks: files.
        beginnings: blocks with which a prompt begins.
        tokens: in all blocks that can be read.
        bytes: of all blocks.
        pruned: bytes that were removed to keep the limit.
        damaged: blocks that are cut off or altered.
        removed: whether these were removed.
        unread: blocks that are of another release, or that could not be read.
        used: seconds since 1970 when a block was used last.
    """

    url: str
    blocks: int
    beginnings: int
    tokens: int
    bytes: int
    pruned: int
    damaged: int
    removed: bool
    unread: int
    used: float | None

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        """1 if damaged blocks are left."""
        return int(self.damaged > 0 and not self.removed)

    def sentences(self) -> list[str]:
        """Return what is stored, what was removed, and what is damaged."""
        lines = [
            f"{self.blocks:,} blocks with {self.tokens:,} tokens in {readable_bytes(self.bytes)}; "
            f"{self.beginnings:,} of them begin a prompt."
        ]
        if self.used is not None:
            lines.append(f"Last used: {datetime.fromtimestamp(self.used, UTC):%Y-%m-%d %H:%M} UTC.")
        if self.pruned:
            lines.append(f"{readable_bytes(self.pruned)} of least recently used blocks were removed.")
        if self.damaged:
            what = "were removed" if self.removed else "are misses; --remove-damaged removes them"
            lines.append(f"{self.damaged:,} blocks are truncated or altered: they {what}.")
        if self.unread:
            lines.append(f"{self.unread:,} blocks come from another release, or could not be read; they are kept.")
        return lines

    def headline(self) -> dict[str, Any]:
        """Return all figures."""
        return {name: value for name, value in vars(self).items() if name != "used"}
