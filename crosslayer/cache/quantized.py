"""Keys and values of a cache layer that are quantized.

With 8 bits or float8 all tokens are read back as they are stored. Below, a query reads the first token and the latest
ones exactly, all others quantized. The tokens of a call read one another exactly, unless the model runs under
`smaller_cache`: there it makes no difference how a text is cut into calls.

Shapes: B batch, T new tokens, S cached + new tokens, H_kv key-value heads, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crosslayer.cache.columns import Columns
from crosslayer.cache.offsets import KeyOffset
from crosslayer.cache.quantizers import quantizer_of, rotated, rotates
from crosslayer.wiring.kv_bits import keeps_recent


@dataclass
class Reading:
    """Which columns of a cache are tokens, and how many of the latest stay exact, the same for all layers.

    `kept` is how many of the latest columns stay exact until the next call; `recent` is that of tokens which a query
    reads exactly, itself included. `ranks` (B or 1, S) counts the tokens of a text up to a column, without padding;
    None: each column is a token. `smaller_cache` sets `ranks` and `kept` before each call.
    """

    recent: int
    kept: int
    ranks: Tensor | None = None

    def positions(self, start: int, end: int, device: torch.device) -> Tensor:
        """Return the positions of columns in their texts, (B or 1, end - start)."""
        if self.ranks is None:
            return torch.arange(start, end, device=device)[None]
        return (self.ranks[:, start:end] - 1).clamp_min(0).to(device)


def first_exact(ranks: Tensor, rank: Tensor, recent: int) -> Tensor:
    """Return the first column (B or 1,) that a text's token number `rank` (B or 1,) reads exactly."""
    return (ranks <= (rank - recent).clamp_min(0)[:, None]).sum(-1)


class Quantized(Columns):
    """Keys or values that are quantized; below 8 bits not the first token of a text, nor the latest ones.

    `first` (B, H_kv, 1, D) replaces the codes of the first token. Behind the columns with codes come those
    that the next query reads exactly, as they are: `tail` (B, H_kv, at most `reading.kept`, D). If the type wants it,
    states are rotated; they come back so if `returns_rotated`. `offset` is subtracted from the keys, which are the
    first heads, before they are rounded.
    """

    def __init__(self, kind: str, reading: Reading, returns_rotated: bool, offset: KeyOffset | None = None):
        super().__init__()
        self.quantizer, self.reading = quantizer_of(kind), reading
        self.keeps_recent = keeps_recent(kind) and reading.recent > 0
        self.rotates, self.returns_rotated = rotates(kind), returns_rotated
        self.first = self.tail = torch.empty(0)
        self.offset = offset if self.rotates else None

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return the codes of the next states (B, H_kv, T, D), rotated already, and what belongs to them."""
        return self.quantizer.encode(self._shifted(states.clone(), self.used, -1))

    def update(self, states: Tensor) -> Tensor:
        """Store new states (B, H_kv, T, D); return all, (B, H_kv, S, D), the new and the latest ones exact."""
        # columns that have no codes yet; the oldest of them are quantized now
        states = rotated(states) if self.rotates else states
        exact = torch.cat([self.tail, states], 2) if self.tail.numel() else states
        before, leaving = self.used, exact.shape[2]
        if self.keeps_recent:
            leaving = max(0, leaving - self.reading.kept)
            if before + leaving == 1:  # the first token, which is exact
                leaving = 0
            self.tail = exact[:, :, leaving:].clone()  # a view would hold all of it
            if leaving:  # keep the first tokens that are among those that get codes
                column, inside = self._first_column(exact[:, :, :leaving], self.used)
                picked = exact.gather(2, column)
                self.first = torch.where(inside, picked, self.first) if self.first.numel() else picked
        self.append(exact[:, :, :leaving])

        # what this call reads: what had codes before it, or with 8 bits and fp8 all, and the others exactly
        quantized = before if self.keeps_recent else self.used  # columns that are read as their codes say
        read = states.new_empty((*states.shape[:2], before + exact.shape[2], states.shape[3]))
        if quantized:
            codes = tuple(tensor[:, :, :quantized] for tensor in self.memory)
            self.quantizer.decode(codes, read[:, :, :quantized])
            self._shifted(read[:, :, :quantized], 0, 1)
            if self.keeps_recent:  # the first tokens are exact
                column, inside = self._first_column(read[:, :, :quantized], 0)
                read.scatter_(2, column, torch.where(inside, self.first, read.gather(2, column)))
        read[:, :, quantized:] = exact[:, :, quantized - before :]
        return rotated(read, back=True) if self.rotates and not self.returns_rotated else read

    def _first_column(self, states: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens in states (B, H_kv, T, D) of columns from `start` on, and whether they are there.

        Shapes: (B, H_kv, 1, D) and (B or 1, 1, 1, 1).
        """
        ranks = self.reading.ranks
        if ranks is None:
            first = torch.zeros(1, dtype=torch.long, device=states.device)
        else:
            first = (ranks == 0).sum(-1).to(states.device)  # behind the padding
        column = (first - start)[:, None, None, None]
        last = states.shape[2] - 1
        return column.clamp(0, last).expand(*states.shape[:2], 1, states.shape[3]), (column >= 0) & (column <= last)

    def _shifted(self, states: Tensor, start: int, sign: int) -> Tensor:
        """Add the keys' offset to states (B, H_kv, T, D) of columns from `start` on, or subtract it; return them."""
        if self.offset is not None and states.shape[2]:
            positions = self.reading.positions(start, start + states.shape[2], states.device)
            states[:, : len(self.offset.mean)].add_(self.offset.at(positions), alpha=sign)
        return states

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch, in this order; a row may occur several times."""
        super().select(rows)
        self.first, self.tail = (
            tensor[rows.to(tensor.device)] if tensor.numel() else tensor for tensor in (self.first, self.tail)
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that is allocated."""
        return *self.memory, self.first, self.tail
