"""Heads, mask and score function of a layer's attention: what must agree where layers share."""

from dataclasses import dataclass, field

from transformers import PreTrainedConfig

from crosslayer.probe.intercept import AttentionCall, stored_shares
from crosslayer.probe.maps import is_causal

ENTRIES = "with further keys"  # in the words for a mask


@dataclass(frozen=True)
class LayerShape:
    """Heads, mask and score function of a layer's attention; layers may share only where all of it agrees.

    `stored` says which share of keys and of values the layer keeps in the cache; it does not count in the comparison.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    causal: bool
    kind: str | None = None  # the config's layer type
    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    sinks: bool = False
    entries: bool = False  # whether it also attends to entries that stand for several tokens
    stored: tuple[float, float] = field(default=(1.0, 1.0), compare=False)

    @staticmethod
    def read(calls: list[AttentionCall], config: PreTrainedConfig, layers: int) -> list["LayerShape | None"]:
        """Return the shape of each layer of a stack, None where no call was seen."""
        distinct = {id(call.mask): call for call in calls}  # a mask is looked at once, however many layers have it
        causal = {key: is_causal(call) for key, call in distinct.items()}
        kinds: list[str | None] = list(getattr(config, "layer_types", None) or [None] * layers)
        for layer, rotated in enumerate(getattr(config, "no_rope_layers", None) or []):  # 1: rotary, 0: none
            kinds[layer] = kinds[layer] if rotated else f"{kinds[layer] or 'attention'} without rope"
        shapes: list[LayerShape | None] = [None] * layers
        for call in calls:
            shares = stored_shares(config, call.layer)
            shapes[call.layer] = LayerShape(
                heads=call.query.shape[1],
                kv_heads=call.key.shape[1],
                key_size=call.key.shape[3],
                value_size=call.value.shape[3],
                causal=call.causal if call.mask is None else causal[id(call.mask)],
                kind=kinds[call.layer],
                window=call.window,
                scaling=call.scaling,
                softcap=call.softcap,
                sinks=call.sinks is not None,
                entries=bool(call.options.get("entries")),
                stored=(shares["keys"], shares["values"]),
            )
        return shapes

    @property
    def can_choose(self) -> bool:
        """Whether the layer can choose tokens or attend to chosen ones: full causal attention, no learned sinks."""
        return self.mask == "causal" and not self.sinks

    @property
    def mask(self) -> str:
        """The mask in words."""
        words = "causal" if self.causal else "bidirectional"
        if self.entries:
            words = f"{words} {ENTRIES}"
        if self.window is not None:
            return f"{words}, window {self.window}"
        return words if self.kind in (None, "full_attention") else f"{words}, {self.kind}"

    def cached(self, length: int) -> tuple[int, int]:
        """Return the elements of keys and of values that a sequence of `length` tokens leaves in the cache.

        A sliding layer keeps what the next token can see, without itself: window − 1 tokens, as in transformers.
        """
        tokens = length if self.window is None else min(length, self.window - 1)
        keys, values = self.stored
        width = self.kv_heads * tokens
        return round(keys * width * self.key_size), round(values * width * self.value_size)

    def even_share(self, length: int) -> float:
        """Return a'_0 if every row spread its attention evenly over what it may see."""
        if not self.causal:
            return 1 / length
        rows = length if self.window is None else min(length, self.window)
        return sum(1 / seen for seen in range(1, rows + 1)) / length


def may_share(reader: LayerShape | None, source: LayerShape | None) -> bool:
    """Return whether two layers may share maps or keys: same heads, sizes, mask and soft-cap."""
    return reader is not None and reader == source
