"""A store of prompts: each file is a block of a coded cache, named by its parent and its tokens, so that prompts share.

A file is `<2 hex digits>/<parent>-<name>.kv`, 32 hex digits each, in the folder that an fsspec URL names. To find a
prefix, the store tries the block that the next tokens name, then any block that follows the last one, because its
tokens may begin alike. Several processes and machines may use a store at once: a file is written completely or not at
all, and a file that another process removes in the meantime is a miss.

Anyone who can read a store can read its prompts: on a local disk its files have mode 0600, its folders 0700.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from crosslayer.codec import format
from crosslayer.codec.chain import BLOCK
from crosslayer.codec.codec import Codec, dtype_of, texts_of
from crosslayer.codec.states import check_cache
from crosslayer.extras import check_extra
from crosslayer.wiring.engines import parse_bytes

DIGITS = 32  # hex digits of a name in a file's name
SUFFIX = ".kv"
TRIED = 16  # blocks behind one parent whose tokens are compared
ABANDONED = 3600  # seconds after which a file that was never finished is removed
LISTED = 0.02  # share of the limit that is written before the store is listed again
MISSES = (OSError, ValueError)  # of a block that cannot be read


@dataclass(frozen=True)
class Entry:
    """A file of a store."""

    path: str
    size: int
    used: float  # seconds since 1970


class Files:
    """The files of a store, on any file system that fsspec knows."""

    def __init__(self, url: str | Path):
        check_extra("store", "a prompt store", "fsspec", "pcodec")
        import fsspec  # type: ignore[import-not-found]

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

    def children(self, parent: bytes) -> list[str]:
        """Return the paths of the blocks after a parent, the latest first."""
        digits = parent.hex()[:DIGITS]
        found = self._listed(f"{self.folder}/{digits[:2]}", f"{digits}-")
        return [entry.path for entry in sorted(found, key=lambda entry: -entry.used)]

    def entries(self) -> list[Entry]:
        """Return all blocks."""
        folders: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            folders = self.system.ls(self.folder, detail=False, refresh=True)
        return [entry for folder in folders if len(Path(folder).name) == 2 for entry in self._listed(folder)]

    def _listed(self, folder: str, begin: str = "") -> list[Entry]:
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for fact in self.system.ls(folder, detail=True, refresh=True):
                name = fact["name"].rpartition("/")[2]
                if name.startswith(begin) and name.endswith(SUFFIX) and fact["type"] == "file":
                    changed = fact.get("mtime", fact.get("LastModified", fact.get("created", 0)))
                    used = changed.timestamp() if hasattr(changed, "timestamp") else float(changed or 0)
                    found.append(Entry(fact["name"], int(fact["size"]), used))
        return found

    def read(self, path: str, stop: int | None = None) -> bytes:
        """Return the bytes of a file, or its first ones; a missing file is a FileNotFoundError."""
        return self.system.cat_file(path, start=0 if stop else None, end=stop)

    def write(self, path: str, data: bytes) -> None:
        """Write a file completely or not at all."""
        if not self.is_local:
            self.system.pipe_file(path, data)
            return
        target = Path(path)
        for folder in (Path(self.folder), target.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def touch(self, path: str) -> None:
        """Record that a file was used, where the file system can: on a local disk."""
        if self.is_local:
            with contextlib.suppress(OSError):
                os.utime(path)

    def remove(self, path: str) -> None:
        """Remove a file, unless another process did, or the store is read-only."""
        with contextlib.suppress(OSError):
            self.system.rm_file(path)


class PromptStore:
    """Stored prompts of one model: `load` returns a cache to continue from, `save` stores one.

    Args:
        url: a folder, or any fsspec URL, such as memory://prompts or s3://bucket/prompts.
        codec: from `load_codec`.
        limit: bytes, or text such as "20GiB"; beyond it, the least recently used blocks are removed. None: no limit.
        block: tokens per block, at most 4096.

    Raises:
        ValueError: the limit cannot be read, or fsspec cannot open this kind of URL here.
    """

    def __init__(self, url: str | Path, codec: Codec, limit: str | int | None = None, block: int = BLOCK):
        if not 16 <= block <= format.LONGEST:
            raise ValueError(f"block must be from 16 to {format.LONGEST} tokens, got {block}")
        self.files, self.codec, self.block = Files(url), codec, block
        self.limit = None if limit is None else parse_bytes(limit, "the limit")
        self._size: int | None = None  # of the store, when it was listed, and what was written since
        self._written = 0

    def load(self, ids: Tensor, model: PreTrainedModel, mask: Tensor | None = None) -> tuple[Cache, int]:
        """Return the cache of the longest stored prefix and its length; an empty cache and 0 if nothing is stored.

        At least one token is left to the model, which continues with all ids: `model.generate(ids,
        past_key_values=cache)`. In a batch, all rows have the columns of the shortest. A damaged block is a miss.

        Args:
            ids: (B, S) or (S,).
            model: the codec's model; the cache has its device and dtype.
            mask: 0 for padding columns, on the left, (B, S).

        Raises:
            ValueError: the codec was fitted to another model.
        """
        self.codec.check(model)
        blocks, pads, stops = [], [], []
        for pad, tokens in texts_of(ids, mask)[0]:
            own, stop = self._read(tokens[:-1])
            blocks.append(own)
            pads.append(pad)
            stops.append(pad + stop)
        columns = self._usable(blocks, pads, min(stops)) if min(stops) > max(pads) else 0
        if not columns:
            return DynamicCache(config=model.config), 0
        try:
            cache = self.codec.decode_rows(blocks, pads, columns, model.device, model.dtype)
        except ValueError:  # written by another program: its SHA-256 is right, its codes are not
            return DynamicCache(config=model.config), 0
        for own in blocks:
            for block in reversed(own):  # parents last: they are removed last
                self.files.touch(self.files.path(block.parent, block.name))
        return cache, columns

    def save(self, ids: Tensor, cache: Cache, mask: Tensor | None = None) -> int:
        """Store the cache of tokens; return how many tokens were coded, 0 if all are stored already.

        Stored blocks are not coded again: only the blocks after the longest stored prefix of whole blocks.

        Args:
            ids: (B, S) or (S,): the prompt, or the prompt and its continuation.
            cache: of these tokens; it may hold more tokens after them.
            mask: 0 for padding columns, on the left, (B, S).

        Raises:
            ValueError: the cache is shorter than `ids` or of another model, or the store cannot be written.
        """
        rows, columns = texts_of(ids, mask)
        if cache.get_seq_length() == columns - 1:  # the last token that was generated was never read
            columns -= 1
        check_cache(cache, self.codec.shapes, len(rows), columns)
        coded = 0
        for row, (pad, tokens) in enumerate(rows):
            states = self.codec.read(cache, row, pad, columns - pad)
            coded += self.save_states(tokens[: columns - pad], states, dtype_of(cache))
        return coded

    def save_states(self, tokens: np.ndarray, states: Sequence[Tensor], dtype: int) -> int:
        """Store one text, from each layer's states of the latest tokens; return how many tokens were coded.

        Args:
            tokens: (T,) uint32.
            states: of each layer keys before rotation, then values, (T, W), float32.
            dtype: of the cache, an index of `format.DTYPES`.

        Raises:
            ValueError: the store cannot be written.
        """
        first, coded = np.array([len(tokens) - len(own) for own in states]), 0
        parent, start = format.root(self.codec.id), 0
        for block, common in self._walk(tokens):
            known = np.minimum(np.maximum(first - block.start, 0), len(block.tokens))
            rest = len(tokens) - block.start
            if common < min(len(block.tokens), rest) or (known < block.first).any():
                break  # only its beginning is the same, or a window holds more now
            parent, start = block.name, min(block.stop, len(tokens))
        for block in self.codec.encode_blocks(states, tokens, start, parent, self.block, dtype):
            self._write(block)
            coded += len(block.tokens)
        self._evict()
        return coded

    def match(self, tokens: np.ndarray) -> int:
        """Return how many of a text's first tokens (T,) are stored, in all layers; reads headers alone."""
        stop = 0
        for header, common in self._walk(tokens):
            if header.first.any():  # a sliding window did not hold them any more
                break
            stop += common
        return stop

    def read(self, tokens: np.ndarray, start: int = 0) -> list[format.Block]:
        """Return the blocks that hold a text's tokens from position `start` to the end.

        Raises:
            ValueError: some are damaged, or not stored any more.
        """
        blocks, stop = self._read(tokens)
        if stop < len(tokens) or any(block.first.any() for block in blocks):
            raise ValueError(f"only {stop} of {len(tokens)} tokens could be read")
        for block in reversed(blocks):  # parents last
            self.files.touch(self.files.path(block.parent, block.name))
        return [block for block in blocks if block.stop > start]

    def _walk(self, tokens: np.ndarray, whole: bool = False) -> Iterator[tuple[format.Block, int]]:
        """Yield the blocks that hold a text's tokens one after the other, and how many of their tokens are the text's.

        These are fewer than all in the last one only. Without `whole` only headers are read; with it, a damaged block
        ends the text, and is removed, so that `save` writes it again.
        """
        parent, start = format.root(self.codec.id), 0
        head = None if whole else format.HEAD.size + 4 * format.LONGEST + 2 * len(self.codec.widths)
        while start < len(tokens):
            rest = tokens[start:]
            path = self.files.path(parent, format.child(parent, rest[: self.block]))
            found = self._found([path], rest, head) or self._found(self.files.children(parent)[:TRIED], rest, head)
            if found is None or found[0].parent != parent or found[0].start != start:
                return
            block, common, data = found
            if whole:
                try:
                    block = format.unpack(data, self.codec.widths, len(self.codec.chain.coder.runs))
                except ValueError:
                    self.files.remove(self.files.path(block.parent, block.name))
                    return
            yield block, common
            if common < len(block.tokens):
                return
            parent, start = block.name, block.stop

    def _found(
        self, paths: Sequence[str], rest: np.ndarray, head: int | None
    ) -> tuple[format.Block, int, bytes] | None:
        """Return the block among these that has most tokens in common with the rest of a text; None without any."""
        best = None
        for path in paths:
            with contextlib.suppress(*MISSES):
                data = self.files.read(path, head)
                block = format.read_header(data, len(self.codec.widths))
                common = same(block.tokens, rest)
                if common > (best[1] if best else 0):
                    best = block, common, data
        return best

    def _read(self, tokens: np.ndarray) -> tuple[list[format.Block], int]:
        """Return the blocks of the longest stored prefix, and how many tokens of the text they hold."""
        found = list(self._walk(tokens, whole=True))
        return [block for block, _ in found], sum(common for _, common in found)

    def _usable(self, rows: Sequence[Sequence[format.Block]], pads: Sequence[int], columns: int) -> int:
        """Return the most columns up to `columns` at which all rows store the windows of all layers, or 0."""
        good = np.arange(columns + 1) > max(pads)
        for blocks, pad in zip(rows, pads, strict=True):
            positions = np.arange(1, columns - pad + 1)
            for layer, shape in enumerate(self.codec.shapes):
                held = [np.arange(len(block.tokens)) >= block.first[layer] for block in blocks]
                held = np.concatenate([*held, np.zeros(0, bool)])[: len(positions)]
                last_missing = np.maximum.accumulate(np.where(held, 0, positions))
                needed = positions if shape.window is None else np.minimum(positions, shape.window - 1)
                good[pad + 1 :] &= positions - last_missing >= needed
        return int(good.nonzero()[0].max(initial=0))

    def _write(self, block: format.Block) -> None:
        data = block.pack()
        try:
            self.files.write(self.files.path(block.parent, block.name), data)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"the store {self.files.url!r} cannot be written: {reason}; nothing is lost") from error
        self._written += len(data)

    def _evict(self) -> None:
        """Remove the blocks used least recently, if the store has more bytes than the limit."""
        if self.limit is None:
            return
        if self._size is not None and self._written < LISTED * self.limit and self._size + self._written <= self.limit:
            return
        self._size, self._written = prune(self.files, self.limit), 0


def prune(files: Files, limit: int) -> int:
    """Remove the blocks used least recently, until at most `limit` bytes are left; return the bytes that are left."""
    if files.is_local:
        for path in Path(files.folder).glob("??/.*"):  # of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()
    entries = sorted(files.entries(), key=lambda entry: -entry.used)
    total = sum(entry.size for entry in entries)
    while entries and total > limit:
        entry = entries.pop()
        files.remove(entry.path)
        total -= entry.size
    return total


def same(tokens: np.ndarray, others: np.ndarray) -> int:
    """Return how many tokens two texts have in common from the beginning."""
    count = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:count] != others[:count])
    return int(differ[0]) if len(differ) else count
