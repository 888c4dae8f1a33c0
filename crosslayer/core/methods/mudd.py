"""Multiway dynamic dense connections: after each layer, all outputs so far are summed with token-dependent weights.

    X̄_i^w = Σ_{j≤i} A_ij^w(X_i) X_j,  A_i^w(X_i) = GELU(RMSNorm(X_i) W₁) W₂ + a_i^w,  X_0 the embedding

There is a sum for each way w: the residual stream of the next layer, and the inputs of its queries, keys and values.
X_i is the output of layer i. The RMSNorm has no gain; the ways share W₁, which has 4 (i + 1) columns, or i + 1 with the
residual way alone. W₂ begins at zero and a_i selects X_i, so that training begins with a plain Transformer. Ways that
nothing reads are left out: those of queries, keys and values after the last layer, and before a layer that reads
another layer's state or has no attention. Queries, keys and values of a layer share the gain of its norm, while the
published model has three; its optional norms before and after the sums (PrePostNorm) are not implemented.

Flows: the outputs of the layers. Reads: every layer but the first, and the final norm. Cache: unchanged.
Source: MUDDFormer (arXiv 2502.12170).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init

from crosslayer.core.depth_attention import inverse_rms, wide
from crosslayer.core.method import Carry, Config, Method, Residual, Wiring
from crosslayer.core.options import check_choice
from crosslayer.core.plan import STATES
from crosslayer.core.sources import Sources, outside_layer_graphs

SOURCES = "mudd.sources"
INPUTS = "mudd.inputs"


@dataclass(frozen=True)
class Mudd(Method):
    """Layers read weighted sums of the outputs of all earlier layers."""

    ways: str = "all"
    """Which inputs get a sum of their own: "all" (queries, keys, values and the residual stream) or only "residual"."""

    def __post_init__(self):
        check_choice("mudd", "ways", self.ways, ("all", "residual"))

    def residual(self, config: Config, wiring: Wiring, layer: int, site: str) -> Residual:
        """Sum after the last sublayer of each layer."""
        sublayer = wiring.sublayers.index((layer, site))
        above = wiring.sublayers[sublayer + 1 :]
        if above and above[0][0] == layer:
            return _Dense(sublayer == 0)
        sources = 1 + len({index for index, _ in wiring.sublayers[: sublayer + 1]})
        # an input of its own for each state that the next sublayer computes, and the residual stream
        ways: tuple[int | None, ...] = (None,)
        if above and above[0][1] == "attn" and self.ways == "all":
            reader = above[0][0]
            ways = (*[index for index, state in enumerate(STATES) if reader in wiring.plan.own_layers(state)], None)
        return _Sum(config, sublayer == 0, sources, ways, inner=sources * (4 if self.ways == "all" else 1))


class _Dense(Residual):
    """Adds to the stream; the very first sublayer keeps it as the first source."""

    def __init__(self, first: bool):
        super().__init__()
        self.first = first

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return stream, {**carry, SOURCES: Sources((stream,))} if self.first else carry

    def inputs(self, read: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of queries, keys and values: their sums, or the stream if there is none."""
        ways = carry.get(INPUTS, {})
        return ways.get(0, read), ways.get(1, read), ways.get(2, read)


class _Sum(_Dense):
    """The last sublayer of a layer: sums the outputs of the layers, J sources, for each of W ways.

    `ways` holds the index in `STATES` of each state with its own input, and None for the residual stream.
    """

    def __init__(self, config: Config, first: bool, sources: int, ways: tuple[int | None, ...], inner: int):
        super().__init__(first)
        self.ways, self.eps = ways, config.rms_norm_eps
        self.inner = nn.Parameter(torch.zeros(inner, config.hidden_size))  # W₁
        self.outer = nn.Parameter(torch.zeros(len(ways) * sources, inner))  # W₂: (W·J, inner)
        self.base = nn.Parameter(torch.eye(sources)[-1].repeat(len(ways), 1))  # a: (W, J), 1 for the newest

    def reset(self) -> None:
        # normed inputs, so that what GELU gets has a variance of 1
        init.normal_(self.inner, mean=0.0, std=self.inner.shape[1] ** -0.5)
        init.zeros_(self.outer)
        init.copy_(self.base, torch.eye(self.base.shape[1])[-1].expand_as(self.base).to(self.base))

    @outside_layer_graphs
    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the sum for the residual stream; those for queries, keys and values go into the carry."""
        sources = carry[SOURCES].with_newest(stream + update)

        # A of the layer's output, in float32 or wider, tokens last in memory
        output = wide(sources[-1])
        inner = functional.gelu(output @ self.inner.to(output.dtype).T * inverse_rms(output, self.eps))
        dynamic = (inner @ self.outer.to(output.dtype).T).movedim(-1, 0)  # (W·J, B, T)
        weights = dynamic.unflatten(0, self.base.shape) + self.base.to(output.dtype)[:, :, None, None]  # (W, J, B, T)

        sums = {}
        by_way = weights.to(sources[-1].dtype).unsqueeze(-1).unbind()  # (J, B, T, 1) each
        for way, shares in zip(self.ways, by_way, strict=True):
            # source by source: as one product they would be copied side by side first
            total = shares[-1] * sources[-1]
            for share, source in zip(shares[:-1], sources[:-1], strict=True):
                total = torch.addcmul(total, share, source)
            sums[way] = total
        return sums.pop(None), {**carry, SOURCES: sources, INPUTS: sums}
