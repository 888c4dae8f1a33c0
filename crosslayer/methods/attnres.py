"""Attention Residuals: a sublayer reads a softmax-weighted sum of earlier sublayers' outputs, not their plain sum.

    h_l = Σ_{i<l} α_{i→l} v_i,  α_{i→l} = softmax_i(w_lᵀ RMSNorm_l(v_i)),  v_0 the embedding

Block form: `block` consecutive sublayers are summed into one source, b_n = Σ f_j(h_j); inside a block the running sum
is one more source.

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


@dataclass(frozen=True)
class AttnRes(Method):
    """`block`: number of sublayers (attention or MLP) in a block; None is the full form, one sublayer each."""

    block: int | None = None

    def residual(self, config: "CrossLayerConfig", layer: int, site: str) -> Residual:
        """Give every sublayer its own query and gain."""
        sites = config.sublayers
        size = self._size(len(sites))
        index = sites.index((layer, site))
        return _Depth(config.hidden_size, config.rms_norm_eps, first=index == 0, opens=index % size == 0)

    def final(self, config: "CrossLayerConfig") -> Residual:
        """Give the output a query and a gain."""
        self._size(len(config.sublayers))
        return _Depth(config.hidden_size, config.rms_norm_eps, first=False, opens=False)

    def _size(self, count: int) -> int:
        size = 1 if self.block is None else self.block
        if not 1 <= size <= count:
            raise ValueError(f"attnres: block is {size} sublayers; it must be between 1 and the {count} there are")
        return size


class _Depth(Residual):
    """Reads by attention over depth; the stream is the running sum of the open block."""

    def __init__(self, hidden: int, eps: float, first: bool, opens: bool):
        super().__init__()
        self.first, self.opens, self.eps = first, opens, eps
        if not first:
            self.query = nn.Parameter(torch.zeros(hidden))
            self.gain = nn.Parameter(torch.ones(hidden))

    def reset(self) -> None:
        """Begin with uniform attention."""
        if not self.first:
            init.zeros_(self.query)
            init.ones_(self.gain)

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return Σ α v over the closed blocks and the open one."""
        closed: tuple[Tensor, ...] = carry.get(SOURCES, ())
        if self.opens:
            closed = (*closed, stream)
            carry = {**carry, SOURCES: closed}
        if self.first:
            return stream, carry
        sources = closed if self.opens else (*closed, stream)
        return depth_attention(sources, self.query, self.gain, self.eps), carry

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Begin or continue the running sum of the block."""
        return (update if self.opens else stream + update), carry


def depth_attention(sources: tuple[Tensor, ...], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return Σ softmax_i(wᵀ RMSNorm(v_i)) v_i over sources (B, T, C), one at a time so that no (N, B, T, C) is made."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    direction = (query * gain).to(wide)
    logits = torch.stack(
        [(v.to(wide) @ direction) * torch.rsqrt(v.to(wide).square().mean(-1) + eps) for v in sources]
    )  # (N, B, T)
    shares = logits.softmax(dim=0).to(sources[0].dtype).unsqueeze(-1)
    result = shares[0] * sources[0]
    for share, source in zip(shares[1:], sources[1:], strict=True):
        result = result + share * source
    return result


if __name__ == "__main__":
    from crosslayer.decoder.show import show

    show(__spec__.name)
