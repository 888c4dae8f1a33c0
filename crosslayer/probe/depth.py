"""What each sublayer reads and adds: the weights of earlier outputs in its input, norms of outputs and of gradients.

    with depth_mixing(model) as mixing:
        model(ids)  # a single sequence
    mixing.readers  # ["0 attn", "0 mlp", …, "output"]
    mixing.table()  # (readers, sources): mean weights over tokens, NaN where a source comes later than its reader

Plain residuals give ones, Attention Residuals α (in blocks, that of the block for each of its sublayers). No module is
asked: token by token, the weights solve x = Σ_j m_j v_j for the read x and the outputs v_j, which has one solution if
there are more channels than sources and none depends on the others.

Source: the depth mixing matrix of "Attention Residuals" (arXiv 2603.15031).
Shapes: N sources, L layers, T tokens, C hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.probe.measures import hidden_norms
from crosslayer.probe.model import evaluating, layer_stack, no_cache
from crosslayer.probe.stream import LayerStream, streams

TOKENS = 64  # of a sequence, evenly spaced: more would change a mean little
OWN = 1e-5  # smallest part of each source that earlier ones do not explain
LOST = 1e-3  # largest part of what is read that no source explains, 1 − the ratio of norms
SUBLAYERS = ("attention", "mlp")


class DepthMixing:
    """The reads and outputs of a forward pass, of `TOKENS` tokens."""

    def __init__(self):
        self.readers: list[str] = []
        self._reads: list[tuple[Tensor, int]] = []  # (T, C), and how many sources there were
        self._sources: list[Tensor] = []  # (T, C)

    def see(self, stream: LayerStream) -> None:
        """Record a layer."""
        if not self._sources:
            self._sources.append(_some(stream.before))
        for site, read, update in zip(("attn", "mlp"), stream.reads, stream.updates, strict=True):
            if update is not None:
                self.read(f"{stream.layer} {site}", update if read is None else read)  # an update explains no read
                self._sources.append(_some(update))

    def read(self, reader: str, read: Tensor) -> None:
        """Record what is read (…, T, C)."""
        self.readers.append(reader)
        self._reads.append((_some(read), len(self._sources)))

    def table(self) -> np.ndarray | None:
        """Return the mean weights (readers, sources); None if the stream is not a sum of these outputs."""
        tokens, channels = self._sources[0].shape
        states = [*self._sources, *(read for read, _ in self._reads)]
        if channels < len(self._sources) or any(state.shape != (tokens, channels) for state in states):
            return None  # of several streams, some states have other shapes
        sources = torch.stack(self._sources, dim=-1)  # (T, C, N)
        basis, factors = torch.linalg.qr(sources)  # (T, C, N), (T, N, N): the first n columns serve the first n sources
        known = (factors.diagonal(dim1=1, dim2=2).abs() > OWN * sources.norm(dim=1)).all(dim=1)  # (T,)
        reads = torch.stack([read for read, _ in self._reads], dim=-1)[known]  # (T, C, M): M readers
        counts = torch.tensor([count for _, count in self._reads], device=reads.device)  # (M,)
        earlier = torch.arange(len(self._sources), device=reads.device)[:, None] < counts  # (N, M)
        inside = (basis[known].mT @ reads) * earlier  # (T, N, M)
        lost = 1 - inside.norm(dim=(0, 1)) / reads.norm(dim=(0, 1))  # (M,)
        if not known.any() or not (lost.abs() < LOST).all():
            return None
        weights = torch.linalg.solve_triangular(factors[known], inside, upper=True).mean(dim=0)  # (N, M)
        return weights.masked_fill(~earlier, torch.nan).T.cpu().numpy()


@contextmanager
def depth_mixing(model: PreTrainedModel) -> Iterator[DepthMixing]:
    """Record a forward pass of a single sequence; hooks are removed on exit."""
    mixing, last = DepthMixing(), []
    norm = dict(model.base_model.named_children()).get("norm")
    hook = None if norm is None else norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    try:
        with streams(model, mixing.see):
            yield mixing
        if last:
            mixing.read("output", last[-1])
    finally:
        if hook is not None:
            hook.remove()


def _some(states: Tensor) -> Tensor:
    states = states.detach().reshape(-1, states.shape[-1])  # (T, C)
    return states[torch.linspace(0, len(states) - 1, min(TOKENS, len(states))).round().long()].double()


def output_norms(model: PreTrainedModel, ids: Tensor) -> dict[str, np.ndarray]:
    """Run a causal model forward and backward over token ids (T,); no gradient of a weight is kept.

    Returns:
        "attention_output_norm" and "mlp_output_norm" (L,): mean L2 norm over tokens of what the sublayer adds;
        "attention_gradient_norm" and "mlp_gradient_norm" (L,): the same of the gradient by it of the tokens' summed
        cross-entropy, in nats. NaN if a layer has no such sublayer.
    """
    outputs: dict[tuple[str, int], Tensor] = {}

    def see(stream: LayerStream) -> None:
        for sublayer, update in zip(SUBLAYERS, stream.updates, strict=True):
            if update is not None:
                outputs[sublayer, stream.layer] = update

    ids = ids[None].to(next(model.parameters()).device)  # (1, T)
    embedding: nn.Module = model.get_input_embeddings()
    # gradients reach the outputs of frozen layers too
    needing = embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    try:
        with torch.enable_grad(), evaluating(model), streams(model, see):
            logits = model(input_ids=ids, **no_cache(model)).logits[0]  # (T, V)
            loss = functional.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="sum")
            gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
    finally:
        needing.remove()
    norms = {
        f"{sublayer}_{what}_norm": np.full(len(layer_stack(model)), np.nan)
        for what in ("output", "gradient")
        for sublayer in SUBLAYERS
    }
    for ((sublayer, layer), output), gradient in zip(outputs.items(), gradients, strict=True):
        norms[f"{sublayer}_output_norm"][layer] = float(hidden_norms(output.detach().flatten(0, -2)).mean())
        if gradient is not None:
            norms[f"{sublayer}_gradient_norm"][layer] = float(hidden_norms(gradient.flatten(0, -2)).mean())
    return norms
