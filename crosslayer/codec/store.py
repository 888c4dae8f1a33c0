"""A store of prompts: each file is a block of a coded cache, named by its parent and its tokens, so that prompts share.

To find a prefix, the store tries the block that the next tokens name, then the block behind the last one whose tokens
begin most like them (`index.py`). Several processes and machines may use a store at once: a file is written completely
or not at all, and a file that another process removes in the meantime is a miss. So is everything in a store that is
out of reach.

Anyone who can read a store can read its prompts: on a local disk its files have mode 0600, its folders 0700.
"""

import contextlib
import errno
import os
import time
import warnings
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from crosslayer.codec import format
from crosslayer.codec.chain import BLOCK
from crosslayer.codec.codec import Codec, dtype_of
from crosslayer.codec.files import DIGITS, BlockFile, Files, prune
from crosslayer.codec.index import Index
from crosslayer.codec.states import check_cache
from crosslayer.codec.texts import texts_of
from crosslayer.output.formatting import readable_bytes
from crosslayer.probe.model import unwrapped
from crosslayer.wiring.engines import parse_bytes

# Share of the limit that is written before the store is listed again: a list takes as long as the store is large. Until
# then each process may go as far beyond the limit, since it does not see what others write.
LISTED = 0.02
MISSES = (OSError, ValueError)  # of a block that cannot be read
FULL = (errno.ENOSPC, errno.EDQUOT)
TRIES = 3  # to write a block on a full disk, each after removing more


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
        self.files = Files(url)
        self.codec = codec
        self.block = block
        self.index = Index(self.files, len(codec.widths))
        self.limit = None if limit is None else parse_bytes(limit, "the limit")
        self._head = format.HEAD.size + 4 * format.LONGEST + 2 * len(codec.widths)  # bytes that hold any header
        self._size: int | None = None  # of the store, when it was listed, and what was written since
        self._written = 0

    def load(self, ids: Tensor, model: PreTrainedModel, mask: Tensor | None = None) -> tuple[Cache, int]:
        """Return the cache of the longest stored prefix and its length; an empty cache and 0 if nothing is stored.

        At least one token is left to the model, which continues with all ids: `model.generate(ids,
        past_key_values=cache)`. In a batch, all rows have the columns of the shortest; a forward pass that continues
        them needs `position_ids`, as below in `save`. A damaged block is a miss, and so is a store out of reach.

        Args:
            ids: (B, S) or (S,).
            model: the codec's model; the cache has its device and dtype.
            mask: 0 for padding columns, on the left, (B, S).

        Raises:
            ValueError: the codec was fitted to another model, or the weights changed since; a row begins with repeated
                ids, and no mask says whether they are padding.
        """
        model = unwrapped(model)
        self.codec.check(model)
        blocks, pads, stops = [], [], []
        for pad, tokens in texts_of(ids, mask, model)[0]:
            row_blocks, stop = self._read(tokens[:-1])
            blocks.append(row_blocks)
            pads.append(pad)
            stops.append(pad + stop)
        columns = self._usable(blocks, pads, min(stops)) if min(stops) > max(pads) else 0
        if not columns:
            return DynamicCache(config=model.config), 0
        try:
            cache = self.codec.decode_rows(blocks, pads, columns, model.device, model.dtype)
        except ValueError:  # written by another program: its SHA-256 is right, its codes are not
            return DynamicCache(config=model.config), 0
        for row_blocks in blocks:
            self._use(row_blocks)
        return cache, columns

    def save(
        self, ids: Tensor, cache: Cache, mask: Tensor | None = None, *, model: PreTrainedModel | None = None
    ) -> int:
        """Store the cache of tokens; return how many tokens were coded and stored, 0 if all are stored already.

        Stored blocks are not coded again: only the blocks after the longest stored prefix of whole blocks. A store that
        cannot be written, and a limit below the size of the text, are warnings.

        Whoever loads the text gets this cache. Checked are shapes, finite numbers, and whether a padded row's
        positions begin at 0 behind its padding (a model that gets no `position_ids` counts columns; `generate` passes
        them). Not checked: that the cache is of these tokens; without `model`, that the codec's weights computed it,
        without an adapter.

        Args:
            ids: (B, S) or (S,): the prompt, or the prompt and its continuation.
            cache: of these tokens; it may hold more tokens after them.
            mask: 0 for padding columns, on the left, (B, S).
            model: that computed the cache, to check its weights as `load` does.

        Raises:
            ValueError: the cache is shorter than `ids`, of another model, not finite, or of shifted positions; a row
                begins with repeated ids, and no mask says whether they are padding.
        """
        if model is not None:
            self.codec.check(model)  # which looks into wrappers
        rows, columns = texts_of(ids, mask, model)
        if cache.get_seq_length() == columns - 1:  # the last token that was generated was never read
            columns -= 1
        check_cache(cache, self.codec.shapes, len(rows), columns)
        coded = 0
        for row, (pad, tokens) in enumerate(rows):
            states = self.codec.read(cache, row, pad, columns - pad)
            coded += self.save_states(tokens[: columns - pad], states, dtype_of(cache))
        return coded

    def save_states(self, tokens: np.ndarray, states: Sequence[Tensor], dtype: int) -> int:
        """Store one text, from each layer's states of the latest tokens.

        Returns how many tokens were coded and are stored.

        Args:
            tokens: (T,) uint32.
            states: of each layer keys before rotation, then values, (T, W), float32.
            dtype: of the cache, an index of `format.DTYPES`.

        Raises:
            ValueError: a state is not finite.
        """
        # the blocks that are there
        first = np.array([len(tokens) - len(layer_states) for layer_states in states])
        parent, start = format.root(self.codec.id), 0
        stored = []
        for block, common in self._walk(tokens):
            known = np.minimum(np.maximum(first - block.start, 0), len(block.tokens))
            rest = len(tokens) - block.start
            if common < min(len(block.tokens), rest) or (known < block.first).any():
                break  # only its beginning is the same, or a window holds more now
            parent, start = block.name, min(block.stop, len(tokens))
            stored.append(block)
        self._use(stored)  # before others make room for the new ones

        # the blocks behind them
        begin = start
        for block in self.codec.encode_blocks(states, tokens, start, parent, self.block, dtype):
            if not self._write(block):
                break
            start = block.stop
            stored.append(replace(block, exact=b"", parts=()))  # its bytes are not needed any more
        self.index.add(stored)
        self._use(stored)

        # beyond the limit, the blocks used least recently go, which may be these
        removed = set[str]()
        if self.limit is not None:
            size = self._size
            if size is None or self._written >= LISTED * self.limit or size + self._written > self.limit:
                removed = {entry.path for entry in self._prune(self.limit)}
        if lost := [block.start for block in stored if self._path(block) in removed]:
            text = f"the limit of {readable_bytes(self.limit or 0)} is below the size of a text of {len(tokens)} tokens"
            warnings.warn(f"{text}; its first {min(lost)} are stored", stacklevel=2)
            start = min(lost)
        return max(0, start - begin)

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
        self._use(blocks)
        return [block for block in blocks if block.stop > start]

    def _walk(self, tokens: np.ndarray, damaged: Container[str] = ()) -> Iterator[tuple[format.Block, int]]:
        """Yield the headers of the blocks that hold a text's tokens, and how many of their tokens are the text's.

        These are fewer than all in the last one only. Files in `damaged` are passed over.
        """
        parent, start = format.root(self.codec.id), 0
        while start < len(tokens):
            found = self._found(parent, start, tokens[start:], damaged)
            if found is None:
                return
            block, common = found
            yield block, common
            if common < len(block.tokens):
                return
            parent, start = block.name, block.stop

    def _found(
        self, parent: bytes, start: int, rest: np.ndarray, damaged: Container[str]
    ) -> tuple[format.Block, int] | None:
        """Return the block behind a parent with most tokens in common with the rest of a text (T,), and how many.

        None if there is no block with any.
        """
        whole = rest[: self.block]
        if block := self._block(parent, start, whole, damaged):
            return block, len(whole)
        # else the one whose tokens begin most like these, just before or behind them in order
        missed = set[str]()
        while True:
            best, gone = None, []
            for neighbor in self.index.beside(parent, rest):
                length = min(len(neighbor), len(rest))
                differing = np.flatnonzero(neighbor[:length] != rest[:length])
                common = int(differing[0]) if len(differing) else length
                if not common or (best and common <= best[1]):
                    continue
                if block := self._block(parent, start, neighbor, damaged):
                    best = block, common
                else:
                    gone.append(format.child(parent, neighbor).hex()[:DIGITS])
            if missed.issuperset(gone):  # none is gone, or the index cannot forget them
                break
            missed.update(gone)
            self.index.remove(gone)  # of files that another process removed, or that are damaged
        # a block that ends there has the windows of its end, which a longer one has not
        if best and (block := self._block(parent, start, rest[: best[1]], damaged)):
            return block, best[1]
        return best

    def _block(self, parent: bytes, start: int, tokens: np.ndarray, damaged: Container[str]) -> format.Block | None:
        """Return the header of the block of these tokens; None if it is not stored."""
        path = self.files.path(parent, format.child(parent, tokens))
        if path in damaged:
            return None
        try:
            block = format.read_header(self.files.read(path, self._head), len(self.codec.widths))
        except MISSES:
            return None
        is_own = block.parent == parent and block.start == start and np.array_equal(block.tokens, tokens)
        return block if is_own else None

    def _read(self, tokens: np.ndarray) -> tuple[list[format.Block], int]:
        """Return the blocks of the longest stored prefix, and how many tokens of the text they hold.

        Headers decide which blocks these are, one after the other; then the files are read and hashed in threads. A
        damaged block is removed, so that `save` writes it again, and the next best ones are taken.
        """
        damaged = set[str]()
        while True:
            headers = list(self._walk(tokens, damaged))
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                blocks = list(pool.map(self._whole, [header for header, _ in headers]))
            pairs = zip(headers, blocks, strict=True)
            missed = {self._path(header) for (header, _), block in pairs if block is None}
            if not missed:
                return [block for block in blocks if block is not None], sum(common for _, common in headers)
            damaged |= missed

    def _whole(self, header: format.Block) -> format.Block | None:
        """Return the block of a header with its codes; None if its file is damaged, or out of reach."""
        path = self._path(header)
        try:
            return format.unpack(self.files.read(path), self.codec.widths, len(self.codec.chain.coder.runs))
        except OSError:  # perhaps only for a moment: the file stays
            return None
        except ValueError:
            self.files.remove(path)
            return None

    def _usable(self, rows: Sequence[Sequence[format.Block]], pads: Sequence[int], columns: int) -> int:
        """Return the most columns up to `columns` at which all rows store the windows of all layers, or 0."""
        good = np.arange(columns + 1) > max(pads)  # each row has a token
        for blocks, pad in zip(rows, pads, strict=True):
            positions = np.arange(1, columns - pad + 1)
            for layer, shape in enumerate(self.codec.shapes):
                held = [np.arange(len(block.tokens)) >= block.first[layer] for block in blocks]
                held = np.concatenate([*held, np.zeros(0, bool)])[: len(positions)]
                last_missing = np.maximum.accumulate(np.where(held, 0, positions))
                needed = positions if shape.window is None else np.minimum(positions, shape.window - 1)
                good[pad + 1 :] &= positions - last_missing >= needed
        return int(good.nonzero()[0].max(initial=0))

    def _path(self, block: format.Block) -> str:
        return self.files.path(block.parent, block.name)

    def _use(self, blocks: Sequence[format.Block]) -> None:
        """Record that blocks of a text were used, parents last: they are removed last."""
        if not self.files.is_local:  # object stores keep no time of use
            return
        for block in reversed(blocks):
            now = time.time_ns()  # the kernel's own clock of files has steps of some milliseconds
            with contextlib.suppress(OSError):
                os.utime(self._path(block), ns=(now, now))

    def _write(self, block: format.Block) -> bool:
        """Write a block, and return whether it is stored; a full disk loses the blocks used least recently."""
        data = block.pack()
        error = OSError()
        for attempt in range(1, TRIES + 1):
            try:
                self.files.write(self._path(block), data)
            except OSError as failed:
                error = failed
                if self.limit is None or failed.errno not in FULL:
                    break
                # room for more at each attempt: other processes fill the disk, too
                with contextlib.suppress(OSError):
                    size = sum(entry.size for entry in self.files.entries())
                    self._prune(max(0, size - attempt * len(data)))
            else:
                self._written += len(data)
                return True
        reason = error.strerror or str(error)
        text = (
            f"the store {self.files.url!r} cannot be written: {reason}; the tokens from {block.start} on are not stored"
        )
        warnings.warn(text, stacklevel=4)
        return False

    def _prune(self, limit: int) -> list[BlockFile]:
        try:
            self._size, removed = prune(self.files, limit)
        except OSError:  # out of reach: the next call tries again
            return []
        self._written = 0
        self.index.remove(entry.name for entry in removed)
        return removed
