"""Record how much of each source a sublayer reads, in models of this package whose residuals weigh sources over depth.

    with depth_reads(model) as reads:
        model(ids)
    reads.readers  # ["0 attn", "0 mlp", …, "output"]
    reads.table()  # (readers, sources): mean weights over tokens, NaN where a source comes later than its reader

Shapes: N sources, the embedding first; B batch, T tokens.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor, nn

from crosslayer.core.method import Carry, Residual


class DepthReads:
    """What was read so far, summed over tokens and forward passes."""

    def __init__(self):
        self._sums: dict[str, np.ndarray] = {}
        self._tokens: dict[str, int] = {}

    @property
    def readers(self) -> list[str]:
        """The sublayers that weigh sources, in the order in which they ran: "3 attn", "3 mlp", at last "output"."""
        return list(self._sums)

    def table(self) -> np.ndarray:
        """Return the mean weights (readers, sources), NaN where a source comes later than its reader."""
        sources = max((len(sums) for sums in self._sums.values()), default=0)
        result = np.full((len(self._sums), sources), np.nan)
        for row, (reader, sums) in enumerate(self._sums.items()):
            result[row, : len(sums)] = sums / self._tokens[reader]
        return result

    def see(self, reader: str, weights: Tensor) -> None:
        """Add the weights (N, B, T) of one call."""
        sums = weights.detach().double().flatten(1).sum(dim=1).cpu().numpy()
        self._sums[reader] = self._sums.get(reader, np.zeros(len(sums))) + sums
        self._tokens[reader] = self._tokens.get(reader, 0) + weights[0].numel()


@contextmanager
def depth_reads(model: nn.Module) -> Iterator[DepthReads]:
    """Record the weights over depth of every forward pass; on exit the model is as it was.

    Nothing is recorded of models without residuals that weigh sources (`Residual.depth_weights`).
    """
    reads, residuals = DepthReads(), {name: m for name, m in model.named_modules() if isinstance(m, Residual)}
    before = {name: vars(residual)["read"] for name, residual in residuals.items() if "read" in vars(residual)}
    try:
        for name, residual in residuals.items():
            match = re.search(r"(\d+)\.(\w+)_residual$", name)
            reader = "output" if match is None else f"{match[1]} {match[2]}"
            vars(residual)["read"] = _recording(residual, reader, reads)  # shadows the method of its class
        yield reads
    finally:
        for name, residual in residuals.items():
            del vars(residual)["read"]
            if name in before:
                residual.read = before[name]


def _recording(residual: Residual, reader: str, reads: DepthReads) -> Callable[[Tensor, Carry], tuple[Tensor, Carry]]:
    read = residual.read

    def recorded(stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        weights = residual.depth_weights(stream, carry)
        if weights is not None:
            reads.see(reader, weights)
        return read(stream, carry)

    return recorded
