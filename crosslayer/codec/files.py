"""The files of a prompt store, on any file system that fsspec knows: `<2 hex digits>/<parent>-<name>.kv`.

Clients of object stores raise errors of their own. They leave this module as OSErrors, so that a store that is out of
reach is a miss and never ends a request.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosslayer.extras import check_extra

# Hex digits of a name in a file's name. Half of the SHA-256 is enough to find a block; its header has the whole.
DIGITS = 32
SUFFIX = ".kv"
# Seconds after which a file that was never finished is removed: no living process takes so long for a block.
ABANDONED = 3600
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # what file systems call a file's time


@dataclass(frozen=True)
class BlockFile:
    """A file of a store, with the digits of its block's name and of its parent's."""

    path: str
    size: int
    used: float  # seconds since 1970
    parent: str
    name: str


class Files:
    """The files of a store.

    Raises:
        ValueError: fsspec cannot open this kind of URL here.
        OSError: by any method: the store is out of reach.
    """

    def __init__(self, url: str | Path):
        check_extra("store", "a prompt store", "fsspec", "pcodec")
        import fsspec

        self.url = str(url)
        try:
            self.system, folder = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"the store {self.url!r} cannot be opened: {error}") from error
        self.folder = folder.rstrip("/")
        self.is_local = "file" in np.atleast_1d(self.system.protocol)

    def path(self, parent: bytes, name: bytes) -> str:
        """Return the path of a block."""
        parent_digits, digits = parent.hex()[:DIGITS], name.hex()[:DIGITS]
        return f"{self.folder}/{parent_digits[:2]}/{parent_digits}-{digits}{SUFFIX}"

    def entries(self, parent: bytes | None = None) -> list[BlockFile]:
        """Return all blocks, or those after a parent."""
        begin = "" if parent is None else f"{parent.hex()[:DIGITS]}-"
        folders = [f"{self.folder}/{begin[:2]}"]
        if parent is None:
            folders = []
            with _os_errors(), contextlib.suppress(FileNotFoundError):
                # refresh: fsspec keeps listings, which do not know what other processes wrote
                listed = self.system.ls(self.folder, detail=False, refresh=True)
                folders = [path for path in listed if path[-3:-2] == "/"]  # a name of two digits
        blocks = []
        for folder in folders:
            for path, size, used in self._listed(folder):
                file_name = path.rpartition("/")[2]
                if file_name.startswith(begin) and file_name.endswith(SUFFIX):
                    names = path[-2 * DIGITS - len(SUFFIX) - 1 : -len(SUFFIX)]
                    blocks.append(BlockFile(path, size, used, names[:DIGITS], names[-DIGITS:]))
        return blocks

    def _listed(self, folder: str) -> list[tuple[str, int, float]]:
        """Return path, size and time of a folder's files; none if there is no such folder."""
        facts = []
        with _os_errors(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if self.is_local:  # fsspec's listing takes ten times as long
                for file in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):  # another process removed it
                        status = file.stat()
                        facts.append((file.path, status.st_size, status.st_mtime))
            else:
                for fact in self.system.ls(folder, detail=True, refresh=True):
                    if fact["type"] == "file":
                        changed: Any = next((fact[key] for key in TIMES if fact.get(key)), 0)
                        seconds = changed.timestamp() if hasattr(changed, "timestamp") else float(changed)
                        facts.append((fact["name"], int(fact["size"]), seconds))
        return facts

    def read(self, path: str, stop: int | None = None) -> bytes:
        """Return the bytes of a file, or its first ones; a missing file is a FileNotFoundError."""
        with _os_errors():
            return self.system.cat_file(path, start=0 if stop else None, end=stop)

    def write(self, path: str, data: bytes) -> None:
        """Write a file completely or not at all."""
        if not self.is_local:  # an object is there when it is complete
            with _os_errors():
                self.system.pipe_file(path, data)
            return
        target = Path(path)
        for folder in (Path(self.folder), target.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # under another name until it is complete, and never readable by others
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def remove(self, path: str) -> None:
        """Remove a file, unless another process did, or the store is read-only."""
        with contextlib.suppress(OSError), _os_errors():
            self.system.rm_file(path)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise what a file system's client raises inside the block as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def prune(files: Files, limit: int) -> tuple[int, list[BlockFile]]:
    """Remove the blocks used least recently, until at most `limit` bytes are left.

    A block goes only after all blocks behind it, because without it nobody can reach these: it counts as used when any
    of them was. Returns the bytes that are left, and the blocks that were removed.
    """
    if files.is_local:
        for path in Path(files.folder).glob("??/.*"):  # of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()
    entries = files.entries()
    total = sum(entry.size for entry in entries)
    if total <= limit:
        return total, []

    # how deep each block is: the blocks before it
    parents = {entry.name: entry.parent for entry in entries}
    depth: dict[str, int] = {}
    for name in parents:
        line = [name]  # the block, and those before it whose depth is not known
        # the length ends a circle of parents, which only damaged names can have
        while line[-1] not in depth and parents[line[-1]] in parents and len(line) <= len(parents):
            line.append(parents[line[-1]])
        for ancestor in reversed(line):
            depth.setdefault(ancestor, depth.get(parents[ancestor], 0) + 1)

    # when each was used: the deepest first, so that a use reaches all blocks before it
    used = {entry.name: entry.used for entry in entries}
    for name in sorted(parents, key=lambda name: -depth[name]):
        if parents[name] in used:
            used[parents[name]] = max(used[parents[name]], used[name])

    removed = []
    for entry in sorted(entries, key=lambda entry: (used[entry.name], -depth[entry.name])):
        files.remove(entry.path)
        removed.append(entry)
        total -= entry.size
        if total <= limit:
            break
    return total, removed
