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
from crosslayer.core.depth_attention.plain import exact, wide

# of a group, at least; with 4 reads of 64 sublayers took 0.52 of one phase instead of 0.37, and more save little, and
# hold more results until they are needed
READERS = 8
# with fewer closed sources, or fewer elements of all of them together, phase 2's operators cost more than reading all
# sources again: benchmarks/two_phase.py, at 2 to 1,024 tokens
FEWEST_SOURCES, FEWEST_ELEMENTS = 4, 1 << 18
# elements of the closed sources that are copied at a time, so that they stay in a core's cache; with 2^17 reads of 64
# sublayers took 0.51 of one phase instead of 0.37
AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class Ahead:
    """What phase 1 has for the readers of a group.

    Attributes:
        readers: (S,), the readers that it answers.
        count: N, the number of closed sources.
        sums: (T, S, C), the weighted sums of the closed sources, normed or not, in float32 or wider.
        totals: (T, S), the log-sum-exp of their scores.
    """

    readers: Sequence[Any]
    count: int
    sums: Tensor
    totals: Tensor

    def to(self, *args: Any, **kwargs: Any) -> "Ahead | None":
        """Return None, as accelerate asks of what enters a layer on another device: the group's queries are here."""
        return None


def pays(closed: Sequence[Tensor]) -> bool:
    """Return whether a group of readers should read closed sources (…, C) in two phases."""
    newest = closed[-1]
    enough = len(closed) >= FEWEST_SOURCES and len(closed) * newest.numel() > FEWEST_ELEMENTS
    return enough and newest.device.type == "cpu" and is_inference()


def read_ahead(
    sources: Sequence[Tensor], readers: Sequence[Any], directions: Tensor, eps: float, normed: bool = False
) -> Ahead:
    """Return the answers of the closed sources (…, C) to readers with directions (S, C): phase 1."""
    width, dtype = directions.shape[1], torch.promote_types(sources[0].dtype, torch.float32)
    rows = [source.reshape(-1, width) for source in sources]  # (T, C) each
    with exact(directions.device):
        directions = directions.to(dtype)
        sums = directions.new_empty(len(rows[0]), len(directions), width)  # (T, S, C)
        totals = directions.new_empty(len(rows[0]), len(directions))  # (T, S)
        step = max(1, AT_ONCE // (len(sources) * width))
        for start in range(0, len(rows[0]), step):
            part = slice(start, start + step)
            stacked = wide(torch.stack([row[part] for row in rows], dim=1))  # (t, N, C)
            inverse = _inverse_rms(stacked, eps)  # (t, N, 1)
            scores = (stacked @ directions.T).mul_(inverse)  # (t, N, S)
            totals[part] = scores.logsumexp(dim=1)
            weights = scores.sub_(totals[part].unsqueeze(1)).exp_()
            weights = (weights.mul_(inverse) if normed else weights).mT.contiguous()  # (t, S, N)
            torch.bmm(weights, stacked, out=sums[part])
    return Ahead(readers, len(sources), sums, totals)


def merge(
    ahead: Ahead, reader: int, own: Sequence[Tensor], direction: Tensor, eps: float, normed: bool = False
) -> Tensor:
    """Return the read (…, C) of a reader of the group, whose own sources are (…, C) each: phase 2."""
    closed, total = ahead.sums[:, reader], ahead.totals[:, reader]  # (T, C), (T,)
    if not own:
        return closed
    with exact(closed.device):
        direction = direction.to(closed.dtype)
        rows = [wide(source.reshape(closed.shape)) for source in own]
        inverse = [_inverse_rms(row, eps) for row in rows]  # (T, 1) each
        scores = [(row @ direction).mul_(each.squeeze(-1)) for row, each in zip(rows, inverse, strict=True)]
        if normed:
            rows = [row * each for row, each in zip(rows, inverse, strict=True)]
        # a block's running sum: products of matrices, one for each token, took twice as long
        if len(rows) == 1:
            return torch.lerp(rows[0], closed, torch.sigmoid(total - scores[0]).unsqueeze(-1))
        weights = torch.stack([total, *scores]).softmax(dim=0).unsqueeze(-1)  # (1 + own, T, 1)
        result = closed * weights[0]
        for row, weight in zip(rows, weights[1:], strict=True):
            result.addcmul_(row, weight)
        return result


def _inverse_rms(source: Tensor, eps: float) -> Tensor:
    """Return 1 / rms(v) of v (…, C): (…, 1), as `inverse_rms` does for autograd, but without a copy of v."""
    squares = torch.linalg.vector_norm(source, dim=-1, keepdim=True).square_()
    return squares.div_(source.shape[-1]).add_(eps).rsqrt_()
