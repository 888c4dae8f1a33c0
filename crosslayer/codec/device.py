"""Codes of blocks read where they are needed: compressed bytes go to a GPU, and a thread there reads each page.

What follows from the headers of blocks is arranged on the CPU: which page has which channels and tokens. What has to be
read from the bytes, tables and where pages begin, is read by torch operators on the device. All of it is checked there:
a damaged table would let the kernel read beyond it.

Shapes: K classes, B chunks (a class of a block), P pages, C channels of all layers, T tokens.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crosslayer.codec.entropy import HEADER, Coder

# What limits a table: the kernel holds a node in 32 bits (14 bits of state, 4 of how many are read, 14 of the bin).
MOST_LOG = 12  # of a table's size, to base 2; pcodec's level 8 makes 10 at most
MOST_BITS = 16  # of an offset within a bin
BIN_BITS = 16 + 5  # of a bin in a chunk's metadata, behind its weight: its lowest number, and the bits of offsets
# Before the bins: pcodec's mode, which must be 0; the logarithm of the table's size, the number of bins.
META_BITS = 8 + 4 + 15
PADDING = 20  # bytes behind all, at the least 16 after whole words: a page at the end reads ahead


class Reader:
    """Reads the codes of blocks with a kernel.

    Args:
        coder: of the codec.
        channels: of each layer.
    """

    def __init__(self, coder: Coder, channels: Sequence[int]):
        self.coder = coder
        starts = np.cumsum([0, *channels])  # of the layers in all channels
        rows = []
        for run in coder.runs:
            spans = zip(run, starts, strict=False)
            rows.append(np.concatenate([np.arange(start, stop) + begin for (start, stop), begin in spans]))
        self.rows = np.concatenate([*rows, np.zeros(0)]).astype(np.int32)  # of classes, one after the other
        self.first_row = np.cumsum([0, *map(len, rows)])  # of each class
        self.layout = lru_cache(maxsize=64)(self._layout)  # most blocks of a prompt have the same

    def _layout(self, counts: tuple[int, ...]) -> np.ndarray:
        """Return where the codes of a block's pages go, (7, P), in the order of the pages; from headers alone.

        `counts` says how many of the block's tokens each layer has. The rows are, for each page: its class, the first
        of its channels (an index into the channels that all layers have of the class), how many channels and tokens it
        has, its number in its band, the pages of the band, and the tokens of the band.
        """
        pages: list[tuple[int, ...]] = []
        for kind, run in enumerate(self.coder.runs):
            before = np.cumsum([0, *(stop - start for start, stop in run)])  # channels of the class in layers below
            for band in self.coder.bands(kind, counts):
                row = int(before[band.layers.start]) + band.first
                for track in range(band.tracks):
                    tokens = len(range(track, band.tokens, band.tracks))
                    pages.append((kind, row, band.last - band.first, tokens, track, band.tracks, band.tokens))
        return np.array(pages, np.int64).reshape(-1, 7).T

    def read(
        self,
        parts: Sequence[Sequence[bytes | memoryview]],
        counts: Sequence[Sequence[int]],
        stops: Sequence[int],
        out: Tensor,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> bool:
        """Read the codes of blocks into `out` (C, T); return whether the kernel knows their format.

        Args:
            parts: of each block, the bytes of each class.
            counts: of each block, how many of its last tokens each layer has.
            stops: of each block, the column behind its last token.
            out: codes, int16, or with `scales` coefficients, float16; columns that no page has stay as they are.
            scales: shifts of channels (C,) and steps of columns (T,), float32, on the device.

        Raises:
            ValueError: the bytes are damaged.
        """
        prepared = self.prepare(parts, counts, stops, out.device)
        if prepared is None:
            return False
        if prepared.facts.shape[1]:
            # imported here: Triton is needed on a GPU alone
            importlib.import_module("crosslayer.core.kernels.pages").read(*prepared, out, scales)
        return True

    def prepare(
        self,
        parts: Sequence[Sequence[bytes | memoryview]],
        counts: Sequence[Sequence[int]],
        stops: Sequence[int],
        device: torch.device,
    ) -> "Prepared | None":
        """Return what the kernel needs, on the device; None: pcodec wrote another format than it knows.

        Raises:
            ValueError: the bytes are damaged.
        """
        # where the codes of all pages go, from headers alone
        layouts = [self.layout(tuple(of_block)) for of_block in counts]
        kinds = len(self.coder.runs)
        kind, row, channels, tokens, track, tracks, held = np.concatenate(layouts, 1)
        block = np.repeat(np.arange(len(layouts)), [layout.shape[1] for layout in layouts])
        numbered = block * kinds + kind  # the part of each page, of all parts
        used, chunk = np.unique(numbered, return_inverse=True)
        together = [part for of_block in parts for part in of_block]
        # a part without pages must be empty, or bytes of a damaged file would go unread
        if any(len(together[at]) for at in np.setdiff1d(np.arange(len(together)), used)):
            raise ValueError("the codes of a block do not match its tokens")
        pieces = [together[at] for at in used]
        if any(bytes(piece[: len(HEADER)]) != HEADER for piece in pieces):
            return None

        # the bytes, and the heads of their chunks
        data, ends = one_after_another(pieces, device)
        begins = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        chunks = Chunks.of(data.numpy(), begins, ends, np.bincount(chunk, minlength=len(pieces)))

        stop = np.array(stops)[block]
        # pages of the same channels next to each other: threads of a warp then do the same for as long
        order = np.lexsort((track, block, row, kind))
        geometry = np.stack([tokens, stop - held + track, tracks, self.first_row[kind] + row, channels])
        words = data.view(torch.int32).to(device, non_blocking=True)
        return chunks.prepared(words, *(moved(array, device) for array in (chunk, geometry, order, self.rows)))


class Prepared(NamedTuple):
    """What the kernel needs, in its order: see `core.kernels.pages.read`."""

    words: Tensor
    facts: Tensor
    rows: Tensor
    nodes: Tensor
    bins: Tensor


@dataclass(frozen=True)
class Chunks:
    """Chunks of pcodec in the bytes of all of them; every array is of the chunks (B,), int64.

    Attributes:
        meta: first byte of the metadata.
        log: logarithm of the table's size, to base 2.
        bins: in the table.
        sizes: first byte of the pages' sizes, two bytes each, behind the metadata.
        ends: byte behind the last page.
        pages: of the chunk.
    """

    meta: np.ndarray
    log: np.ndarray
    bins: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray
    pages: np.ndarray

    @classmethod
    def of(cls, data: np.ndarray, begins: np.ndarray, ends: np.ndarray, pages: np.ndarray) -> "Chunks":
        """Read the heads of metadata, which say how much to expect; data have bytes behind the last chunk."""
        meta = begins + len(HEADER)
        head = data[np.minimum(meta[:, None] + np.arange(4), len(data) - 1)].astype(np.int64)  # (B, 4)
        head = (head << 8 * np.arange(4)).sum(1)
        log, bins = head >> 8 & 15, head >> 12 & 0x7FFF
        sizes = meta + (META_BITS + bins * (log + BIN_BITS) + 7) // 8
        wrong = (head & 0xFF != 0) | (log > MOST_LOG) | (bins < 1) | (bins > 1 << log) | (sizes + 2 * pages > ends)
        if wrong.any():
            raise ValueError("the codes of a block are damaged")
        return cls(meta, log, bins, sizes, ends, pages)

    def prepared(self, words: Tensor, chunk: Tensor, geometry: Tensor, order: Tensor, rows: Tensor) -> Prepared:
        """Return what the kernel needs; all tensors are on its device.

        Args:
            words: all bytes, int32.
            chunk: of each page (P,).
            geometry: of each page its tokens, first column, columns between two tokens, first row and channels, (5, P).
            order: of the pages, (P,).
            rows: see `core.kernels.pages.read`.
        """
        meta, log, count, sizes, ends, pages = (moved(array, words.device) for array in vars(self).values())
        # bins: a weight less one, the lowest number from −2^15 on, and the bits of offsets
        of, number = owners(count, int(self.bins.sum()))
        at = 8 * meta[of] + META_BITS + number * (log[of] + BIN_BITS)
        weight = bits(words, at, log[of]) + 1
        lowest = bits(words, at + log[of], 16) - 2**15
        offset = bits(words, at + log[of] + 16, 5)
        size = 1 << log
        sums = torch.zeros_like(size).index_add_(0, of, weight)
        # pages: where each begins, from the sizes of those before it
        first_page = pages.cumsum(0) - pages
        length = bits(words, 8 * (sizes[chunk] + 2 * within(chunk, pages)), 16)
        before = length.cumsum(0) - length
        begin = (sizes + 2 * pages)[chunk] + before - before[first_page][chunk]
        filled = sizes + 2 * pages + torch.zeros_like(size).index_add_(0, chunk, length)
        # with these three true, no page can leave its table or the bytes; asked in one go, as each waits for the GPU
        if ((sums != size).any() | (offset > MOST_BITS).any() | (filled != ends).any()).item():
            raise ValueError("the codes of a block are damaged")
        first_node, first_bin = size.cumsum(0) - size, count.cumsum(0) - count
        nodes = table(weight, log, size, first_bin, int((1 << self.log).sum()))
        facts = torch.stack([begin, log[chunk], geometry[0], first_node[chunk], first_bin[chunk], *geometry[1:]])
        return Prepared(words, facts[:, order].int(), rows, nodes, ((lowest & 0xFFFF) | offset << 16).int())


def table(weight: Tensor, log: Tensor, size: Tensor, first_bin: Tensor, total: int) -> Tensor:
    """Return the nodes of all tables one after the other, int32: see `core.kernels.pages.read`.

    A table spreads each bin over as many of its slots as the bin has weight, in steps of 3/5 of its size (an odd
    number), as pcodec does. The slots of a bin stand for the states from its weight on. A state is brought up to the
    table's size with `read` bits; the weights of a table add up to its size, so that it stays below twice that.
    """
    of, slot = owners(size, total)
    step = 3 * size // 5
    step += 1 - step % 2
    first_node = size.cumsum(0) - size
    owner, number = owners(weight, total)  # bins, each as often as its weight
    symbol = torch.empty_like(owner)
    symbol[first_node[of] + (step[of] * slot & size[of] - 1)] = owner
    order = symbol.int().sort(stable=True).indices  # slots by bin, as `owner` is
    state = torch.empty_like(owner)
    state[order] = weight[owner] + number
    read = log[of] - torch.frexp(state.double()).exponent.long() + 1  # frexp: state = m 2^e, ½ ≤ m < 1
    return ((state << read) - size[of] | read << 14 | symbol - first_bin[of] << 18).int()


def bits(words: Tensor, at: Tensor, count: Tensor | int) -> Tensor:
    """Return `count` ≤ 16 bits from each bit `at` on, of words (int32)."""
    index = at >> 5
    both = (words[index].long() & 0xFFFFFFFF) | words[index + 1].long() << 32
    return (both >> (at & 31)) & ((1 << count) - 1)


def owners(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return of each of `total` items its owner, who has `counts` of them, and its number among the owner's."""
    owner = torch.repeat_interleave(counts, output_size=total)
    return owner, within(owner, counts)


def within(owner: Tensor, counts: Tensor) -> Tensor:
    """Return the number of each item among its owner's; items are sorted by owner."""
    return torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]


def one_after_another(pieces: Sequence[bytes | memoryview], device: torch.device) -> tuple[Tensor, np.ndarray]:
    """Return pieces one after the other and `PADDING` on the CPU, uint8, and where each ends.

    For a GPU they are in pinned memory, which is copied fastest; they get there by a single copy, in threads.
    """
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    size = int(ends[-1]) if len(ends) else 0
    data = torch.zeros(size // 4 * 4 + PADDING, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = data.numpy()

    def copy(index: int) -> None:
        view[ends[index] - len(pieces[index]) : ends[index]] = np.frombuffer(pieces[index], np.uint8)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(copy, range(len(pieces))))
    return data, ends


def moved(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array on a device, copied through pinned memory to a GPU."""
    tensor = torch.from_numpy(np.array(array))  # a copy: bytes are read-only
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def reads_pages(device: torch.device) -> bool:
    """Return whether the kernel runs on a device: a GPU with Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
