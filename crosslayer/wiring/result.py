"""The wiring of a model, as read from its config, and the size of its KV cache."""

from dataclasses import dataclass
from typing import Any

from crosslayer.core.plan import DepthPlan
from crosslayer.output.shown import Shown
from crosslayer.wiring.fields import LayerStates


@dataclass(frozen=True)
class ModelPlan(Shown):
    """The wiring of a model, read from its config; L layers, bytes for one sequence of `length` tokens.

    Attributes:
        model: its name.
        type: the config's `model_type`.
        plan: which layer reads which states.
        layers: (L,), each layer's mask and cached states.
        residual: a description of the residual connection.
        streams: number of residual streams.
        methods: names of the cross-layer methods, in list order.
        caches: whether the model keeps a cache; encoders do not.
        length: tokens of the sequence.
        dtype: dtype of the cache.
        item_bytes: bytes per element.

    """

    model: str
    type: str
    plan: DepthPlan
    layers: tuple[LayerStates, ...]
    residual: str
    streams: int
    methods: tuple[str, ...]
    caches: bool
    length: int
    dtype: str
    item_bytes: int

    @property
    def stored_elements(self) -> tuple[int, ...]:
        """(L,), the elements of the sequence that each layer stores."""
        if not self.caches:
            return (0,) * len(self.layers)
        return tuple(states.stored(self.length, self.plan.stored(layer)) for layer, states in enumerate(self.layers))

    @property
    def stored_bytes(self) -> int:
        """Bytes that the cache holds."""
        return sum(self.stored_elements) * self.item_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that attention reads for the last token; a reader reads its source's states again."""
        attending = [states for layer, states in enumerate(self.layers) if self.plan.attends(layer)]
        return sum(states.read(self.length) for states in attending) * self.item_bytes if self.caches else 0

    @property
    def full_bytes(self) -> int:
        """Bytes that the cache would hold if every layer stored its own keys and values of all tokens."""
        sizes = [states.keys + states.values + states.index for states in self.layers]
        return sum(size or max(sizes) for size in sizes) * self.length * self.item_bytes

    @property
    def kv_share(self) -> float:
        """Bytes of the cache over those of a full cache."""
        return self.stored_bytes / self.full_bytes

    def diagram(self) -> str:
        """Return a table of what each layer reads and stores, and its mask, a line per layer."""
        lines = self.plan.diagram().splitlines()[: len(self.layers) + 1]
        if not self.caches:
            lines = [line[: lines[0].index("cache")].rstrip() for line in lines]
        masks = ["mask", *(states.mask for states in self.layers)]
        width = max(map(len, lines)) + 2
        return "\n".join(f"{line:<{width}}{mask}" for line, mask in zip(lines, masks, strict=True))

    def sentences(self) -> list[str]:
        """Return the diagram of the wiring, and sentences on the model and its cache."""
        headline, stored = self.headline(), self.stored_bytes
        own = f", {headline['own_kv_layers']} with keys or values of their own" if self.caches else ""
        methods = f", with {', '.join(self.methods)}" if self.methods else ""
        cost = (
            f"KV cache at {self.length:,} tokens in {self.dtype}: {stored:,} bytes stored "
            f"({stored / self.length:,.0f} per token), {self.kv_share:.2%} of a full one; {self.read_bytes:,} bytes "
            "read for the last token."
        )
        return [
            self.diagram(),
            f"{self.model} ({self.type}): {len(self.layers)} layers, {headline['attention_layers']} with softmax "
            f"attention{own}{methods}.",
            f"Residual: {self.residual}.",
            cost if self.caches else "The model is an encoder and has no KV cache.",
        ]

    def headline(self) -> dict[str, Any]:
        """Return the numbers of the JSON line that the command prints last."""
        return {
            "model": self.model,
            "type": self.type,
            "layers": len(self.layers),
            "attention_layers": sum(self.plan.attends(layer) for layer in range(self.plan.layers)),
            "own_kv_layers": sum(bool(self.plan.stored(layer)) for layer in range(self.plan.layers)),
            "streams": self.streams,
            "length": self.length,
            "dtype": self.dtype,
            "stored_bytes": self.stored_bytes,
            "read_bytes": self.read_bytes,
            "kv_share": round(self.kv_share, 4),
        }
