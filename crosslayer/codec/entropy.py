"""Entropy coding of codes: those of all channels of a class together, by the library `pcodec`.

A code q stands for |z| from |q| − ½ + `ZONE` on, z in steps, and is decoded to sign(q) (|q| + shift), with a shift for
each channel. The class of a channel is its mean |q|, in half octaves. `pcodec` fits its tables to the codes that it is
given and writes them along, and codes with asymmetric numeral systems (tANS).

Shapes: R channels of a layer, T tokens, N calibration tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosslayer.extras import check_extra

ZONE = 0.1  # a code grows only beyond ½ + this
LARGEST = 2**15 - 1  # the largest code
CLASSES_PER_OCTAVE = 2
RAREST = -12  # logarithm of the mean |q| of the first class, to base 2
CLASSES = 54  # up to a mean |q| of 2^14.5
LEVEL = 8  # of pcodec: tables of up to 256 bins


def quantized(z: Tensor) -> Tensor:
    """Return the codes of coefficients in steps."""
    return torch.copysign(z.new_tensor(0.5 - ZONE), z).add_(z).trunc_().clamp_(-LARGEST, LARGEST)


def fitted(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class (R,) and the shift (R,) of each channel, from coefficients (N, R) in steps."""
    codes = quantized(z).abs()
    level = codes.mean(0).clamp_min(2.0**RAREST).log2() - RAREST
    classes = (CLASSES_PER_OCTAVE * level).round().long().clamp_max(CLASSES - 1)
    shift = torch.where(codes > 0, z.abs() - codes, 0).sum(0) / (codes > 0).sum(0).clamp_min(1)
    return classes, shift


class Coder:
    """Codes what all layers have of a run of tokens.

    Args:
        classes: of the channels of each layer (R,), in increasing order.
    """

    def __init__(self, classes: Sequence[Tensor]):
        found = torch.cat([torch.zeros(0, dtype=torch.long), *classes]).unique()
        bounds = [torch.searchsorted(own.long(), torch.stack([found, found + 1])).tolist() for own in classes]
        self.runs = [  # by class, of each layer the first channel and the last + 1
            [(starts[index], stops[index]) for starts, stops in bounds] for index in range(len(found))
        ]

    def encode(self, codes: Sequence[np.ndarray]) -> list[bytes]:
        """Return the codes (R, T), int16, of all layers, which may have different T, as bytes: one part a class."""
        pcodec = _library()
        config = pcodec.ChunkConfig(
            compression_level=LEVEL, mode_spec=pcodec.ModeSpec.classic(), delta_spec=pcodec.DeltaSpec.no_op()
        )
        parts = []
        for run in self.runs:
            own = [code[start:stop].reshape(-1) for code, (start, stop) in zip(codes, run, strict=True)]
            parts.append(pcodec.standalone.simple_compress(np.concatenate(own), config))
        return parts

    def decode(self, parts: Sequence[bytes | memoryview], out: Sequence[np.ndarray]) -> None:
        """Read the codes (R, T), int16, of all layers from the bytes of `encode`, into arrays of that shape.

        Raises:
            ValueError: the bytes do not hold the codes of that many tokens.
        """
        for part, run in zip(parts, self.runs, strict=True):
            own = [codes[start:stop] for codes, (start, stop) in zip(out, run, strict=True)]
            together, at = _decompressed(bytes(part), sum(codes.size for codes in own)), 0
            for codes in own:
                codes[:] = together[at : at + codes.size].reshape(codes.shape)
                at += codes.size


def _decompressed(data: bytes, count: int) -> np.ndarray:
    """Return the `count` numbers, int16, that pcodec wrote."""
    numbers = np.empty(count, np.int16)
    try:
        progress = _library().standalone.simple_decompress_into(data, numbers)
    except (RuntimeError, TypeError) as error:
        raise ValueError("the codes of a block are damaged") from error
    if progress.n_processed != count or not progress.finished:
        raise ValueError("the codes of a block do not match its tokens")
    return numbers


def _library() -> Any:
    check_extra("store", "a codec", "pcodec")
    import pcodec.standalone  # type: ignore[import-not-found]

    return pcodec
