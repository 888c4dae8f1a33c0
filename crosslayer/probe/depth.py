"""What each sublayer reads and adds: the weights of earlier outputs in its input, norms of outputs and of gradients.

    with depth_mixing(model) as mixing:
        model(ids)  # a single sequence
    mixing.readers, mixing.sources  # ["0 attn", "0 mlp", …, "output"], ["embedding", "0 attn", …]
    mixing.table()  # (readers, sources): mean weights over tokens, NaN where a source comes later than its reader
    mixing.by_stream()  # of several residual streams: the weight of each, and what it holds

Plain residuals give ones, Attention Residuals α (in blocks, that of the block for each of its sublayers). No module is
asked: token by token, the weights solve x = Σ_j m_j v_j for the read x and the outputs v_j, which has one solution if
there are more channels than sources and none depends on the others.

With several streams (hyper-connections, alternating updates) a sublayer reads x = Σ_k p_k s_k, and each stream is a sum
of the outputs, s_k = Σ_j m_jk v_j. So x takes p_k m_jk of source j through stream k. The p are unique where no stream
is a sum of the others: not before there are as many outputs as streams.

Source: the depth mixing matrix of "Attention Residuals" (arXiv 2603.15031).
Shapes: N sources, S streams, L layers, T tokens, C hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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
OUTPUT = "output"  # the last reader


class Read(NamedTuple):
    """What a sublayer reads, (T, C), how many sources there were, and the streams that it reads from, (S, T, C)."""

    read: Tensor
    known: int
    streams: Tensor | None = None


class StreamWeights(NamedTuple):
    """How readers take from several streams, means over tokens; NaN where no solution is unique.

    Means are over those tokens whose streams differ by more than rounding: each has a part of √ε of its dtype that the
    others do not explain, since errors of ε grow by its inverse.

    Attributes:
        weights: (readers, S), p.
        pairs: (readers, N, S), p_k m_jk: what a reader takes of source j through stream k.
    """

    weights: np.ndarray
    pairs: np.ndarray


class DepthMixing:
    """The reads and outputs of a forward pass, of `TOKENS` tokens."""

    def __init__(self):
        self.readers: list[str] = []
        self.sources: list[str] = []
        self._unknown: dict[str, list[str]] = {}  # readers without weights, by the reason
        self._reads: list[Read] = []
        self._sources: list[Tensor] = []  # (T, C)
        self._last: Tensor | None = None  # (S, T, C), the streams behind the last layer
        self._rounding = 0.0  # ε of the streams' dtype

    def see(self, stream: LayerStream) -> None:
        """Record a layer."""
        if not self._sources:
            self._begin(stream.entering)
        between = stream.entering if stream.between is None else stream.between
        at, outputs = (stream.entering, between), (stream.updates[0], stream.updates[1])
        if outputs[0] is None:
            outputs = (stream.linear_update, outputs[1])
        for number, (site, read, update) in enumerate(zip(("attn", "mlp"), stream.reads, outputs, strict=True)):
            if update is not None:
                # an update explains no read
                self.read(f"{stream.layer} {site}", update if read is None else read, at[number])
                self._add(f"{stream.layer} {site}", update)
            for name, other in stream.others[number].items():
                self._add(f"{stream.layer} {name}", other)
        self._last = stream.leaving

    def read(self, reader: str, read: Tensor, at: Tensor | None = None) -> None:
        """Record what is read (…, T, C), from the streams `at` (S, T, C) if there are several."""
        several = None if at is None or len(at) == 1 else torch.stack([_some(one) for one in at])
        self.readers.append(reader)
        self._reads.append(Read(_some(read), len(self._sources), several))

    def _begin(self, entering: Tensor) -> None:
        """Begin with the embedding, or with what each stream has of it (S, T, C) if they differ."""
        self._rounding = torch.finfo(entering.dtype).eps
        alike = all(torch.equal(one, entering[0]) for one in entering)
        for number, one in enumerate(entering[:1] if alike else entering):
            self._add("embedding" if alike else f"embedding, stream {number}", one)

    def _add(self, name: str, output: Tensor) -> None:
        self.sources.append(name)
        self._sources.append(_some(output))

    @property
    def why(self) -> str | None:
        """What is not known, and why, of what was asked so far: "fewer outputs than streams (0 attn, 0 mlp)"."""
        parts = [f"{reason} ({', '.join(readers)})" if readers else reason for reason, readers in self._unknown.items()]
        return "; ".join(parts) or None

    def table(self) -> np.ndarray | None:
        """Return the mean weights (readers, sources); None if the stream is not a sum of these outputs.

        What the output reads may be something else, as in Gemma 3n, which maps its streams: then it has no weights.
        """
        tokens, channels = self._sources[0].shape
        self._unknown.clear()
        if any(state.shape != (tokens, channels) for state in (*self._sources, *(one.read for one in self._reads))):
            self._unknown["outputs differ in shape"] = []
            return None
        if channels < len(self._sources):
            self._unknown[f"{len(self._sources)} outputs have no unique weights in {channels} channels"] = []
            return None
        reads = torch.stack([one.read for one in self._reads], dim=-1)  # (T, C, M): M readers
        weights, lost = self._solved(reads, [one.known for one in self._reads])
        if weights is None:
            self._unknown["outputs depend on one another"] = []
            return None
        unknown = [reader for reader, part in zip(self.readers, lost.abs().tolist(), strict=True) if not part < LOST]
        if unknown:
            self._unknown["what is read is not a sum of outputs"] = unknown
        if set(unknown) - {OUTPUT}:
            return None
        later = torch.arange(len(self._sources))[:, None] >= torch.tensor([one.known for one in self._reads])  # (N, M)
        table = weights.mean(dim=0).cpu().masked_fill(later, torch.nan).T.numpy()  # (M, N)
        table[[reader in unknown for reader in self.readers]] = np.nan
        return table

    def by_stream(self) -> StreamWeights | None:
        """Return how readers take from several streams; None for a single stream, or if `table` has no solution."""
        count = max((len(one.streams) for one in self._reads if one.streams is not None), default=1)
        if count == 1 or self.table() is None:
            return None
        weights = np.full((len(self._reads), count), np.nan)
        pairs = np.full((len(self._reads), len(self._sources), count), np.nan)
        for row, one in enumerate(self._reads):
            found = self._through_streams(one)
            if isinstance(found, str):
                self._unknown.setdefault(found, []).append(self.readers[row])
                continue
            taken, held = found
            weights[row] = taken.mean(dim=0).cpu()
            pairs[row, : one.known] = (held * taken[:, None])[:, : one.known].mean(dim=0).cpu()
        return StreamWeights(weights, pairs)

    def _through_streams(self, one: Read) -> tuple[Tensor, Tensor] | str:
        """Return the weights (T', S) of streams in a read, and of sources in streams (T', N, S), or why there are none.

        T' are the tokens whose streams differ by more than rounding.
        """
        if one.streams is None:
            return "no streams are seen"
        if one.known < len(one.streams):
            return "fewer outputs than streams"
        streams = one.streams.permute(1, 2, 0)  # (T, C, S)
        basis, factors = torch.linalg.qr(streams)
        least = self._rounding**0.5 * streams.norm(dim=1)  # (T, S)
        unique = (factors.diagonal(dim1=1, dim2=2).abs() > least).all(dim=1)  # (T,)
        if not unique.any():
            return "streams depend on one another"
        inside = basis[unique].mT @ one.read[unique, :, None]  # (T', S, 1)
        if not abs(1 - inside.norm() / one.read[unique].norm()) < LOST:
            return "more than the streams is read"
        held, lost = self._solved(streams, [one.known] * len(one.streams))  # (T, N, S)
        if held is None or len(held) < len(unique) or not (lost.abs() < LOST).all():
            return "what streams hold is not a sum of outputs"
        taken = torch.linalg.solve_triangular(factors[unique], inside, upper=True)[..., 0]  # (T', S)
        return taken, held[unique]

    def _solved(self, states: Tensor, counts: list[int]) -> tuple[Tensor | None, Tensor]:
        """Return the weights (T', N, M) of sources in states (T, C, M), and which part of each none explains, (M,).

        The sources of state m are the first `counts[m]`. T' are the tokens whose sources do not depend on one another;
        None if there are none.
        """
        sources = torch.stack(self._sources, dim=-1)  # (T, C, N)
        basis, factors = torch.linalg.qr(sources)  # (T, C, N), (T, N, N): the first n columns serve the first n sources
        known = (factors.diagonal(dim1=1, dim2=2).abs() > OWN * sources.norm(dim=1)).all(dim=1)  # (T,)
        if not known.any():
            return None, torch.full((states.shape[-1],), torch.nan)
        earlier = torch.arange(len(self._sources), device=states.device)[:, None] < states.new_tensor(counts)  # (N, M)
        inside = (basis[known].mT @ states[known]) * earlier  # (T', N, M)
        lost = 1 - inside.norm(dim=(0, 1)) / states[known].norm(dim=(0, 1))  # (M,)
        return torch.linalg.solve_triangular(factors[known], inside, upper=True), lost


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
            mixing.read(OUTPUT, last[-1], mixing._last)
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


def log_slope(norms: np.ndarray) -> float:
    """Return the slope of the logarithm of norms (L,) over layers, in nats a layer, by least squares.

    Layers without a norm, or with none of size, are left out; NaN if fewer than two are left.
    """
    layers = np.flatnonzero(np.nan_to_num(norms) > 0)
    if len(layers) < 2:
        return np.nan
    return float(np.polyfit(layers, np.log(norms[layers]), 1)[0])
