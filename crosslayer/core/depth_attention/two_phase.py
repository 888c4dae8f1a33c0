"""Attention over depth in two phases: a group of readers shares one pass over the sources that exist when it begins.

One phase reads all sources again at each reader. Here the first reader of a group answers the queries of all its
readers over the sources so far, the *closed* ones (phase 1). Each later reader attends to the sources since then, its
*own*, and merges both by online softmax (phase 2):

    h = σ(c - o) h_closed + σ(o - c) h_own,   c and o the log-sum-exp of the scores of closed and own sources

The numbers are those of one phase, in another order of sums. For inference on a CPU: a gradient would need the scores
of both phases, and on a GPU one fused kernel does all of a read.

Source: "Attention Residuals" (arXiv 2603.15031), two-phase computation, there for blocks; with groups of readers it
serves the full form too. Shapes: T tokens of all sequences, N closed sources, S readers of a group, C hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crosslayer.core.depth_attention.operators import is_inference
from crosslayer.core.depth_attention.plain import exact, inverse_rms, wide

READERS = 8  # of a group, at least; more save little, and hold more results until they are needed
FEWEST_TOKENS = 32  # with fewer, phase 2's operators cost more than reading all sources: benchmarks/two_phase.py
AT_ONCE = 1 << 20  # elements of the closed sources that are copied at a time, so that they stay in a core's cache


@dataclass(frozen=True, eq=False)
class Ahead:
    """What phase 1 has for the readers of a group.

    Attributes:
        readers: (S,), the readers that it answers.
        count: N, the number of closed sources.
        sums: (S, T, C), the weighted sums of the closed sources, in float32 or wider.
        totals: (S, T), the log-sum-exp of their scores.
    """

    readers: Sequence[Any]
    count: int
    sums: Tensor
    totals: Tensor

    def to(self, *args: Any, **kwargs: Any) -> "Ahead | None":
        """Return None, as accelerate asks of what enters a layer on another device: the group's queries are here."""
        return None


def pays(source: Tensor) -> bool:
    """Return whether to read the sources of tokens (…, C) in two phases."""
    return source.device.type == "cpu" and source.numel() >= FEWEST_TOKENS * source.shape[-1] and is_inference()


def read_ahead(sources: Sequence[Tensor], readers: Sequence[Any], directions: Tensor, eps: float) -> Ahead:
    """Return the answers of the closed sources (…, C) to readers with directions (S, C): phase 1."""
    width = directions.shape[1]
    rows = [source.reshape(-1, width) for source in sources]  # (T, C) each
    with exact(directions.device):
        dtype = wide(sources[0]).dtype
        directions = directions.to(dtype)
        sums = directions.new_empty(len(directions), len(rows[0]), width)  # (S, T, C)
        totals = directions.new_empty(sums.shape[:2])
        step = max(1, AT_ONCE // (len(sources) * width))
        for start in range(0, len(rows[0]), step):
            part = slice(start, start + step)
            some, total = _attend([row[part] for row in rows], directions, eps)
            sums[:, part], totals[:, part] = some.transpose(0, 1), total.T
    return Ahead(readers, len(sources), sums, totals)


def merge(ahead: Ahead, reader: int, own: Sequence[Tensor], direction: Tensor, eps: float) -> Tensor:
    """Return the read (…, C) of a reader of the group, whose own sources are (…, C) each: phase 2."""
    closed = ahead.sums[reader]  # (T, C)
    if not own:
        return closed
    rows = [source.reshape(closed.shape) for source in own]
    with exact(closed.device):
        some, total = _attend(rows, direction[None].to(closed.dtype), eps)  # (T, 1, C), (T, 1)
        weight = torch.sigmoid(ahead.totals[reader, :, None] - total)
        return torch.lerp(some.squeeze(1), closed, weight)


def _attend(sources: Sequence[Tensor], directions: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the weighted sums (T, S, C) and log-sum-exps (T, S) of sources (T, C) for directions (S, C)."""
    stacked = wide(torch.stack(tuple(sources), dim=1))  # (T, N, C)
    scores = (stacked @ directions.T) * inverse_rms(stacked, eps)  # (T, N, S)
    totals = scores.logsumexp(dim=1, keepdim=True)  # (T, 1, S)
    return (scores - totals).exp_().mT @ stacked, totals.squeeze(1)
