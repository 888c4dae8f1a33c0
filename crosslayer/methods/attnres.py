"""Attention Residuals: a sublayer reads a softmax-weighted sum of earlier sublayers' outputs, not their plain sum.

    h_l = Σ_{i<l} α_{i→l} v_i,  α_{i→l} = softmax_i(w_lᵀ RMSNorm_l(v_i)),  v_0 the embedding

Block form: `block` consecutive sublayers are summed into one source, b_n = Σ f_j(h_j); inside a block the running sum
is one more source. Two phases: where a block opens, its sublayers' queries are answered together over the closed blocks
(output o and log-sum-exp s); inside, h = a·o + (1 − a)·v with a = sigmoid(s − wᵀ RMSNorm(v)) adds the running sum v.

Flows: the sources. Reads: every sublayer but the first, which has one source, and the final norm. Cache: unchanged.
Source: "Attention Residuals" (arXiv 2603.15031); softmax over depth in float32, values raw.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.method import Carry, Method, Residual

if TYPE_CHECKING:
    from crosslayer.decoder.configuration import CrossLayerConfig

SOURCES = "attnres.sources"
PHASE = "attnres.phase"


@dataclass(frozen=True)
class AttnRes(Method):
    """`block`: number of sublayers (attention or MLP) in a block; None is the full form, one sublayer each."""

    block: int | None = None

    def residual(self, config: "CrossLayerConfig", layer: int, site: str) -> Residual:
        """Give the sublayer that opens a block the queries of all of its block."""
        if site == "attn" and not config.reads_input(layer):
            raise ValueError(
                f"attnres: attention of layer {layer} borrows queries, keys and values and reads no input, so there is "
                "nothing to choose; let the layer own a state or compensate it"
            )
        sites = config.sublayers
        size = self._size(len(sites))
        index = sites.index((layer, site))
        row, rows = index % size, min(size, len(sites) - index)
        opens, skipped = row == 0, index < size  # the very first sublayer has one source and needs no query
        return _Depth(config, row - skipped, rows - skipped if opens else 0, opens)

    def final(self, config: "CrossLayerConfig") -> Residual:
        """Give the output a query and a gain."""
        self._size(len(config.sublayers))
        return _Depth(config, 0, 1, opens=True)

    def _size(self, count: int) -> int:
        size = 1 if self.block is None else self.block
        if not 1 <= size <= count:
            raise ValueError(f"attnres: block is {size} sublayers; it must be between 1 and the {count} there are")
        return size


class _Depth(Residual):
    """Reads by attention over depth; the stream is the running sum of the open block.

    `row` is the sublayer's place among its block's queries (-1: it has none), `rows` how many of them it owns.
    """

    def __init__(self, config: "CrossLayerConfig", row: int, rows: int, opens: bool):
        super().__init__()
        self.row, self.opens, self.eps = row, opens, config.rms_norm_eps
        if rows > 0:
            self.query = nn.Parameter(torch.zeros(rows, config.hidden_size))
            self.gain = nn.Parameter(torch.ones(rows, config.hidden_size))

    def reset(self) -> None:
        """Begin with uniform attention."""
        if self._parameters:
            init.zeros_(self.query)
            init.ones_(self.gain)

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return Σ α v over the closed blocks and the open one."""
        if not self.opens:
            directions, outs, high, low = carry[PHASE]
            score = depth_scores(stream, directions[self.row : self.row + 1], self.eps)[0]
            share = torch.sigmoid(high[self.row].to(score.dtype) + low[self.row] - score).to(outs.dtype)
            return torch.lerp(stream.to(outs.dtype), outs[self.row], share.unsqueeze(-1)), carry
        sources = (*carry.get(SOURCES, ()), stream)
        carry = {**carry, SOURCES: sources}
        if not self._parameters:
            return stream, carry
        directions = self.query * self.gain
        outs, total = depth_attention(sources, directions, self.eps)
        if len(directions) > self.row + 1:
            high = total.to(stream.dtype)  # two parts, as mixed precision may round what a layer is given
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
    return (source @ directions.to(wide).T * norm).movedim(-1, 0)


def depth_attention(sources: tuple[Tensor, ...], directions: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ softmax_i(wᵀ RMSNorm(v_i)) v_i over sources (B, T, C) for R directions, and the log-sum-exp.

    (R, B, T, C) and (R, B, T); one source at a time, so that the sources are never copied into one tensor.
    """
    scores = torch.stack([depth_scores(source, directions, eps) for source in sources])  # (N, R, B, T)
    shares = scores.softmax(dim=0).to(sources[0].dtype).unsqueeze(-1)
    result = shares[0] * sources[0]
    for share, source in zip(shares[1:], sources[1:], strict=True):
        result = result + share * source
    return result, scores.logsumexp(dim=0)


if __name__ == "__main__":
    from crosslayer.show import show

    show(__name__)
