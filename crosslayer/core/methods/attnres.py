"""Attention Residuals: a sublayer reads a softmax-weighted sum of earlier sublayers' outputs, not their plain sum.

    h_l = Σ_{i<l} α_{i→l} v_i,  α_{i→l} = softmax_i(w_lᵀ RMSNorm_l(v_i)),  v_0 the embedding

Block form: the outputs of consecutive sublayers are summed into a source, b_n = Σ f_j(h_j); inside a block the running
sum is a source too. Blocks have equal sizes, or each its own.

Released models have forms of their own. Kimi K3 has the block form. Inkling 2 sums normed sources, v_i / rms(v_i), and
its layers with full attention read separately for the inputs of queries, keys and values. It scales scores by 1 / √C,
which a query takes in here (w = q / √C), and norms each of the three inputs with a gain of its own; here a layer has
one gain for them.

Inference on a CPU reads prompts in two phases (`core.depth_attention.two_phase`), unless layers read separately: the
numbers are the same.

The other options are the paper's ablations. They read all sources at each sublayer with plain autograd; only the
published and the released forms have a fast implementation.

Flows: the sources. Reads: every sublayer but the first, and the final norm. Cache: unchanged.
Source: "Attention Residuals" (arXiv 2603.15031); softmax over depth in float32, unnormalized values.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.depth_attention import depth_attention, exact, inverse_rms, keep, two_phase, wide
from crosslayer.core.method import Carry, Config, Method, Residual, Wiring
from crosslayer.core.options import check_choice
from crosslayer.core.sources import Sources, outside_layer_graphs

SOURCES, AHEAD, INPUTS = "attnres.sources", "attnres.ahead", "attnres.inputs"
RELEASED = ("block", "query_init", "values", "queries")  # options that are no ablation


@dataclass(frozen=True)
class AttnRes(Method):
    """Sublayers (attention or MLP) read the outputs of earlier sublayers, or of blocks of them."""

    reads_sources: ClassVar[bool] = True
    block: int | tuple[int, ...] | None = None
    """Sublayers per block, the last block having what is left, or the sublayers of every block; None: the full form,
    where each sublayer is a block."""
    query_init: float = 0.0
    """Standard deviation of the initial queries; 0, as published: all weights begin equal."""

    values: str = "plain"
    """What is summed: "plain" sources, as published and in Kimi K3, or "normed" ones, v / rms(v), as in Inkling 2."""
    queries: int = 1
    """Queries of a sublayer: 1, or 3 for attention to all tokens, as in Inkling 2, which then reads the inputs of its
    queries, keys and values separately."""

    query: str = "static"
    """Where queries come from: "static", a trained vector; "input", a trained map of the normed newest source."""
    weights: str = "softmax"
    """The weights of the sources: "softmax" or "sigmoid" of the scores, or "static", trained numbers."""
    key_norm: bool = True
    """Whether scores use normed sources; without, sources of larger norm get larger scores."""
    depth_heads: int = 1
    """Number of groups of channels, each with its own weights."""
    window: int | None = None
    """How many of the newest sources are read, in addition to the embedding; None: all."""

    def __post_init__(self):
        check_choice("attnres", "query", self.query, ("static", "input"))
        check_choice("attnres", "weights", self.weights, ("softmax", "sigmoid", "static"))
        check_choice("attnres", "values", self.values, ("plain", "normed"))
        check_choice("attnres", "queries", self.queries, (1, 3))
        for option, value in (("depth_heads", self.depth_heads), ("window", self.window)):
            if value is not None and value < 1:
                raise ValueError(f"attnres: {option} must be at least 1, got {value}")
        if not 0 <= self.query_init < math.inf:
            raise ValueError(f"attnres: query_init must be at least 0, got {self.query_init}")
        if self.weights == "static" and (self.query != "static" or not self.key_norm or self.query_init):
            raise ValueError("attnres: weights 'static' has neither queries nor keys; leave their options out")
        if not self.published and (self.queries, self.values) != (1, "plain"):
            raise ValueError("attnres: values and queries are options of the published form; leave out the ablations'")

    @property
    def published(self) -> bool:
        """Whether the options are the paper's form or a released one, with any blocks and any initial queries."""
        ablations = (field for field in fields(self) if field.name not in RELEASED)
        return all(getattr(self, field.name) == field.default for field in ablations)

    def residual(self, config: Config, wiring: Wiring, layer: int, site: str) -> Residual:
        """Let each sublayer but the first read earlier outputs with its own query."""
        if site == "attn" and not wiring.reads_input[layer]:
            raise ValueError(
                f"attnres: attention of layer {layer} reads the queries, keys and values of other layers, so it has no "
                "input to choose; give the layer a state of its own or a compensation"
            )
        sublayer, starts = wiring.sublayers.index((layer, site)), self._starts(len(wiring.sublayers))
        opens = sublayer in starts
        # the embedding, the blocks before; inside a block, its running sum
        sources = bisect_left(starts, sublayer) + 1
        if not self.published:
            return _Ablated(self, config, sources, opens)
        is_full = site == "attn" and config.layer_types is not None and config.layer_types[layer] == "full_attention"
        return _Depth(self, config, sources, opens, len(starts) + 1, self.queries if is_full else 1)

    def final(self, config: Config, wiring: Wiring) -> Residual:
        """Let the output read with its own query and gain."""
        total = len(self._starts(len(wiring.sublayers))) + 1
        if self.window is not None and self.window + 1 >= total:
            raise ValueError(f"attnres: window must be at most {total - 2} of {total} sources, got {self.window}")
        if not self.published:
            return _Ablated(self, config, total, opens=True)
        return _Depth(self, config, total, opens=True, total=total)

    def connect(self, model: nn.Module) -> None:
        """Put readers into groups that read in two phases: whole blocks, until there are enough readers."""
        group: list[_Depth] = []
        for reader in model.modules():  # in the order of the sublayers; the output is the last
            if isinstance(reader, _Depth) and not reader.is_first and self.queries == 1:
                if reader.opens and len(group) >= two_phase.READERS:
                    group = []
                group.append(reader)
                reader.group, reader.leads = group, len(group) == 1

    def _starts(self, count: int) -> list[int]:
        """Return the number of the first sublayer of each block, of `count` sublayers."""
        if isinstance(self.block, tuple):
            if min(self.block, default=0) < 1 or sum(self.block) != count:
                raise ValueError(f"attnres: block must have sizes that sum to {count} sublayers, got {self.block}")
            return [0, *accumulate(self.block[:-1])]
        size = 1 if self.block is None else self.block
        if not 1 <= size <= count:
            raise ValueError(f"attnres: block must be 1 to {count} (the number of sublayers), got {size}")
        return list(range(0, count, size))


