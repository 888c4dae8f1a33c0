"""Codes of few bits, packed into bytes.

Shapes: D channels; bits · D is a multiple of 8.
"""

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes (…, D) of some bits in bytes (…, D · bits / 8); those that share a byte lie D · bits / 8 apart.

    Codes of 3 bits are stored as their two lower bits, and behind them the upper one.
    """
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], -1)
    parts = codes.chunk(8 // bits, -1)
    packed = parts[0]
    for number, part in enumerate(parts[1:], 1):
        packed = packed | part << (bits * number)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack` packed, (…, D) of uint8; several bytes are shifted at once."""
    if bits == 8:
        return packed
    if bits == 3:
        width = packed.shape[-1] // 3 * 2
        return unpack(packed[..., :width], 2) | unpack(packed[..., width:], 1) << 2
    words = packed.view(_widest(packed))
    mask = int.from_bytes(bytes([2**bits - 1]) * words.itemsize)
    parts = [(words >> bits * number) & mask for number in range(8 // bits)]
    return torch.cat(parts, -1).view(torch.uint8)


def _widest(packed: Tensor) -> torch.dtype:
    """Return the widest integers as which bytes can be viewed."""
    steps = (packed.shape[-1], packed.storage_offset(), *packed.stride()[:-1])
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(step % dtype.itemsize == 0 for step in steps):
            return dtype
    return torch.uint8
