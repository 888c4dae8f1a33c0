"""What a layer's cache holds: states that grow with the text, and states of fixed size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from crosslayer.wiring import kv_bits

FLOAT32 = 4  # bytes per element


class ItemSizes(NamedTuple):
    """Bytes per element: of the model's dtype, and of keys and values, which may be quantized.

    `kind` is the type of a quantized cache of this package, whose bytes are not a number per element, else None.
    """

    model: float
    kv: float
    kind: str | None = None


@dataclass(frozen=True)
class LayerStates:
    """What a layer's attention reads and what its cache holds, in elements of one sequence.

    Attributes:
        mask: a short description of the mask.
        keys: elements of a token's keys, or of the latent for keys and values; 0 without attention.
        values: elements of a token's values, or of the state cached with the latent; 0 if the keys are the values.
        heads: key-value heads; 0 for a latent.
        index: elements of a token that an indexer caches.
        index_float32: whether the indexer caches float32, whatever the dtype of the model.
        window: tokens that a query can attend to, including its own; None: all.
        every: tokens per compressed entry, besides the window; None: no compressed entries.
        overlap: whether neighboring compressed entries overlap, so that they are made from twice the elements.
        selected: tokens, or compressed entries, that a query selects of those it can attend to; None: all.
        prompt: tokens that the model itself adds before a sequence.
        fixed: elements that do not grow with the text (states of convolutions), in the dtype of the model.
        fixed_float32: the same in float32 (states of linear attention).
        kernel: tokens that a convolution among them keeps, 0 without one.
        passes: how often a token goes through the layer, each time with a cache of its own.
    """

    mask: str
    keys: int = 0
    values: int = 0
    heads: int = 0
    index: int = 0
    index_float32: bool = False
    window: int | None = None
    every: int | None = None
    overlap: bool = False
    selected: int | None = None
    prompt: int = 0
    fixed: int = 0
    fixed_float32: int = 0
    kernel: int = 0
    passes: int = 1

    def entries(self, length: int) -> int:
        """Return the number of compressed entries of a sequence."""
        return 0 if self.every is None else length // self.every

    def kept(self, length: int) -> int:
        """Return the tokens whose keys and values are kept; a windowed cache leaves space for the next token."""
        return length + self.prompt if self.window is None else min(length, self.window - 1)

    def stored_bytes(self, length: int, sizes: ItemSizes, own: Mapping[str, float]) -> float:
        """Return the bytes that grow with the text; `own` has the shares of its keys and values that it stores."""
        if sizes.kind is not None:
            return sum(self._quantized_bytes(vars(self)[state], length, sizes) for state in own)
        size = self.keys * own.get("keys", 0) + self.values * own.get("values", 0)
        kept = (self.kept(length) + self.entries(length)) * size * sizes.kv
        return self.passes * (kept + self._indexed_bytes(length, sizes))

    def _quantized_bytes(self, size: int, length: int, sizes: ItemSizes) -> float:
        """Return the bytes of keys, or values, of `size` elements a token; a window is not quantized."""
        assert sizes.kind is not None
        if self.window is not None:
            return self.kept(length) * size * sizes.model
        return self.heads * kv_bits.stored_bytes(sizes.kind, size // self.heads, length, sizes.model)

    def fixed_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes of the states of fixed size, and of compressed entries that are not finished."""
        unfinished, float32 = 0, 0
        if self.every is not None:  # keys and gates of the tokens of the next entry, of the indexer as well
            size = (2 if self.overlap else 1) * (self.keys + self.index)
            unfinished = 2 * (length % self.every) * size
        if self.overlap and self.every is not None and self.entries(length):
            unfinished += self.every * (self.keys + self.index)
            float32 = self.every * (self.keys + self.index)
        return self.passes * ((self.fixed + unfinished) * sizes.model + (self.fixed_float32 + float32) * FLOAT32)

    def read_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes that attention reads for the last token of a sequence."""
        tokens = length + self.prompt if self.window is None else min(length, self.window)
        entries = self.entries(length)
        if self.selected is not None:
            tokens = min(tokens, self.selected) if self.every is None else tokens
            entries = min(entries, self.selected)
        read = (tokens + entries) * (self.keys + self.values) * sizes.kv
        return self.passes * (read + self._indexed_bytes(length, sizes))

    def full_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes of a plain cache: keys and values of all tokens, neither compressed nor quantized."""
        kept = length * (self.keys + self.values) * sizes.model
        return self.passes * (kept + length * self.index * self._index_item(sizes))

    def _indexed_bytes(self, length: int, sizes: ItemSizes) -> float:
        indexed = length if self.every is None else self.entries(length)
        return indexed * self.index * self._index_item(sizes)

    def _index_item(self, sizes: ItemSizes) -> float:
        return FLOAT32 if self.index_float32 else sizes.model