class _Reader(Residual):
    """Reads from sources; the newest source is the stream, the running sum of the current block."""

    def __init__(self, sources: int, opens: bool):
        super().__init__()
        self.opens, self.is_first = opens, sources == 1

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Begin or continue the running sum of the block."""
        return (update if self.opens else stream + update), carry


class _Depth(_Reader):
    """Reads by attention over depth, as published, or three times: for the inputs of queries, keys and values."""

    def __init__(self, method: AttnRes, config: Config, sources: int, opens: bool, total: int, queries: int = 1):
        super().__init__(sources, opens)
        self.total, self.eps, self.query_init = total, config.rms_norm_eps, method.query_init
        self.normed, self.reads_apart = method.values == "normed", queries > 1 and not self.is_first
        self.group: list[_Depth] = []  # `connect` fills it; the first leads, and answers the queries of all
        self.leads = False
        # a softmax over the embedding alone is 1: a query would get no gradient, which DDP refuses
        if not self.is_first:
            shape = (queries, config.hidden_size) if self.reads_apart else (config.hidden_size,)
            self.query = nn.Parameter(torch.empty(shape))
            self.gain = nn.Parameter(torch.empty(config.hidden_size))
            if not self.query.is_meta:
                self.reset()

    def reset(self) -> None:
        """Begin with uniform weights, or with random queries."""
        if not self.is_first:
            init.normal_(self.query, std=self.query_init) if self.query_init else init.zeros_(self.query)
            init.ones_(self.gain)

    @outside_layer_graphs
    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return Σ α v over the finished blocks and the current block."""
        closed = carry.get(SOURCES, Sources())
        sources = keep(stream, closed, self.total) if self.opens else closed.with_newest(stream)
        if self.opens:
            closed = sources
            carry = {**carry, SOURCES: closed}
        if self.is_first:
            return stream, carry
        if self.reads_apart:
            directions = self.query * self.gain  # (3, C)
            reads = [depth_attention(sources, direction, self.eps, self.normed) for direction in directions]
            return reads[0], {**carry, INPUTS: tuple(reads)}  # W_c and probes see what queries read
        if self.leads and two_phase.pays(closed):
            # FSDP shards the queries of later layers, and offloading leaves them on the meta device, until their turn
            parameters = [parameter for reader in self.group for parameter in (reader.query, reader.gain)]
            ahead = None
            if all(type(p) is nn.Parameter and p.device == closed[0].device for p in parameters):
                directions = torch.stack([reader.query * reader.gain for reader in self.group])  # (S, C)
                ahead = two_phase.read_ahead(closed, self.group, directions, self.eps, self.normed)
            carry = {**carry, AHEAD: ahead}
        ahead = carry.get(AHEAD)
        # what is there may be another group's, if a probe runs a layer by itself
        if ahead is not None and self in ahead.readers:
            index, direction = ahead.readers.index(self), self.query * self.gain
            read = two_phase.merge(ahead, index, sources[ahead.count :], direction, self.eps, self.normed)
            return read.to(stream.dtype).view(stream.shape), carry
        return depth_attention(sources, self.query * self.gain, self.eps, self.normed), carry

    def inputs(self, read: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of queries, keys and values."""
        return carry[INPUTS] if self.reads_apart else (read, read, read)

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Begin or continue the running sum of the block; later layers do not need the inputs."""
        if self.reads_apart:
            carry = {name: value for name, value in carry.items() if name != INPUTS}
        return super().write(stream, update, carry)


class _Ablated(_Reader):
    """Reads with the options of an ablation."""

    def __init__(self, method: AttnRes, config: Config, sources: int, opens: bool):
        super().__init__(sources, opens)
        width, heads = config.hidden_size, method.depth_heads
        if width % heads:
            raise ValueError(f"attnres: depth_heads must divide hidden_size = {width}, got {heads}")
        self.method, self.eps = method, config.rms_norm_eps
        if self.is_first:
            return
        if method.weights == "static":
            count = sources if method.window is None else min(sources, method.window + 1)
            self.weight = nn.Parameter(torch.full((count, heads), 1 / count))  # (N, H)
            return
        self.query = nn.Parameter(torch.zeros((width, width) if method.query == "input" else (width,)))
        if method.key_norm:
            self.gain = nn.Parameter(torch.ones(width))

    def reset(self) -> None:
        """Begin with uniform weights: 1 / N each, one half for sigmoids."""
        for name, parameter in self._parameters.items():
            value = {"weight": 1 / len(parameter), "query": 0.0, "gain": 1.0}[name]  # type: ignore[arg-type]
            init.constant_(parameter, value)  # type: ignore[arg-type]
            if name == "query" and self.method.query_init:
                init.normal_(parameter, std=self.method.query_init)  # type: ignore[arg-type]

    @outside_layer_graphs
    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return Σ α v over the sources in the window, each head with its own α."""
        sources = carry.get(SOURCES, Sources()).with_newest(stream)
        if self.opens:
            carry = {**carry, SOURCES: sources}
        if self.is_first:
            return stream, carry
        window, heads = self.method.window, self.method.depth_heads
        if window is not None:
            sources = (sources[0], *sources[1:][-window:])
        weights = self._weights(sources)  # (N, …, H)
        terms = [
            weight.to(source.dtype).unsqueeze(-1) * source.unflatten(-1, (heads, -1))  # (B, T, H, C / H)
            for weight, source in zip(weights, sources, strict=True)
        ]
        return functools.reduce(torch.add, terms).flatten(-2), carry

    def _weights(self, sources: Sequence[Tensor]) -> Tensor:
        """Return the weight of each source in each head, (N, B, T, H) or (N, 1, 1, H)."""
        if self.method.weights == "static":
            return self.weight[:, None, None]
        with exact(sources[0].device):
            sources = [wide(source) for source in sources]
            query = self.query.to(sources[0].dtype)
            if self.method.query == "input":
                newest = sources[-1]
                query = nn.functional.linear(newest * inverse_rms(newest, self.eps), query)  # (B, T, C)
            if self.method.key_norm:
                query = query * self.gain
            products = [(source * query).unflatten(-1, (self.method.depth_heads, -1)).sum(dim=-1) for source in sources]
            # the norm is over all channels, whatever the number of heads, and divides the products instead of sources
            if self.method.key_norm:
                products = [p * inverse_rms(source, self.eps) for p, source in zip(products, sources, strict=True)]
            scores = torch.stack(products)  # (N, B, T, H)
        return scores.softmax(dim=0) if self.method.weights == "softmax" else scores.sigmoid()
