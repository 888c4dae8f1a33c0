"""Entropy coding of codes: those of all channels of a class together, by the library `pcodec`.

A code q stands for |z| from |q| − ½ + `ZONE` on, z in steps, and is decoded to sign(q) (|q| + shift), with a shift for
each channel. The class of a channel is its mean |q|, in half octaves. `pcodec` fits its tables to the codes that it is
given and writes them along, and codes with asymmetric numeral systems (tANS).

A class is one chunk of pcodec's wrapped format, cut into pages which can be read side by side: a GPU reads each in a
thread of its own (`core.kernels.pages`). A page has at most `CHANNELS` channels and `NUMBERS` codes, by channel, then
by token. The tokens of a block go round over its pages, so that threads next to each other write tokens next to each
other. Layers that follow each other and hold as many of the block's tokens share pages.

Shapes: R channels of a layer, T tokens, N calibration tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosslayer.extras import check_extra

# A code grows only beyond ½ + this. 0.05, with the fit made again, has 0.98 times the KL (0.92-1.04) at an eighth and
# 1.04 (0.99-1.09) at a sixteenth (SmolLM2): no gain that can be told from none.
ZONE = 0.1
LARGEST = 2**15 - 1  # the largest code
CLASSES_PER_OCTAVE = 2  # one, three or four take 0.1 to 1% more bytes
RAREST = -12  # logarithm of the mean |q| of the first class, to base 2
CLASSES = 54  # up to a mean |q| of 2^14.5
LEVEL = 8  # of pcodec: tables of up to 256 bins
# Of a page, at most. Smaller pages have more bytes; larger ones keep a GPU busy with fewer threads, for longer. These
# add 0.2% to the bytes of 256 tokens (SmolLM2). A fixed number of tokens for each page gave a class of a few channels
# up to 16 pages.
CHANNELS, NUMBERS = 512, 8192
# Of what pcodec writes; of another the format of pages may differ, so that only pcodec reads it.
HEADER = b"\x04\x01"


def quantized(z: Tensor) -> Tensor:
    """Return the codes of coefficients in steps."""
    return torch.copysign(z.new_tensor(0.5 - ZONE), z).add_(z).trunc_().clamp_(-LARGEST, LARGEST)


def fitted(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class (R,) and the shift (R,) of each channel, from coefficients (N, R) in steps."""
    codes = quantized(z).abs()
    octaves = codes.mean(0).clamp_min(2.0**RAREST).log2() - RAREST
    classes = (CLASSES_PER_OCTAVE * octaves).round().long().clamp_max(CLASSES - 1)
    # larger coefficients are rarer, so the mean of what a code stands for lies below the middle
    shift = torch.where(codes > 0, z.abs() - codes, 0).sum(0) / (codes > 0).sum(0).clamp_min(1)
    return classes, shift


