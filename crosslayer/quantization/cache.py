"""A transformers cache whose keys and values are quantised, layer by layer.

With 8 bits or float8 all tokens are read back as they are stored. Below, a query reads the latest tokens exactly, all
others quantised. The tokens of a call read one another exactly, unless the model runs under `quantizing`: there it
makes no difference how a text is cut into calls.

Shapes: B batch, T new tokens, S cached + new tokens, H_kv key-value heads, D head size.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from crosslayer.core.columns import ColumnLayer, Columns
from crosslayer.quantization.codec import codec_of, rotated, rotates
from crosslayer.wiring.kv_bits import KvBits, keeps_recent


class Quantised(Columns):
    """Keys or values that are quantised, the latest tokens excepted.

    All tokens are stored quantised, and beside it as they are those that the next query reads exactly: `tail`
    (B, H_kv, at most recent - 1, D). If the type wants it, states are rotated; they come back so if `returns_rotated`.
    """

    def __init__(self, kind: str, recent: int, returns_rotated: bool):
        super().__init__()
        self.codec, self.recent = codec_of(kind), recent if keeps_recent(kind) else 0
        self.rotates, self.returns_rotated = rotates(kind), returns_rotated
        self.tail = torch.empty(0)

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return the codes of states (B, H_kv, T, D) that are rotated already, and what belongs to them."""
        return self.codec.encode(states)

    def update(self, states: Tensor) -> Tensor:
        """Store new states (B, H_kv, T, D); return all, (B, H_kv, S, D), the new and the latest ones exact."""
        states = rotated(states) if self.rotates else states
        self.append(states)
        if not self.recent:
            return self._returned(self._decoded(states, self.used, self.used))
        exact = torch.cat([self.tail, states], 2) if self.used > states.shape[2] else states
        quantised = self.used - exact.shape[2]
        self.tail = exact[:, :, max(0, exact.shape[2] - self.recent + 1) :].clone()  # a view would hold all of it
        read = self._decoded(states, quantised, self.used)
        read[:, :, quantised:] = exact
        return self._returned(read)

    def _decoded(self, like: Tensor, count: int, width: int) -> Tensor:
        """Return memory (B, H_kv, width, D) whose first `count` columns hold the stored states."""
        batch, heads, _, size = like.shape
        out = like.new_empty((batch, heads, width, size))
        if count:
            self.codec.decode(tuple(tensor[:, :, :count] for tensor in self.memory), out[:, :, :count])
        return out

    def _returned(self, states: Tensor) -> Tensor:
        return rotated(states, back=True) if self.rotates and not self.returns_rotated else states

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch, in this order; a row may occur several times."""
        super().select(rows)
        if self.recent:
            self.tail = self.tail[rows.to(self.tail.device)]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that is allocated."""
        return *self.memory, self.tail


def new_layer(kind: str | None, recent: int = 0, returns_rotated: bool = True) -> ColumnLayer:
    """Return an empty layer of a cache whose keys and values are stored as `kind`; None: as they are.

    Of types with less than 8 bits, the `recent` latest tokens stay exact.
    """
    return ColumnLayer(Columns if kind is None else partial(Quantised, kind, recent, returns_rotated))


class QuantizedKVCache(Cache):
    """A cache for a model's config; `kinds` are the types of its layers' keys and values, None: as they are.

    Keys and values come back rotated if `returns_rotated`, as `quantizing` expects them.

    Raises:
        ValueError: a layer to be quantised caches other states than keys and values of all tokens.

    """

    def __init__(
        self, config: PreTrainedConfig, bits: KvBits, kinds: Sequence[str | None], returns_rotated: bool = False
    ):
        layers = DynamicCache(config=config).layers
        for layer, kind in enumerate(kinds):
            if kind is None:
                continue
            if type(layers[layer]) is not DynamicLayer:
                raise ValueError(f"layer {layer} caches more than keys and values, which cannot be quantised")
            layers[layer] = new_layer(kind, bits.recent, returns_rotated)
        super().__init__(layers=layers)
        self.bits, self.returns_rotated = bits, returns_rotated
