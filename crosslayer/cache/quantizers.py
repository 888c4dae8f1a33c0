"""Stores states with 2, 3, 4 or 8 bits, or as float8, each token by itself.

The channels of a head are rotated first: a Hadamard matrix with random signs spreads outliers, as in QuaRot (arXiv
2404.00456). Each group of 64 then has a scale and a smallest value in float16:

    code = round((x R − low) / scale),    x ≈ (code · scale + low) Rᵀ

Where one of the two is beyond float16's range, both are stored in units of 2^14, and the scale with a minus.

Attention over rotated keys and values needs no way back: (q R)(k R)ᵀ = q kᵀ, and Σ a (v R) = (Σ a v) R.
With fewer bits the codes cover less of the range, and the rest is clipped: steps become finer.

A token's states depend on no other token, so that it makes no difference how a text is cut, padded or reordered.

Shapes: B batch, T tokens, H_kv key-value heads, D head size, G groups of a head.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from crosslayer.wiring.kv_bits import groups

FILL = 8  # channels are padded to a multiple of it, so that codes fill whole bytes
LARGEST = torch.finfo(torch.float16).max
# Bits → share of the range that codes cover. On SmolLM2, KL with the latest 64 tokens exact is 0.0050, 0.022 and 0.15
# with 4, 3 and 2 bits; over the whole range it is 0.0051, 0.027 and 0.46.
RANGE = {8: 1.0, 4: 0.95, 3: 0.9, 2: 0.75}
SMALLEST = 2.0**-24  # of scales: float16's smallest number
WIDE = 2.0**14  # unit of scales beyond float16's range: keys up to 10⁹ fit, and no byte is added
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class Quantizer(ABC):
    """How states are stored: each token by itself, so that tokens can be appended, selected and reordered."""

    @abstractmethod
    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return what is stored of states (B, H_kv, T, D): tensors (B, H_kv, T, …)."""

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...], out: Tensor) -> None:
        """Write states into `out` (B, H_kv, T, D) from what is stored of them."""

    def rounded(self, states: Tensor) -> Tensor:
        """Return states (B, H_kv, T, D) encoded and decoded."""
        out = torch.empty_like(states)
        self.decode(self.encode(states), out)
        return out


class Float8(Quantizer):
    """float8 with 4 bits of exponent and 3 of mantissa (e4m3), without a scale, as vLLM stores it uncalibrated."""

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return the bits of float8 numbers (B, H_kv, T, D), as uint8, which every operator takes."""
        return (states.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8),)

    def decode(self, stored: tuple[Tensor, ...], out: Tensor) -> None:
        """Write states into `out` (B, H_kv, T, D).

        Shifted by 7 bits and rid of the copy of its sign, a float8 is a float16 that is 2⁸ times too small: exact, and
        much faster than the conversion of torch 2.13 on CPUs (0.11 instead of 1.2 ms for 390,000 numbers).
        """
        half = (stored[0].view(torch.int8).to(torch.int16) << 7) & ~0x4000
        out.copy_(half.view(torch.float16)).mul_(256)


@dataclass(frozen=True)
class Integer(Quantizer):
    """Codes of 2, 3, 4 or 8 bits, with a scale and a smallest value for each group of channels; states are rotated."""

    bits: int

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return packed codes (B, H_kv, T, bytes) and scales (B, H_kv, T, 2G) of states (B, H_kv, T, D)."""
        size = states.shape[-1]
        if not size:  # values of size 0 stand for none
            return states.to(torch.uint8), states.to(torch.float16)
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        grouped = states.unflatten(-1, (groups(size), -1))  # (…, G, D / G)
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        cut = (1 - RANGE[self.bits]) / 2 * (high - low)
        low, high = low + cut, high - cut
        largest = 2**self.bits - 1
        is_wide = torch.maximum(low.abs(), (high - low) / largest) > LARGEST  # (…, G, 1)
        unit = torch.where(is_wide, WIDE, 1.0).to(grouped.dtype)
        # codes are computed from scales as they are stored: rounded to float16
        low = (low / unit).clamp(-LARGEST, LARGEST).to(torch.float16)
        scale = ((high / unit - low) / largest).clamp(SMALLEST, LARGEST).to(torch.float16)
        codes = ((grouped / unit - low) / scale).round().clamp(0, largest).to(torch.uint8).flatten(-2)
        codes = F.pad(codes, (0, -size % FILL))
        return pack(codes, self.bits), torch.cat([torch.where(is_wide, -scale, scale), low], -1).flatten(-2)

    def decode(self, stored: tuple[Tensor, ...], out: Tensor) -> None:
        """Write states into `out` (B, H_kv, T, D)."""
        packed, scales = stored
        if not out.shape[-1]:
            return
        out.copy_(unpack(packed, self.bits)[..., : out.shape[-1]])
        scale, low = scales.to(out.dtype).unflatten(-1, (-1, 2)).split(1, -1)  # (…, G, 1) each
        unit = torch.where(scale < 0, WIDE, 1.0).to(out.dtype)
        out.unflatten(-1, (scale.shape[-2], -1)).mul_(scale.abs() * unit).add_(low * unit)


def rotates(kind: str | None) -> bool:
    """Return whether states of a type are rotated before they are stored."""
    return kind is not None and kind != "fp8"


def rotated(states: Tensor, back: bool = False) -> Tensor:
    """Return states (…, D) rotated, or rotated back."""
    if not states.shape[-1]:
        return states
    work = states.to(torch.promote_types(states.dtype, torch.float32))
    matrix = rotation(states.shape[-1], work.dtype, work.device)
    return (work @ (matrix.T if back else matrix)).to(states.dtype)


def quantizer_of(kind: str) -> Quantizer:
    """Return the quantizer of a type such as "int4" or "fp8"."""
    return Float8() if kind == "fp8" else Integer(int(kind.removeprefix("int")))


@functools.lru_cache(maxsize=64)
def rotation(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an orthogonal matrix (size, size): blocks of a Hadamard matrix with random signs, the same each time.

    A block has the largest power of two that divides `size`.
    """
    block = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    blocks = torch.block_diag(*[hadamard / block**0.5] * (size // block))
    return (signs[:, None] * blocks).to(device, dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes (…, D) of some bits in bytes (…, D · bits / 8); codes that share a byte are D · bits / 8 apart.

    Codes of 3 bits are stored as their two lower bits, and behind them the upper one. bits · D is a multiple of 8.
    """
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], -1)
    packed, *parts = codes.chunk(8 // bits, -1)
    for index, part in enumerate(parts, 1):
        packed = packed | part << (bits * index)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack` packed, (…, D) of uint8; several bytes are shifted at once."""
    if bits == 8:
        return packed
    if bits == 3:
        width = packed.shape[-1] // 3 * 2
        return unpack(packed[..., :width], 2) | unpack(packed[..., width:], 1) << 2
    # words as long as memory allows: 3 bits take half as long with 64-bit integers as eight codes at a time
    steps = (packed.shape[-1], packed.storage_offset(), *packed.stride()[:-1])
    widths = (torch.int64, torch.int32, torch.int16, torch.uint8)
    words = packed.view(next(dtype for dtype in widths if all(step % dtype.itemsize == 0 for step in steps)))
    mask = int.from_bytes(bytes([2**bits - 1]) * words.itemsize)
    return torch.cat([(words >> bits * index) & mask for index in range(8 // bits)], -1).view(torch.uint8)
