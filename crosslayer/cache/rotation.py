"""How rotary positions turn keys, whatever the model's family.

The angles of one position are in buffers of the model, but which layer uses which buffer, and which channels turn
together, has no common name. The keys of one hidden state at several positions tell: they differ by the rotation alone.

Shapes: T tokens, P positions, D head size, R channels that turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

ORDERS = ("halves", "pairs")  # channel i turns with i + R/2, or with its neighbor


@dataclass(frozen=True)
class Rotation:
    """The angles of one position in radians, of each pair of channels that turns, and their order, one of `ORDERS`.

    Without angles nothing turns.
    """

    angles: tuple[float, ...] = ()
    order: str = ORDERS[0]

    def turns(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions from `start` to `stop`, (T, R/2) each, in float32."""
        return _turns(self.angles, start, stop, device)

    def apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return keys (…, T, D) turned by cosines and sines (…, T, R/2); with −`sin` they are turned back."""
        if not self.angles:
            return keys
        count = 2 * len(self.angles)
        if self.order == "halves":
            first, second = slice(0, count // 2), slice(count // 2, count)
        else:
            first, second = slice(0, count, 2), slice(1, count, 2)
        one, other = keys[..., first], keys[..., second]
        out = torch.empty_like(keys) if count == keys.shape[-1] else keys.clone()
        torch.mul(one, cos, out=out[..., first]).addcmul_(other, sin, value=-1)
        torch.mul(other, cos, out=out[..., second]).addcmul_(one, sin)
        return out


@lru_cache(maxsize=8)
def _turns(angles: tuple[float, ...], start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.arange(start, stop, dtype=torch.float64)
    turns = positions[:, None] * torch.tensor(angles, dtype=torch.float64)
    return turns.cos().float().to(device), turns.sin().float().to(device)


def angle_tables(model: nn.Module) -> list[tuple[float, ...]]:
    """Return the tables of angles among a model's buffers, each once."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]
    return list(dict.fromkeys(tuple(buffer.double().tolist()) for buffer in buffers))


def find_rotation(
    keys: Tensor, positions: Sequence[int], tables: Sequence[tuple[float, ...]], tolerance: float
) -> Rotation | None:
    """Return the rotation that the keys of one hidden state, (…, P, D) in float32, differ by; None if no table fits.

    `positions` begin with 0. `tolerance` is what keys may differ from it, as a share of the largest number.
    """
    still = keys[..., :1, :]
    best, least = None, tolerance * float(still.abs().max())
    for candidate in (Rotation(), *(Rotation(table, order) for table in tables for order in ORDERS)):
        if 2 * len(candidate.angles) > keys.shape[-1]:
            continue
        cos, sin = (turns[list(positions)] for turns in candidate.turns(0, max(positions) + 1, keys.device))
        error = float((candidate.apply(still.expand_as(keys), cos, sin) - keys).abs().max())
        if error <= least:
            best, least = candidate, error
    return best
