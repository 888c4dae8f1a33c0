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
# Tokens that a GPU decodes together: at the shape of an 8B model, coefficients take 0.8 GB.
AT_ONCE = 8192


class Decoder:
    """Decodes the blocks of a chain on any device.

    Attributes:
        chain_on: the chain with its matrices on a device.
    """

    def __init__(self, chain: Chain):
        self.chain = chain
        self.widths = [layer.shape.width for layer in chain.layers]
        self.chain_on = cache(partial(chain_on_device, chain))
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
            layers: Any = ([part] for part in self._decoded(runs[0], device, half))
        else:  # all layers of a run come before the next run, so all are kept
            layers = zip(*(list(self._decoded(run, device, half)) for run in runs), strict=True)
        for parts in layers:
            # from the last run back, as long as there is no gap
            held = [parts[-1][0]]
            for (states, _), (_, begin), run in zip(parts[-2::-1], parts[:0:-1], runs[:0:-1], strict=True):
                if begin > run[0].start:  # the layer does not hold what is before
                    break
                held.insert(0, states)
            begin = blocks[-1].stop - sum(map(len, held))
            yield torch.cat(held)[: max(0, length - begin)] if len(held) > 1 else held[0][: max(0, length - begin)]

    def coded(self, block: format.Block) -> list[int]:
        """Return of each layer how many of a block's last tokens have codes: it holds them, and they are not exact."""
        first = np.maximum(block.first, 1 + block.copies) if block.start == 0 else block.first
        return np.maximum(len(block.tokens) - first.astype(int), 0).tolist()

    def _decoded(
        self, blocks: Sequence[format.Block], device: torch.device, half: bool
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield of each layer the states (T, W) of the latest tokens without a gap, and the position of the first."""
        layers = self.chain_on(device).layers
        halves = self._halves_on(device) if half else []
        steps = step_sizes(torch.from_numpy(np.concatenate([block.steps for block in blocks]))).to(device)
        counts = np.array([self.coded(block) for block in blocks])  # (blocks, layers)
        begins = []  # of each layer, the position from which on it has all codes
        for of_layer in counts.T:
            at = len(blocks) - 1
            while at > 0 and of_layer[at] == len(blocks[at].tokens):
                at -= 1
            begins.append(blocks[at].stop - int(of_layer[at]))
        sizes = [blocks[-1].stop - begin for begin in begins]
        coefficients = self._coefficients(blocks, counts, steps, sizes, half)

        # the first token of a text, as it is, of each layer that holds it
        exact: dict[int, Tensor] = {}
        if not blocks[0].start and len(blocks[0].exact):
            numbers = torch.from_numpy(np.frombuffer(blocks[0].exact, "<f2").astype(np.float32))
            holding = [index for index, first in enumerate(blocks[0].first) if first == 0]
            parts = numbers.split([self.widths[index] for index in holding])
            exact = dict(zip(holding, parts, strict=True))

        decoded: dict[int, Tensor] = {}  # of the layers that a later one is predicted from; in float16 less means
        for index, (layer, begin, scaled) in enumerate(zip(layers, begins, coefficients, strict=True)):
            below = below_of(layer.sources, decoded, scaled.shape[1])
            if half:
                decoded[index] = halves[index].decoded(below, scaled.half())
                whole = decoded[index].float() + halves[index].mean
            else:
                whole = decoded[index] = torch.addmm(predicted(below, layer.predict, layer.offset), scaled.T, layer.up)
            # others are freed at once: all layers together take more than the cache of the prompt
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
                for of_layer, size in zip(out.split(channels), sizes, strict=True):
                    yield of_layer[:, len(steps) - size :]
                return
        # the CPU reads codes where no kernel can, or where another pcodec wrote pages that the kernel does not know
        stops = counts.cumsum(0)
        codes = [
            np.empty((len(layer.classes), count), np.int16) for layer, count in zip(layers, stops[-1], strict=True)
        ]

        def decode(index: int) -> None:
            spans = zip(codes, stops[index] - counts[index], stops[index], strict=True)
            self.chain.coder.decode(blocks[index].parts, [of_layer[:, start:stop] for of_layer, start, stop in spans])

        # pcodec releases the GIL, so that threads read side by side
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(decode, range(len(blocks))))
        for layer, size in zip(layers, sizes, strict=True):
            latest = codes.pop(0)  # the memory of a layer's codes is free behind it
            latest = torch.from_numpy(latest[:, latest.shape[1] - size :]).to(steps.device).float()
            yield layer.coefficients(latest, steps[len(steps) - size :])


def chain_on_device(chain: Chain, device: Any) -> Chain:
    """Return a chain with its matrices on a device."""
    moved = copy(chain)
    moved.layers = [
        replace(layer, **{name: getattr(layer, name).to(device) for name in MATRICES}) for layer in chain.layers
    ]
    moved.importance = Importance(*(part.to(device) for part in vars(chain.importance).values()))
    return moved
