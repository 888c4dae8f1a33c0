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
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.probe.measures import hidden_norms
from crosslayer.probe.model import evaluating, layer_stack, no_cache
from crosslayer.probe.stream import LayerStream, streams

# of a sequence, evenly spaced: more would change a mean little, and QR costs T·C·N²
TOKENS = 64
# The smallest part of each source that earlier ones do not explain. A source that is a sum of earlier ones keeps a rest
# of rounding, about 1e-7 of its norm in float32: as a column of its own it would get any weight.
OWN = 1e-5
# The largest part of what is read that no source explains, 1 − the ratio of norms: rounding of the model's own dtype
# stays below, a read that is no sum of outputs (W_c, maps of streams) does not.
LOST = 1e-3
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


@dataclass(eq=False)
class DepthMixing:
    """The reads and outputs of a forward pass, of `TOKENS` tokens."""

    readers: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    _unknown: dict[str, list[str]] = field(default_factory=dict)  # readers without weights, by the reason
    _reads: list[Read] = field(default_factory=list)
    _sources: list[Tensor] = field(default_factory=list)  # (T, C)
    _last: Tensor | None = None  # (S, T, C), the streams behind the last layer
    _rounding: float = 0.0  # ε of the streams' dtype

    def see(self, stream: LayerStream) -> None:
        """Record a layer."""
        if not self._sources:
            # Streams that begin alike have one source, the embedding: as several, they would depend on one another.
            self._rounding = torch.finfo(stream.entering.dtype).eps
            alike = all(torch.equal(state, stream.entering[0]) for state in stream.entering)
            for index, state in enumerate(stream.entering[:1] if alike else stream.entering):
                self._add("embedding" if alike else f"embedding, stream {index}", state)

        attention, mlp = stream.updates
        updates = (stream.linear_update if attention is None else attention, mlp)
        states = (stream.entering, stream.entering if stream.between is None else stream.between)
        for site, name in enumerate(("attn", "mlp")):
            read, update = stream.reads[site], updates[site]
            if update is not None:
                # Of an unknown read the update stands in for it: an update explains no read, so that its weights are
                # refused as "not a sum of outputs".
                self.read(f"{stream.layer} {name}", update if read is None else read, states[site])
                self._add(f"{stream.layer} {name}", update)
            for block, output in stream.others[site].items():
                self._add(f"{stream.layer} {block}", output)
        self._last = stream.leaving

    def read(self, reader: str, read: Tensor, at: Tensor | None = None) -> None:
        """Record what is read (…, T, C), from the streams `at` (S, T, C) if there are several."""
        several = None if at is None or len(at) == 1 else torch.stack([_some(state) for state in at])
        self.readers.append(reader)
        self._reads.append(Read(_some(read), len(self._sources), several))

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
        counts = [read.known for read in self._reads]
        self._unknown.clear()
        if any(state.shape != (tokens, channels) for state in (*self._sources, *(read.read for read in self._reads))):
            self._unknown["outputs differ in shape"] = []
            return None
        if channels < len(self._sources):
            self._unknown[f"{len(self._sources)} outputs have no unique weights in {channels} channels"] = []
            return None
        weights, lost = self._solved(torch.stack([read.read for read in self._reads], dim=-1), counts)
        if weights is None:
            self._unknown["outputs depend on one another"] = []
            return None

        # `not <`, so that NaN counts as unexplained
        unknown = [reader for reader, part in zip(self.readers, lost.abs().tolist(), strict=True) if not part < LOST]
        if unknown:
            self._unknown["what is read is not a sum of outputs"] = unknown
        if set(unknown) - {OUTPUT}:
            return None
        later = torch.arange(len(self._sources))[:, None] >= torch.tensor(counts)  # (N, M): M readers
        table = weights.mean(dim=0).cpu().masked_fill(later, torch.nan).T.numpy()  # (M, N)
        table[[reader in unknown for reader in self.readers]] = np.nan
        return table

    def by_stream(self) -> StreamWeights | None:
        """Return how readers take from several streams; None for a single stream, or if `table` has no solution."""
        count = max((len(read.streams) for read in self._reads if read.streams is not None), default=1)
        if count == 1 or self.table() is None:
            return None
        weights = np.full((len(self._reads), count), np.nan)
        pairs = np.full((len(self._reads), len(self._sources), count), np.nan)
        for row, read in enumerate(self._reads):
            solution = self._through_streams(read)
            if isinstance(solution, str):
                self._unknown.setdefault(solution, []).append(self.readers[row])
                continue
            taken, held = solution
            weights[row] = taken.mean(dim=0).cpu()
            pairs[row, : read.known] = (held * taken[:, None])[:, : read.known].mean(dim=0).cpu()
        return StreamWeights(weights, pairs)

    def _through_streams(self, read: Read) -> tuple[Tensor, Tensor] | str:
        """Return the weights (T', S) of streams in a read, and of sources in streams (T', N, S), or why there are none.

        T' are the tokens whose streams differ by more than rounding.
        """
        if read.streams is None:
            return "no streams are seen"
        if read.known < len(read.streams):
            return "fewer outputs than streams"
        streams = read.streams.permute(1, 2, 0)  # (T, C, S)
        basis, factors = torch.linalg.qr(streams)
        # √ε: what a stream has of its own carries an error of ε, which the solution divides by that part
        least = self._rounding**0.5 * streams.norm(dim=1)  # (T, S)
        unique = (factors.diagonal(dim1=1, dim2=2).abs() > least).all(dim=1)  # (T,)
        if not unique.any():
            return "streams depend on one another"
        inside = basis[unique].mT @ read.read[unique, :, None]  # (T', S, 1)
        if not abs(1 - inside.norm() / read.read[unique].norm()) < LOST:
            return "more than the streams is read"
        held, lost = self._solved(streams, [read.known] * len(read.streams))  # (T, N, S)
        # `_solved` leaves out tokens whose sources depend on one another: then its tokens are not these any more
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
        # One QR serves all readers: its first n columns are a basis of the first n sources.
        basis, factors = torch.linalg.qr(sources)  # (T, C, N), (T, N, N)
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
    # what the output reads is the input of the final norm, which no layer of the stack sees
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
    """Return `TOKENS` evenly spaced tokens of states (…, T, C) in float64, as a copy that outlives the pass."""
    states = states.detach().reshape(-1, states.shape[-1])  # (T, C)
    return states[torch.linspace(0, len(states) - 1, min(TOKENS, len(states))).round().long()].double()


