"""The codec without one of its parts: depth, metric, steps of tokens, or entropy coding.

Each is fitted for itself, encodes to real bytes and decodes them.

Shapes: N calibration tokens, W numbers of a layer for each token, R channels of a layer, T tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from crosslayer.codec import fit
from crosslayer.codec.chain import Chain, Importance, Layer, below_of
from crosslayer.codec.entropy import Coder, quantized
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


class FixedLength(Coder):
    """Codes of as many bits in each channel as its range needs; what lies beyond is clipped.

    Args:
        coder: what codes are decoded to, and the order of the channels.
        low: the smallest code (R,).
        high: the largest.

    """

    def __init__(self, coder: Coder, low: Tensor, high: Tensor):
        super().__init__(coder.tables, coder.classes.tolist())
        self.low, self.high = low[:, None], high[:, None]
        self.lengths = np.ceil(np.log2((high - low + 1).numpy())).astype(int)  # bits (R,)

    def rounded(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of coefficients (R, T) in steps, and what they are decoded to."""
        return super().rounded(quantized(z).maximum(self.low).minimum(self.high))

    def bits(self, codes: Tensor) -> Tensor:
        """Return the bits (T,) of codes (R, T)."""
        return torch.full((codes.shape[1],), float(self.lengths.sum()))

    def encode(self, codes: np.ndarray) -> bytes:
        """Return codes (R, T) as bytes."""
        parts = [np.empty(0, np.uint8)]
        for length in np.unique(self.lengths):
            own = (codes - self.low.numpy().astype(int))[self.lengths == length]
            parts.append((own[..., None] >> np.arange(length) & 1).astype(np.uint8).reshape(-1))
        return np.packbits(np.concatenate(parts)).tobytes()

    def decode(self, data: bytes | memoryview, tokens: int) -> np.ndarray:
        """Return what the bytes of `encode` decode to, (R, T) float32."""
        bits, at = np.unpackbits(np.frombuffer(data, np.uint8)), 0
        codes = np.empty((self.channels, tokens), np.float32)
        for length in np.unique(self.lengths):
            are_these = self.lengths == length
            count = int(are_these.sum())
            own = bits[at : at + count * tokens * length].reshape(count, tokens, length)
            codes[are_these] = own @ (1 << np.arange(length)) + self.low.numpy()[are_these]
            at += count * tokens * length
        return super().rounded(torch.from_numpy(codes))[1].numpy()


def with_fixed_lengths(chain: Chain, data: Calibration) -> Chain:
    """Return a chain whose channels have codes of a fixed length, by the range of calibration codes."""
    layers: list[Layer] = []
    decoded: list[Tensor] = []
    for layer, states in zip(chain.layers, data.states, strict=True):
        below = below_of(layers, layer.sources, decoded, len(states))
        codes = layer.coded(below, states, data.steps)[0].sort(1).values
        beyond = int(CLIPPED * codes.shape[1])
        coder = FixedLength(layer.coder, codes[:, beyond], codes[:, codes.shape[1] - 1 - beyond])
        layers.append(replace(layer, coder=coder))
        decoded.append(layers[-1].decoded(below, layers[-1].coded(below, states, data.steps)[1], data.steps))
    return Chain(layers, chain.importance)


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
        ratio = float(made.bits(*data.held_out).mean()) / 8 / bytes_per_token
        if abs(ratio - 1) < CLOSE:
            break
        factor *= min(4.0, max(0.25, ratio**SLOPE))
    return changed(with_step(chain, data, factor), data)
