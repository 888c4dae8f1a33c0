"""An index of the blocks of a prompt store, in the order of their tokens.

Of all token sequences in order, the one that begins most like a text stands just before that text or just behind it.
SQLite keeps the order, so that two look-ups find it among any number of blocks with one parent. On a local disk all
processes share one index; elsewhere each process fills its own from the names of files. Only the files count: a row
without a file is dropped when it is met, and a store without an index, or with a damaged one, fills it again.
"""

import contextlib
import os
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from crosslayer.codec.files import DIGITS, Files
from crosslayer.codec.format import HEAD, LONGEST, Block, read_header

FILE = "index.sqlite3"
WAIT = 5.0  # seconds for another process that writes
TABLE = "CREATE TABLE IF NOT EXISTS blocks (name BLOB PRIMARY KEY, parent BLOB, tokens BLOB)"
BESIDE = (  # the last row up to a text, and the first one behind it
    "SELECT tokens FROM blocks WHERE parent = ? AND tokens <= ? ORDER BY tokens DESC LIMIT 1",
    "SELECT tokens FROM blocks WHERE parent = ? AND tokens > ? ORDER BY tokens LIMIT 1",
)


class Index:
    """The blocks of a store by parent and tokens.

    Args:
        files: of the store.
        layers: of its codec.
    """

    def __init__(self, files: Files, layers: int):
        self._files, self._head = files, HEAD.size + 4 * LONGEST + 2 * layers
        self._own: Path | None = None  # folder of an index for this process alone
        self._listed: set[str] = set()  # names of the blocks in it, as digits
        if not files.is_local:
            self._separate()

    def _separate(self) -> None:
        """Use an index of this object alone from now on."""
        self._own = Path(tempfile.mkdtemp(prefix="crosslayer-"))
        weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)

    def beside(self, parent: bytes, tokens: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of the blocks behind a parent just before and just after a text's (T,); fewer at an end."""
        # SQLite orders bytes by the first that differs: of a token the highest, so big-endian
        key = parent, tokens[:LONGEST].astype(">u4").tobytes()
        for _ in range(2):  # again with an index of its own, where the store's cannot be written
            if self._own is not None:
                # add the blocks behind the parent that this process has not met
                with contextlib.suppress(OSError):
                    new = [entry for entry in self._files.entries(parent) if entry.name not in self._listed]
                    self._listed.update(entry.name for entry in new)
                    self.add(self._read(entry.path for entry in new))
            with contextlib.suppress(sqlite3.Error), self._open() as connection:
                rows = [connection.execute(query, key).fetchone() for query in BESIDE]
                return [np.frombuffer(row[0], ">u4").astype(np.uint32) for row in rows if row]
        return []

    def add(self, blocks: Iterable[Block]) -> None:
        """Note blocks that are stored."""
        with contextlib.suppress(sqlite3.Error), self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            _insert(connection, blocks)

    def remove(self, names: Iterable[str]) -> None:
        """Forget blocks, by the digits of their names."""
        names = list(names)
        self._listed -= set(names)
        with contextlib.suppress(sqlite3.Error), self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("DELETE FROM blocks WHERE name = ?", [(bytes.fromhex(name),) for name in names])

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the index for one look-up or change, so that it goes with any thread, fork and killed process."""
        folder = self._own or Path(self._files.folder)
        if not folder.is_dir():
            raise sqlite3.OperationalError("the store is empty")
        path = folder / FILE
        try:
            # SQLite itself would let others read the tokens
            os.close(os.open(path, os.O_RDONLY | (0 if path.exists() else os.O_CREAT), 0o600))
            with contextlib.closing(sqlite3.connect(path, WAIT, isolation_level=None)) as connection, connection:
                connection.execute("PRAGMA synchronous = OFF")  # what a crash of the system damages is filled again
                if connection.execute("PRAGMA user_version").fetchone() == (0,):  # a new file
                    # immediate: of processes that begin at once, one fills the table, and the others wait for it
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute(TABLE)
                    connection.execute("CREATE INDEX IF NOT EXISTS in_order ON blocks (parent, tokens)")
                    if self._own is None:  # an index of this process alone is filled parent by parent
                        _insert(connection, self._read(entry.path for entry in self._files.entries()))
                    connection.execute("PRAGMA user_version = 1")
                    connection.commit()
                yield connection
        except (OSError, sqlite3.OperationalError) as error:  # a full disk, or a store for reading alone
            if self._own is None and not os.access(path, os.W_OK):
                self._separate()
            raise sqlite3.OperationalError(str(error)) from error
        except sqlite3.DatabaseError:  # damaged: only the files count, so the next look-up fills a new one
            path.unlink(missing_ok=True)
            raise

    def _read(self, paths: Iterable[str]) -> Iterator[Block]:
        for path in paths:
            with contextlib.suppress(OSError, ValueError):
                yield read_header(self._files.read(path, self._head))


def _insert(connection: sqlite3.Connection, blocks: Iterable[Block]) -> None:
    rows = ((block.name[: DIGITS // 2], block.parent, block.tokens.astype(">u4").tobytes()) for block in blocks)
    connection.executemany("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?)", rows)
