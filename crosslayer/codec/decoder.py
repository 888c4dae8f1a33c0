"""Decodes blocks: bytes to codes, codes to coefficients, coefficients to states, layer by layer.

Shapes: T tokens, W numbers of a layer for each token, R channels of a layer.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosslayer.codec import format
from crosslayer.codec.chain import Chain, Importance, below_of, half_layers, predicted, step_sizes
from crosslayer.codec.device import Reader, reads_pages

MATRICES = ("offset", "predict", "down", "up", "shift")
AT_ONCE = 8192  # tokens that a GPU decodes together: at the shape of an 8B model, coefficients take 0.8 GB


class Decoder:
    """Decodes the blocks of a chain on any device.

    Attributes:
        chain_on: the chain with its matrices on a device.
    """

    def __init__(self, chain: Chain):
        self.chain, self.widths = chain, [layer.shape.width for layer in chain.layers]
        self.chain_on = cache(partial(on_device, chain))
        self._halves_on = cache(lambda device: half_layers(self.chain_on(device).layers))

    @cached_property
    def pages(self) -> Reader:
        """What reads the codes of blocks with a kernel."""
        return Reader(self.chain.coder, [len(layer.classes) for layer in self.chain.layers])

    def layers(
        self, blocks: Sequence[format.Block], length: int, device: torch.device, half: bool | None = None
    ) -> Iterator[Tensor]:
        """Yield the states (T, W) of consecutive blocks, layer by layer, up to position `length`.

        Of each layer come the latest tokens that it holds. The codes of all layers are read before the first.

        Args:
            blocks: of a text, one after the other.
            length: position behind the last token.
            device: of the states.
            half: compute in float16; default: on a GPU.
        """
        half = device.type == "cuda" if half is None else half
        runs, size = [], 0  # of blocks that are read together: all, or on a GPU as many as its memory should hold
        for block in blocks:
            if not runs or (half and size + len(block.tokens) > AT_ONCE):
                runs.append([])
                size = 0
            runs[-1].append(block)
            size += len(block.tokens)
        if len(runs) == 1:
            layers: Any = ([own] for own in self._decoded(runs[0], device, half))
        else:  # all layers of a run come before the next run, so all are kept
            layers = zip(*(list(self._decoded(run, device, half)) for run in runs), strict=True)
        for parts in layers:
            kept = [parts[-1][0]]
            for (states, _), (_, begin), run in zip(parts[-2::-1], parts[:0:-1], runs[:0:-1], strict=True):
                if begin > run[0].start:  # the layer does not hold what is before
                    break
                kept.insert(0, states)
            begin = blocks[-1].stop - sum(map(len, kept))
            yield torch.cat(kept)[: max(0, length - begin)] if len(kept) > 1 else kept[0][: max(0, length - begin)]

    def coded(self, block: format.Block) -> list[int]:
        """Return of each layer how many of a block's last tokens have codes: it holds them, and they are not exact."""
        first = np.maximum(block.first, 1 + block.copies) if block.start == 0 else block.first
        return np.maximum(len(block.tokens) - first.astype(int), 0).tolist()

    def _decoded(
        self, blocks: Sequence[format.Block], device: torch.device, half: bool
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield of each layer the states (T, W) of the latest tokens without a gap, and the position of the first."""
        layers, halves = self.chain_on(device).layers, self._halves_on(device) if half else []
        steps = step_sizes(torch.from_numpy(np.concatenate([block.steps for block in blocks]))).to(device)
        exact = self._exact(blocks[0])
        decoded: dict[int, Tensor] = {}  # of the layers that a later one is predicted from; in float16 less means
        counts = np.array([self.coded(block) for block in blocks])  # (blocks, layers)
        begins = [_begin(blocks, own) for own in counts.T]
        sizes = [blocks[-1].stop - begin for begin in begins]
        coefficients = self._coefficients(blocks, counts, steps, sizes, half)
        for index, (layer, begin, own) in enumerate(zip(layers, begins, coefficients, strict=True)):
            below = below_of(layer.sources, decoded, own.shape[1])
            if half:
                decoded[index] = halves[index].decoded(below, own.half())
                whole = decoded[index].float() + halves[index].mean
            else:
                whole = decoded[index] = torch.addmm(predicted(below, layer.predict, layer.offset), own.T, layer.up)
            needed = {source for later in layers[index + 1 :] for source in later.sources}
            decoded = {key: states for key, states in decoded.items() if key in needed}
            if index in exact and begin <= 1 + blocks[0].copies:
                whole = torch.cat([exact[index].to(device).expand(1 + blocks[0].copies, -1), whole])
                begin = 0
            yield whole, begin

    def _coefficients(
        self, blocks: Sequence[format.Block], counts: np.ndarray, steps: Tensor, sizes: Sequence[int], half: bool
    ) -> Iterator[Tensor]:
        """Yield each layer's coefficients (R, T), float32 or from a kernel float16, of its latest `sizes` tokens."""
        layers = self.chain_on(steps.device).layers
        if half and reads_pages(steps.device):
            channels = [len(layer.classes) for layer in layers]
            out = torch.empty(sum(channels), len(steps), dtype=torch.float16, device=steps.device)
            scales = torch.cat([layer.shift for layer in layers]), steps
            stops = [block.stop - blocks[0].start for block in blocks]
            if self.pages.read([block.parts for block in blocks], counts.tolist(), stops, out, scales):
                for own, size in zip(out.split(channels), sizes, strict=True):
                    yield own[:, len(steps) - size :]
                return
        codes = self._codes(blocks, counts)
        for layer, size in zip(layers, sizes, strict=True):
            own = codes.pop(0)  # the memory of a layer's codes is free behind it
            own = torch.from_numpy(own[:, own.shape[1] - size :]).to(steps.device).float()
            yield layer.coefficients(own, steps[len(steps) - size :])

    def _codes(self, blocks: Sequence[format.Block], counts: np.ndarray) -> list[np.ndarray]:
        """Return each layer's codes (R, T), of all blocks; `counts` (blocks, layers) is how many tokens have codes."""
        stops = counts.cumsum(0)
        layers = zip(self.chain.layers, stops[-1], strict=True)
        codes = [np.empty((len(layer.classes), count), np.int16) for layer, count in layers]

        def read(index: int) -> None:
            spans = zip(codes, stops[index] - counts[index], stops[index], strict=True)
            self.chain.coder.decode(blocks[index].parts, [own[:, start:stop] for own, start, stop in spans])

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(read, range(len(blocks))))
        return codes

    def _exact(self, block: format.Block) -> dict[int, Tensor]:
        """Return the first token's states (W,) of each layer that holds it."""
        if block.start or not len(block.exact):
            return {}
        numbers = torch.from_numpy(np.frombuffer(block.exact, "<f2").astype(np.float32))
        holding = [index for index, first in enumerate(block.first) if first == 0]
        parts = numbers.split([self.widths[index] for index in holding])
        return dict(zip(holding, parts, strict=True))


def _begin(blocks: Sequence[format.Block], counts: np.ndarray) -> int:
    """Return the position from which on a layer has all codes; of each block, it has the last `counts`."""
    at = len(blocks) - 1
    while at > 0 and counts[at] == len(blocks[at].tokens):
        at -= 1
    return blocks[at].stop - int(counts[at])


def on_device(chain: Chain, device: Any) -> Chain:
    """Return a chain with its matrices on a device."""
    moved = copy(chain)
    moved.layers = [
        replace(layer, **{name: getattr(layer, name).to(device) for name in MATRICES}) for layer in chain.layers
    ]
    moved.importance = Importance(*(part.to(device) for part in vars(chain.importance).values()))
    return moved
