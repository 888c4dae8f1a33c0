"""Lists, checks and prunes a store of prompts."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from crosslayer.codec.files import Files, prune
from crosslayer.codec.format import OtherFormat, check_hash, read_header
from crosslayer.output.formatting import Shown, readable_bytes
from crosslayer.output.progress import progress
from crosslayer.wiring.engines import parse_bytes


@dataclass(frozen=True)
class Stored(Shown):
    """What a store holds."""

    url: str
    blocks: int  # files
    beginnings: int  # blocks with which a prompt begins
    tokens: int  # in all blocks that can be read
    bytes: int  # of all blocks
    pruned: int  # bytes that were removed to keep the limit
    damaged: int  # blocks that are cut off or altered
    removed: bool  # whether these were removed
    unread: int  # blocks that are of another release, or that could not be read
    used: float | None  # seconds since 1970 when a block was used last

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


def store(url: str, *, verify: bool = True, limit: str | None = None, remove_damaged: bool = False) -> Stored:
    """List the blocks of a prompt store, check each one, and remove the least recently used ones.

    Args:
        url: a folder, or any fsspec URL.
        verify: read every block and check its SHA-256.
        limit: remove the least recently used blocks until the store has at most this size, such as 20GiB.
        remove_damaged: remove blocks that are truncated or altered.

    Raises:
        ValueError: the URL or the limit cannot be read, or there is no store.
    """
    files = Files(url)
    most = None if limit is None else parse_bytes(limit, "`limit`")
    if not files.system.exists(files.folder):
        raise ValueError(
            f"the store {url!r} does not exist; serve --prompt-store or PromptStore makes it when it saves a prompt"
        )
    before = sum(entry.size for entry in files.entries())
    left = before if most is None else prune(files, most)[0]
    entries = files.entries()
    damaged: list[str] = []
    prompts, tokens, unread = 0, 0, 0
    with progress("checking blocks", len(entries)) as bar:
        for done, entry in enumerate(entries, 1):
            try:
                # A header has four bytes for each token of its block, so the first part of a file holds it.
                data = files.read(entry.path, None if verify else 2**16)
                block = read_header(data)
                if verify:
                    check_hash(data)
            # A block that was removed meanwhile, cannot be reached, or is of another release is not damaged, and stays.
            except (OSError, OtherFormat):
                unread += 1
            except ValueError:
                damaged.append(entry.path)
                if remove_damaged:
                    files.remove(entry.path)
            else:
                prompts += block.start == 0
                tokens += len(block.tokens)
            bar.step(done, len(entries))
    last = max((entry.used for entry in entries), default=None)
    return Stored(
        str(url), len(entries), prompts, tokens, left, before - left, len(damaged), remove_damaged, unread, last
    )
