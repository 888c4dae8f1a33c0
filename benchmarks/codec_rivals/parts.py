"""The codec without one of its parts: depth, metric, steps of tokens, or entropy coding.

Each is fitted for itself, encodes to real bytes and decodes them.

Shapes: N calibration tokens, W numbers of a layer for each token, R channels of a layer, T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from crosslayer.codec import fit
from crosslayer.codec.chain import Chain, Importance, Layer, below_of, predicted
from crosslayer.codec.entropy import Coder
from crosslayer.codec.fit import QUICK, Calibration, with_step

CLIPPED = 1e-3  # of calibration tokens, whose codes lie beyond a channel's range on either side
TRIES, CLOSE = 8, 0.005
SLOPE = 1.2  # of the logarithm of the step over that of the bytes


@contextmanager
def without_depth() -> Iterator[None]:
    """Fit layers alone, none of them predicted, while the block runs."""
    with mock.patch.object(fit, "sources", lambda shapes: [()] * len(shapes)):
        yield


def without_metric(data: Calibration) -> Calibration:
    """Return a calibration in which all errors cost the same."""
    return replace(data, metric=[torch.eye(len(metric), dtype=metric.dtype) for metric in data.metric])


def without_steps(data: Calibration) -> Calibration:
    """Return a calibration in which all tokens have the step 1."""
    flat = Importance(data.importance.mean, data.importance.spread, torch.zeros_like(data.importance.weight))
    states, steps = data.held_out
    ones = torch.ones_like(data.steps), torch.ones_like(steps)
    return replace(data, steps=ones[0], held_out=(states, ones[1]), importance=flat)


@dataclass(frozen=True)
class ClippedLayer(Layer):
    """A layer whose codes are clipped to a range of each channel, `low` and `high` (R, 1)."""

    low: Tensor
    high: Tensor

    def coded(self, prediction: Tensor, states: Tensor, steps: Tensor) -> Tensor:
        """Return the codes (R, N), as floats, of states (N, W)."""
        return super().coded(prediction, states, steps).maximum(self.low).minimum(self.high)


class FixedLength(Coder):
    """Codes of as many bits in each channel as its range needs; one part for each layer."""

    def __init__(self, layers: Sequence[ClippedLayer]):
        super().__init__([layer.classes for layer in layers])
        self.runs = [[] for _ in layers]
        self.low = [layer.low.int().numpy() for layer in layers]
        self.lengths = [  # of each layer, bits (R,)
            np.ceil(np.log2((layer.high - layer.low + 1).numpy()[:, 0])).astype(int) for layer in layers
        ]

    def encode(self, codes: Sequence[np.ndarray]) -> list[bytes]:
        """Return the codes (R, T) of all layers as bytes."""
        return [self._packed(own, layer) for layer, own in enumerate(codes)]

    def decode(self, parts: Sequence[bytes | memoryview], out: Sequence[np.ndarray]) -> None:
        """Read the codes (R, T), int16, of all layers into arrays of that shape."""
        for layer, (data, codes) in enumerate(zip(parts, out, strict=True)):
            self._unpack(data, layer, codes)

    def _packed(self, codes: np.ndarray, layer: int) -> bytes:
        parts, lengths = [np.empty(0, np.uint8)], self.lengths[layer]
        for length in np.unique(lengths):
            own = (codes - self.low[layer])[lengths == length]
            parts.append((own[..., None] >> np.arange(length) & 1).astype(np.uint8).reshape(-1))
        return np.packbits(np.concatenate(parts)).tobytes()

    def _unpack(self, data: bytes | memoryview, layer: int, codes: np.ndarray) -> None:
        bits, at, lengths = np.unpackbits(np.frombuffer(data, np.uint8)), 0, self.lengths[layer]
        tokens = codes.shape[1]
        for length in np.unique(lengths):
            are_these = lengths == length
            count = int(are_these.sum())
            own = bits[at : at + count * tokens * length].reshape(count, tokens, length)
            codes[are_these] = own @ (1 << np.arange(length)) + self.low[layer][are_these]
            at += count * tokens * length


def with_fixed_lengths(chain: Chain, data: Calibration) -> Chain:
    """Return a chain whose channels have codes of a fixed length, by the range of calibration codes."""
    layers: list[ClippedLayer] = []
    decoded: list[Tensor] = []
    for layer, states in zip(chain.layers, data.states, strict=True):
        prediction = predicted(below_of(layer.sources, decoded, len(states)), layer.predict, layer.offset)
        codes = layer.coded(prediction, states, data.steps).sort(1).values
        beyond = int(CLIPPED * codes.shape[1])
        low, high = codes[:, beyond, None], codes[:, codes.shape[1] - 1 - beyond, None]
        layers.append(ClippedLayer(**vars(layer), low=low, high=high))
        codes = layers[-1].coded(prediction, states, data.steps)
        decoded.append(layers[-1].decoded(prediction, codes, data.steps))
    fixed = Chain(layers, chain.importance)
    fixed.coder = FixedLength(layers)
    return fixed


def with_bytes(
    chain: Chain,
    data: Calibration,
    bytes_per_token: float,
    changed: Callable[[Chain, Calibration], Chain] = lambda chain, data: chain,
) -> Chain:
    """Return the chain with the step at which held-out text takes `bytes_per_token`, after `changed` was applied to it.

    The step is found on every `QUICK`-th token.
    """
    quick = replace(data, states=[own[::QUICK] for own in data.states], steps=data.steps[::QUICK])
    factor = 1.0
    for _ in range(TRIES):
        made = changed(with_step(chain, quick, factor), quick)
        ratio = made.bytes_per_token(*data.held_out) / bytes_per_token
        if abs(ratio - 1) < CLOSE:
            break
        factor *= min(4.0, max(0.25, ratio**SLOPE))
    return changed(with_step(chain, data, factor), data)
