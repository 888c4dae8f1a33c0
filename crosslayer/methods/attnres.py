"""Attention Residuals: a sublayer reads a softmax-weighted sum of earlier sublayers' outputs, not their plain sum.

    h_l = Σ_{i<l} α_{i→l} v_i,  α_{i→l} = softmax_i(w_lᵀ RMSNorm_l(v_i)),  v_0 the embedding

Block form: `block` consecutive sublayers are summed into a source, b_n = Σ f_j(h_j); inside a block the running sum is
a source too. Two phases: where a block opens, its sublayers' queries are answered together over the closed blocks
(output o and log-sum-exp s); inside, h = a·o + (1 − a)·v with a = sigmoid(s − wᵀ RMSNorm(v)) adds the running sum v.

Flows: the sources. Reads: every sublayer but the first, which has no choice, and the final norm. Cache: unchanged.
Source: "Attention Residuals" (arXiv 2603.15031); softmax over depth in float32, values raw.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.method import Carry, Method, Residual, Wiring

if TYPE_CHECKING:
    from transformers import LlamaConfig

SOURCES = "attnres.sources"
PHASE = "attnres.phase"


@dataclass(frozen=True)
class AttnRes(Method):
    """Sublayers (attention or MLP) read earlier sublayers, or blocks of them."""

    block: int | None = None
    """How many sublayers form a block; None is the full form, a block for each sublayer."""

    def residual(self, config: "LlamaConfig", wiring: Wiring, layer: int, site: str) -> Residual:
        """Let the sublayer that opens a block hold the queries of all of its block."""
        if site == "attn" and not wiring.reads_input[layer]:
            raise ValueError(
                f"attnres: attention of layer {layer} borrows queries, keys and values and reads no input, so there is "
                "nothing to choose; let the layer own a state or compensate it"
            )
        count, number = len(wiring.sublayers), wiring.sublayers.index((layer, site))
        size = self._size(count)
        place = number % size  # in its block
        without_query = 1 if number < size else 0  # the very first sublayer has a single source and needs no query
        row = place - without_query
        if place > 0:
            return _Depth(config, row, rows=0, opens=False)
        members = min(size, count - number)
        return _Depth(config, row, rows=members - without_query, opens=True)

    def final(self, config: "LlamaConfig", wiring: Wiring) -> Residual:
        """Let the output read with a query and a gain of its own."""
        self._size(len(wiring.sublayers))
        return _Depth(config, 0, rows=1, opens=True)

    def _size(self, count: int) -> int:
        size = 1 if self.block is None else self.block
        if not 1 <= size <= count:
            raise ValueError(f"attnres: block is {size} sublayers; it must be between 1 and the {count} there are")
        return size


class _Depth(Residual):
    """Reads by attention over depth; the stream is the running sum of the open block.

    `row` is the sublayer's place among its block's queries (-1: it has none), `rows` how many of them it owns.
    """

    def __init__(self, config: "LlamaConfig", row: int, rows: int, opens: bool):
        super().__init__()
        self.row, self.opens, self.eps = row, opens, config.rms_norm_eps
        if rows > 0:
            self.query = nn.Parameter(torch.zeros(rows, config.hidden_size))  # (R, C)
            self.gain = nn.Parameter(torch.ones(rows, config.hidden_size))  # (R, C)

    def reset(self) -> None:
        """Begin with uniform attention."""
        if self._parameters:
            init.zeros_(self.query)
            init.ones_(self.gain)

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return Σ α v over the closed blocks and the open block."""
        if not self.opens:
            directions, outs, high, low = carry[PHASE]  # (R, C), (R, B, T, C), (R, B, T) twice
            score = depth_scores(stream, directions[self.row : self.row + 1], self.eps)[0]  # (B, T)
            share = torch.sigmoid(high[self.row].to(score.dtype) + low[self.row] - score).to(outs.dtype)
            return torch.lerp(stream.to(outs.dtype), outs[self.row], share.unsqueeze(-1)), carry
        sources = (*carry.get(SOURCES, ()), stream)
        carry = {**carry, SOURCES: sources}
        if not self._parameters:
            return stream, carry
        directions = self.query * self.gain  # (R, C)
        outs, total = depth_attention(sources, directions, self.eps)  # (R, B, T, C), (R, B, T)
        if len(directions) > self.row + 1:
            high = total.to(stream.dtype)  # two parts, as mixed precision may round a layer's inputs
            low = (total - high).to(stream.dtype)
            carry = {**carry, PHASE: (directions, outs, high, low)}
        return (stream if self.row < 0 else outs[0]), carry

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Begin or continue the running sum of the block."""
        return (update if self.opens else stream + update), carry


def depth_scores(source: Tensor, directions: Tensor, eps: float) -> Tensor:
    """Return wᵀ RMSNorm(v) in float32 for R directions (gain ∘ query, (R, C)) and v (B, T, C): (R, B, T)."""
    wide = torch.promote_types(source.dtype, torch.float32)
    source = source.to(wide)
    norm = torch.rsqrt(source.square().mean(-1, keepdim=True) + eps)
    return (source @ directions.to(wide).T * norm).movedim(-1, 0)  # (B, T, R) → (R, B, T)


def depth_attention(sources: tuple[Tensor, ...], directions: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ softmax_i(wᵀ RMSNorm(v_i)) v_i over sources (B, T, C) for R directions, and the log-sum-exp.

    (R, B, T, C) and (R, B, T); source by source, so that the sources are never copied together.
    """
    scores = torch.stack([depth_scores(source, directions, eps) for source in sources])  # (N, R, B, T)
    shares = scores.softmax(dim=0).to(sources[0].dtype).unsqueeze(-1)  # (N, R, B, T, 1)
    result = shares[0] * sources[0]
    for share, source in zip(shares[1:], sources[1:], strict=True):
        result = result + share * source
    return result, scores.logsumexp(dim=0)