def output_norms(model: PreTrainedModel, ids: Tensor) -> dict[str, np.ndarray]:
    """Run a causal model forward and backward over token ids (T,); no gradient of a weight is kept.

    Returns:
        "attention_output_norm" and "mlp_output_norm" (L,): mean L2 norm over tokens of what the sublayer adds;
        "attention_gradient_norm" and "mlp_gradient_norm" (L,): the same of the gradient by it of the tokens' summed
        cross-entropy, in nats. NaN if a layer has no such sublayer.
    """
    seen: list[LayerStream] = []
    ids = ids[None].to(next(model.parameters()).device)  # (1, T)
    embedding: nn.Module = model.get_input_embeddings()
    # without a gradient at the embedding, none would reach the outputs of frozen layers
    needing = embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    try:
        with torch.enable_grad(), evaluating(model), streams(model, seen.append):
            logits = model(input_ids=ids, **no_cache(model)).logits[0]  # (T, V)
            loss = functional.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="sum")
            updates: dict[tuple[str, int], Tensor] = {}
            for stream in seen:
                for sublayer, update in zip(SUBLAYERS, stream.updates, strict=True):
                    if update is not None:
                        updates[sublayer, stream.layer] = update
            # not `backward`, which would leave gradients in the weights
            gradients = torch.autograd.grad(loss, list(updates.values()), allow_unused=True)
    finally:
        needing.remove()

    norms = {
        f"{sublayer}_{what}_norm": np.full(len(layer_stack(model)), np.nan)
        for what in ("output", "gradient")
        for sublayer in SUBLAYERS
    }
    for ((sublayer, layer), update), gradient in zip(updates.items(), gradients, strict=True):
        norms[f"{sublayer}_output_norm"][layer] = float(hidden_norms(update.detach().flatten(0, -2)).mean())
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
