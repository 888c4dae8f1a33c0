"""The wiring of a model, as read from its config, and the size of its KV cache."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field

from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.output.formatting import UNKNOWN, Shown, Table, percent, ranges, readable_bytes
from crosslayer.output.record import Frozen
from crosslayer.wiring.engines import StoredLayer, allocated, check_engine, fixed_bytes
from crosslayer.wiring.states import FLOAT32, ItemSizes, LayerStates

MOST_TOKENS = 2**40  # beyond any context
SIXTEEN_BITS = 2  # bytes
SHARE = "of the 16-bit cache"
COLUMNS = ["stored", SHARE, "read per decoding step"]


class PlannedLength(Frozen):
    """Bytes at a length: stored, read for the last token, and of the 16-bit cache."""

    length: int = Field(ge=1)
    stored_bytes: int = Field(ge=0)
    read_bytes: int = Field(ge=0)
    full_bytes: int = Field(ge=0)

    def cells(self) -> list[str]:
        """Return the cells of `COLUMNS`."""
        share = percent(self.stored_bytes / self.full_bytes, 1) if self.full_bytes else UNKNOWN
        return [readable_bytes(self.stored_bytes), share, readable_bytes(self.read_bytes)]


def methods_table(length: int, methods: Iterable[tuple[str, PlannedLength | None, str]]) -> Table:
    """Return the table of methods: name, sizes with it (None: not possible), and what a pretrained model needs."""
    rows = []
    for method, sizes, pretrained in methods:
        rows.append([method, *([UNKNOWN] * 3 if sizes is None else sizes.cells()), pretrained])
    title = f"With sharing across layers, at {length:,} tokens"
    return title, ["method", *COLUMNS, "in a pretrained model"], rows


class Sharing(NamedTuple):
    """A cross-layer method, the model's plan with it, None if it is not possible, and what a pretrained model needs."""

    method: str
    plan: "ModelPlan | None"
    pretrained: str