@dataclass(frozen=True)
class Band:
    """Channels of a class, from `first` to `last` of what `layers` have of it together; its pages are one a track."""

    layers: range
    tokens: int  # of the block that these layers hold
    first: int
    last: int

    @cached_property
    def tracks(self) -> int:
        """Pages of the band; page k has the tokens k, k + `tracks`, k + 2 · `tracks` and so on."""
        return min(-(-self.tokens * (self.last - self.first) // NUMBERS), self.tokens)

    @cached_property
    def sizes(self) -> list[int]:
        """The codes of each page."""
        return [(self.last - self.first) * len(range(at, self.tokens, self.tracks)) for at in range(self.tracks)]


class Coder:
    """Codes what all layers have of a run of tokens.

    Args:
        classes: of the channels of each layer (R,), in increasing order.
    """

    def __init__(self, classes: Sequence[Tensor]):
        kinds = torch.cat([torch.zeros(0, dtype=torch.long), *classes]).unique()
        edges = torch.stack([kinds, kinds + 1])
        bounds = [torch.searchsorted(of_layer.long(), edges).tolist() for of_layer in classes]
        self.runs = [  # by class, of each layer the first channel and the last + 1
            [(starts[index], stops[index]) for starts, stops in bounds] for index in range(len(kinds))
        ]
        self.rows = cache(self._rows)
        self.bands = lru_cache(maxsize=256)(self._bands)  # most blocks of a prompt have the same

    def _bands(self, kind: int, counts: tuple[int, ...]) -> list[Band]:
        """Return the bands of a class, in the order of their pages; `counts` are the tokens of each layer."""
        channels = [stop - start for start, stop in self.runs[kind]]
        layer, bands = 0, []
        while layer < len(counts):
            begin, total = layer, 0
            while layer < len(counts) and counts[layer] == counts[begin]:
                total += channels[layer]
                layer += 1
            for first in range(0, total if counts[begin] else 0, CHANNELS):
                bands.append(Band(range(begin, layer), counts[begin], first, min(first + CHANNELS, total)))
        return bands

    def encode(self, codes: Sequence[np.ndarray]) -> list[bytes]:
        """Return the codes (R, T), int16, of all layers, which may have different T, as bytes: one part a class.

        A part is pcodec's header and the chunk's metadata, the bytes of each page, uint16, and the pages. It is empty
        if no layer has a token.
        """
        counts = tuple(of_layer.shape[1] for of_layer in codes)
        parts = []
        for kind, run in enumerate(self.runs):
            bands = self.bands(kind, counts)
            if not bands:
                parts.append(b"")
                continue
            pages, layers, together = [], None, np.empty(0)
            for band in bands:
                if band.layers != layers:  # bands of the same layers follow each other
                    layers = band.layers
                    together = np.concatenate([codes[layer][slice(*run[layer])] for layer in layers])
                channels = together[band.first : band.last]
                pages += [channels[:, track :: band.tracks].reshape(-1) for track in range(band.tracks)]
            pcodec = _library()
            config = pcodec.ChunkConfig(
                compression_level=LEVEL,
                # bins and offsets alone: the GPU's kernel reads nothing else
                mode_spec=pcodec.ModeSpec.classic(),
                delta_spec=pcodec.DeltaSpec.no_op(),
                paging_spec=pcodec.PagingSpec.exact_page_sizes([len(page) for page in pages]),
            )
            file = pcodec.wrapped.FileCompressor()
            chunk = file.chunk_compressor(np.concatenate(pages), config)
            written = [chunk.write_page(index) for index in range(len(pages))]
            sizes = np.array([len(page) for page in written], "<u2").tobytes()
            parts.append(b"".join([file.write_header(), chunk.write_meta(), sizes, *written]))
        return parts

    def decode(self, parts: Sequence[bytes | memoryview], out: Sequence[np.ndarray]) -> None:
        """Read the codes (R, T), int16, of all layers from the bytes of `encode`, into arrays of that shape.

        Raises:
            ValueError: the bytes do not hold the codes of that many tokens.
        """
        counts = tuple(of_layer.shape[1] for of_layer in out)
        # of layers with as many tokens, the codes of all classes one after the other: (R of all, T), and what is filled
        together: dict[range, tuple[np.ndarray, int]] = {}
        for kind, part in enumerate(parts):
            bands = self.bands(kind, counts)
            numbers, at = _numbers(bytes(part), [size for band in bands for size in band.sizes]), 0
            for band in bands:
                if band.layers not in together:
                    channels = sum(len(out[layer]) for layer in band.layers)
                    together[band.layers] = np.empty((channels, band.tokens), np.int16), 0
                codes, filled = together[band.layers]
                end, size = filled + band.last - band.first, sum(band.sizes)
                _put_in_order(numbers[at : at + size], band, codes[filled:end])
                together[band.layers] = codes, end
                at += size
        for layers, (codes, _) in together.items():
            for layer, rows in zip(layers, self.rows(layers), strict=True):
                np.take(codes, rows, 0, out[layer], mode="clip")  # one copy for a layer, not one for each class of it

    def _rows(self, layers: range) -> list[np.ndarray]:
        """Return the rows (R,) of each of some layers, where the channels of all classes are one after the other."""
        rows: list[list[np.ndarray]] = [[] for _ in layers]
        begin = 0
        for run in self.runs:
            for of_layer, layer in zip(rows, layers, strict=True):
                size = run[layer][1] - run[layer][0]
                of_layer.append(np.arange(begin, begin + size))
                begin += size
        return [np.concatenate(of_layer) for of_layer in rows]


def _put_in_order(numbers: np.ndarray, band: Band, out: np.ndarray) -> None:
    """Write the codes of a band's pages, one after the other, into `out` (R, T)."""
    rows, tracks = out.shape[0], band.tracks
    tokens, longer = divmod(band.tokens, tracks)  # the first pages have a token more, if tokens are left over
    cut = longer * rows * (tokens + 1)
    main = out[:, : tokens * tracks].reshape(rows, tokens, tracks)  # a view
    main[:, :, longer:] = numbers[cut:].reshape(tracks - longer, rows, tokens).transpose(1, 2, 0)
    if longer:
        first = numbers[:cut].reshape(longer, rows, tokens + 1)
        main[:, :, :longer] = first[:, :, :-1].transpose(1, 2, 0)
        out[:, tokens * tracks :] = first[:, :, -1].T


def _numbers(data: bytes, sizes: Sequence[int]) -> np.ndarray:
    """Return the codes of a part, int16, page after page; `sizes` is how many codes each page has."""
    numbers = np.empty(sum(sizes), np.int16)
    if not sizes:
        if data:
            raise ValueError("the codes of a block do not match its tokens")
        return numbers
    try:
        file, at = _library().wrapped.FileDecompressor.new(data)
        chunk, size = file.chunk_decompressor(data[at:], "i16")
        at += size
        lengths = np.frombuffer(data, "<u2", len(sizes), at).tolist()
        at, begin = at + 2 * len(sizes), 0
        if at + sum(lengths) != len(data):
            raise ValueError("the pages of a block do not match its tokens")
        for length, count in zip(lengths, sizes, strict=True):
            progress, used = chunk.read_page_into(data[at : at + length], count, numbers[begin : begin + count])
            if progress.n_processed != count or not progress.finished or used != length:
                raise ValueError("the codes of a block do not match its tokens")
            at, begin = at + length, begin + count
    except (RuntimeError, TypeError) as error:
        raise ValueError("the codes of a block are damaged") from error
    return numbers


def _library() -> Any:
    check_extra("store", "a codec", "pcodec")
    import pcodec.wrapped

    return pcodec
