"""DenseFormer: after every `period`-th layer the stream becomes a trained weighted sum of all outputs so far.

    Y_i = Σ_{j ≤ i, j ≡ i mod k} a_ij X_j  where p divides i, else X_i;  X_0 the embedding, X_i = layer_i(Y_{i−1})

k is `dilation`, p is `period`. a_ii begins at 1 and the other weights at 0, so that training begins with a plain
Transformer. Layers without any sublayer are not counted.

Flows: outputs of layers, before the weighted sum, until the last layer that sums them. Reads: every `period`-th layer.
Cache: unchanged. Source: DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.method import Carry, Config, Method, Residual, Wiring
from crosslayer.core.sources import Sources, outside_layer_graphs

OUTPUTS = "denseformer.outputs"


@dataclass(frozen=True)
class DenseFormer(Method):
    """The stream is replaced by trained weighted sums over depth."""

    dilation: int = 1
    """k: a layer sums every k-th earlier output."""
    period: int = 1
    """p: every p-th layer sums."""

    def __post_init__(self):
        for option, value in (("dilation", self.dilation), ("period", self.period)):
            if value < 1:
                raise ValueError(f"denseformer: {option} must be at least 1, got {value}")

    def residual(self, config: Config, wiring: Wiring, layer: int, site: str) -> Residual | None:
        """Sum after the last sublayer of each layer; let the very first sublayer pass on the embedding."""
        layers = list(dict.fromkeys(layer for layer, _ in wiring.sublayers))
        summing = len(layers) // self.period * self.period  # the last layer that sums
        if summing == 0 or summing < self.dilation:
            raise ValueError(
                f"denseformer: with dilation {self.dilation} and period {self.period} none of the {len(layers)} layers "
                f"would sum an earlier output; period may be at most {len(layers)}, dilation at most "
                f"{summing or len(layers)}"
            )
        first = (layer, site) == wiring.sublayers[0]
        last = (layer, site) == [sublayer for sublayer in wiring.sublayers if sublayer[0] == layer][-1]
        if not last:
            return _KeepEmbedding() if first else None
        block = layers.index(layer) + 1  # i, which counts from 1
        below = self._kept(block - 1, len(layers)) if block > 1 else [0]
        # the j in the carry, and i: the embedding is not among them where no layer sums it
        available = [*below, block]
        kept = [available.index(j) for j in self._kept(block, len(layers))]
        summed = [index for index, j in enumerate(available) if j % self.dilation == block % self.dilation]
        return _Sum(tuple(kept), tuple(summed) if block % self.period == 0 else (), enters=first)

    def _kept(self, block: int, layers: int) -> list[int]:
        """Return the j whose outputs a layer above `block` sums."""
        readers = range(block + 1, layers + 1)
        residues = {reader % self.dilation for reader in readers if reader % self.period == 0}
        return [j for j in range(block + 1) if j % self.dilation in residues]


class _KeepEmbedding(Residual):
    """Passes the embedding on in the carry, where it enters."""

    enters = True

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return stream, {**carry, OUTPUTS: Sources((stream,))} if self.enters else carry


class _Sum(_KeepEmbedding):
    """Writes Y_i; `kept` and `summed` are indices into the available outputs, the last of which is X_i."""

    def __init__(self, kept: tuple[int, ...], summed: tuple[int, ...], enters: bool):
        super().__init__()
        self.kept, self.summed, self.enters = kept, summed, enters
        self.weights = nn.Parameter(torch.eye(len(summed))[-1]) if summed else None  # (N,), the last is a_ii

    def reset(self) -> None:
        if self.weights is not None:
            init.copy_(self.weights, torch.eye(len(self.summed))[-1].to(self.weights))

    @outside_layer_graphs
    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return Y_i, and keep the outputs that later layers sum."""
        available = (*carry[OUTPUTS], stream + update)
        carry = {**carry, OUTPUTS: Sources([available[index] for index in self.kept])}
        if self.weights is None:
            return available[-1], carry
        total = self.weights[0] * available[self.summed[0]]
        for weight, index in zip(self.weights[1:], self.summed[1:], strict=True):
            total = total + weight * available[index]
        return total, carry