@dataclass(frozen=True)
class ModelPlan(Shown):
    """The wiring of a model with L layers, read from its config, and the bytes of its KV cache.

    Bytes are those of `batch` sequences of `length` tokens, unless a function takes another length.

    Attributes:
        model: its name.
        type: the config's `model_type`.
        plan: which layer reads which states.
        layers: (L,), each layer's mask and cached states.
        residual: a description of the residual connection.
        streams: number of residual streams.
        methods: names of the cross-layer methods, in list order.
        caches: whether the model keeps a cache; encoders do not.
        lengths: tokens of a sequence, one or several.
        batch: number of sequences.
        dtype: dtype of the model.
        kv_dtype: type of keys and values in the cache.
        sizes: bytes per element of both.
        engine: whose allocation is counted: transformers, vllm or llama.cpp.
        weights_bytes: bytes of the weights, None if they are not known.
        parameters: number of parameters from which these are counted, None if they are the bytes of files.
        memory: bytes for weights and cache together, None if they were not asked for.
        shared: the same with methods that share across layers.
    """

    model: str
    type: str
    plan: DepthPlan
    layers: tuple[LayerStates, ...]
    residual: str
    streams: int
    methods: tuple[str, ...]
    caches: bool
    lengths: tuple[int, ...]
    batch: int
    dtype: str
    kv_dtype: str
    sizes: ItemSizes
    engine: str = "transformers"
    weights_bytes: int | None = None
    parameters: int | None = None
    memory: int | None = None
    shared: tuple[Sharing, ...] = ()

    def __post_init__(self):
        # Only our own decoder lets layers attend to chosen tokens, and only over a cache that is not quantized.
        if self.methods and (self.engine != "transformers" or self.sizes.kind is not None):
            what = "a quantized KV cache" if self.sizes.kind is not None else self.engine
            if self.plan.beyond_sharing:
                raise ValueError(f"{' + '.join(self.methods)}: {self.plan.beyond_sharing}, which {what} cannot do")
        if self.caches:
            check_engine(self.engine, self.kv_dtype, self.stored)
        several = [
            layer
            for layer in range(self.plan.layers)
            if max(self.plan.read_count(state, layer) for state in CACHED) > 1
        ]
        if self.sizes.kind is not None and several:
            raise ValueError(f"a quantized KV cache does not support layer {several[0]}, which reads several layers")

    @property
    def length(self) -> int:
        """The longest of the lengths."""
        return max(self.lengths)

    @property
    def stored(self) -> list[StoredLayer]:
        """(L,), each layer's states, and which of its keys and values it stores itself."""
        return [StoredLayer(states, self.plan.stored(layer)) for layer, states in enumerate(self.layers)]

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """(L,), the bytes of each layer's states."""
        by_layer = []
        for states, stored in self.stored:
            size = states.stored_bytes(self.length, self.sizes, stored) + states.fixed_bytes(self.length, self.sizes)
            by_layer.append(round(self.batch * size) if self.caches else 0)
        return tuple(by_layer)

    @property
    def stored_bytes(self) -> int:
        """Bytes that the engine allocates."""
        return self.stored_at(self.length)

    @property
    def kv_bytes(self) -> int:
        """Bytes of states that grow with the text."""
        size = sum(states.stored_bytes(self.length, self.sizes, stored) for states, stored in self.stored)
        return round(self.batch * size) if self.caches else 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of states of fixed size: of convolutions, of linear attention, of unfinished compressed entries."""
        size = sum(fixed_bytes(self.engine, states, self.sizes, self.length) for states in self.layers)
        return round(self.batch * size) if self.caches else 0

    @property
    def read_bytes(self) -> int:
        """Bytes that attention reads for the last token; a reader reads its source's states again."""
        return self.read_at(self.length)

    @property
    def kv_share(self) -> float:
        """Bytes that the engine allocates over those of the 16-bit cache; 0 without any."""
        full = self.full_at(self.length)
        return self.stored_bytes / full if full else 0.0

    def stored_at(self, length: int) -> int:
        """Return the bytes that the engine allocates for sequences of `length` tokens."""
        return round(self.batch * allocated(self.engine, self.stored, self.sizes, length)) if self.caches else 0

    def read_at(self, length: int) -> int:
        """Return the bytes that attention reads for the last token of sequences of `length` tokens."""
        size = sum(self.layer_read_at(layer, length) for layer in range(len(self.layers)))
        return round(self.batch * size) if self.caches else 0

    def layer_read_at(self, layer: int, length: int) -> float:
        """Return the bytes that a layer reads for the last token of one sequence of `length` tokens."""
        states = self.layers[layer]
        if not self.plan.attends(layer):
            return 0.0
        read = states.read_bytes(length, self.sizes)
        if not states.keys + states.values or states.selected is not None:
            return read  # what an indexer chooses is counted by `states`
        counts = [self.plan.read_count(state, layer, length) for state in CACHED]
        return read * (counts[0] * states.keys + counts[1] * states.values) / (states.keys + states.values)

    def full_at(self, length: int) -> int:
        """Return the bytes of the 16-bit cache: every layer's own keys and values of all tokens, in 16 bits."""
        sizes = []
        for states in self.layers:
            # an indexer may keep float32 whatever the dtype of the model
            index = states.index * (FLOAT32 if states.index_float32 else SIXTEEN_BITS)
            sizes.append(states.passes * length * ((states.keys + states.values) * SIXTEEN_BITS + index))
        # A layer without keys and values (linear attention, or a method removed it) counts like the largest one, so
        # that a share is of a model with attention in every layer.
        return round(self.batch * sum(size or max(sizes) for size in sizes))

    def sizes_at(self, length: int) -> PlannedLength:
        """Return all of these bytes."""
        stored, read, full = self.stored_at(length), self.read_at(length), self.full_at(length)
        return PlannedLength(length=length, stored_bytes=stored, read_bytes=read, full_bytes=full)

    def fitting_length(self) -> int | None:
        """Return the longest sequences whose cache fits into `memory` next to the weights; None if they always fit.

        Raises:
            ValueError: `memory` is not known, or the weights alone do not fit.
        """
        if self.memory is None:
            raise ValueError("memory must be given to find the length that fits")
        free = self.memory - (self.weights_bytes or 0)
        if free < self.stored_at(1):
            weights = "" if self.weights_bytes is None else f" next to {readable_bytes(self.weights_bytes)} of weights"
            raise ValueError(f"`memory` of {readable_bytes(self.memory)} does not hold the cache of one token{weights}")
        # Bytes are not a linear function of the length (blocks, windows, recent exact tokens), so this is a bisection.
        fitting = bisect_right(range(MOST_TOKENS + 1), free, key=self.stored_at) - 1
        return None if fitting == MOST_TOKENS else fitting

    def diagram(self) -> str:
        """Return a table of what each layer reads and stores, and its mask; alike neighbors share a line."""
        lines = self.plan.diagram().splitlines()[: len(self.layers) + 1]
        if not self.caches:
            lines = [line[: lines[0].index("cache")].rstrip() for line in lines]
        masks = ["mask", *(states.mask for states in self.layers)]
        width = max(map(len, lines)) + 2
        lines = [f"{line:<{width}}{mask}"[len("layer") :] for line, mask in zip(lines, masks, strict=True)]
        alike = itertools.groupby(range(len(self.layers)), key=lambda layer: lines[layer + 1])
        return "\n".join([f"  layer{lines[0]}", *(f"{ranges(layers):>7}{line}" for line, layers in alike)])

    def tables(self) -> list[Table]:
        """Return the sizes by length, if there are several, and what methods would save."""
        tables: list[Table] = []
        if self.caches and len(self.lengths) > 1:
            title = f"KV cache of {self.model} in {self.kv_dtype}, batch {self.batch}, as {self.engine} allocates it"
            rows = [[f"{length:,}", *self.sizes_at(length).cells()] for length in self.lengths]
            tables.append((title, ["tokens", *COLUMNS], rows))
        if self.caches and self.shared:
            length = self.length
            methods = [(name, plan.sizes_at(length) if plan else None, needed) for name, plan, needed in self.shared]
            tables.append(methods_table(length, methods))
        return tables

    def sentences(self) -> list[str]:
        """Return sentences on the cache and the model, and the diagram of the wiring."""
        return [*self.findings(), self.shown.diagram()]

    @property
    def shown(self) -> "ModelPlan":
        """The plan whose layers are shown: with the method, if there is one alone."""
        return (self.shared[0].plan if len(self.shared) == 1 else None) or self

    def findings(self) -> list[str]:
        """Return sentences on the cache and the model."""
        headline = self.headline()
        storing = f", {headline['own_kv_layers']} with keys or values of their own" if self.caches else ""
        methods = f", with {', '.join(self.methods)}" if self.methods else ""
        wiring = [
            f"{self.model} ({self.type}): {len(self.layers)} layers, {headline['attention_layers']} with softmax "
            f"attention{storing}{methods}.",
            f"Residual: {self.residual}.",
        ]
        if not self.caches:
            return ["The model is an encoder and has no KV cache.", *wiring]

        stored = self.stored_bytes
        batch = "" if self.batch == 1 else f" × {self.batch} sequences"
        verb = "stored" if self.engine == "transformers" else f"allocated by {self.engine}"
        share = f", {self.kv_share:.2%} {SHARE}" if self.kv_share else ""
        fixed = f"; {readable_bytes(self.fixed_bytes)} of it do not grow with the text" if self.fixed_bytes else ""
        lines = [
            f"KV cache at {self.length:,} tokens{batch} in {self.kv_dtype}: {readable_bytes(stored)} {verb} "
            f"({stored / self.length / self.batch:,.0f} bytes per token{fixed}){share}; "
            f"{readable_bytes(self.read_bytes)} read per decoding step."
        ]

        weights = None if self.weights_bytes is None else readable_bytes(self.weights_bytes)
        if weights is not None:
            counted = "as stored" if self.parameters is None else f"{self.parameters:,} parameters in {self.dtype}"
            lines.append(f"Weights: {weights}, {counted}.")
        if self.memory is not None:
            length = self.fitting_length()
            beside = "without weights (not counted)" if weights is None else f"next to {weights} of weights"
            most = "Any number of tokens fits" if length is None else f"{length:,} tokens fit"
            each = "" if self.batch == 1 else f" of each of {self.batch} sequences"
            lines.append(f"{most}{each} into {readable_bytes(self.memory)} {beside}.")
        return [*lines, *wiring]

    def headline(self) -> dict[str, Any]:
        """Return the numbers of the JSON line that the command prints last."""
        figures: dict[str, Any] = {
            "model": self.model,
            "type": self.type,
            "layers": len(self.layers),
            "attention_layers": sum(self.plan.attends(layer) for layer in range(self.plan.layers)),
            "own_kv_layers": sum(bool(self.plan.stored(layer)) for layer in range(self.plan.layers)),
            "streams": self.streams,
            "length": self.length,
            "batch": self.batch,
            "engine": self.engine,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "stored_bytes": self.stored_bytes,
            "fixed_bytes": self.fixed_bytes,
            "read_bytes": self.read_bytes,
            "kv_share": round(self.kv_share, 4),
        }
        if len(self.lengths) > 1:
            figures["stored_bytes_by_length"] = {str(length): self.stored_at(length) for length in self.lengths}
        if self.shared:
            figures["stored_bytes_by_method"] = {name: plan and plan.stored_bytes for name, plan, _ in self.shared}
        if self.weights_bytes is not None:
            figures["weights_bytes"] = self.weights_bytes
        if self.memory is not None:
            figures["fitting_length"] = self.fitting_length()
        return figures
