"""A transformers cache whose keys and values are quantised, layer by layer.

With 8 bits or float8 all tokens are read back as they are stored. Below, a query reads the latest tokens exactly, all
others quantised. The tokens of a call read one another exactly, unless the model runs under `quantizing`: there it
makes no difference how a text is cut into calls.

Shapes: B batch, T new tokens, S cached + new tokens, H_kv key-value heads, D head size.
"""

from functools import partial

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from crosslayer.core.decoder.columns import Codec, ColumnLayer, Columns
from crosslayer.quantization.codec import codec_of, rotated, rotates
from crosslayer.wiring.kv_bits import KvBits, keeps_recent


class Quantised(Columns):
    """Keys or values that are rotated and quantised, the latest tokens excepted.

    All tokens are stored quantised, and beside it as they are those that the next query reads exactly: `tail`
    (B, H_kv, at most recent - 1, D), rotated.
    """

    def __init__(self, codec: Codec, recent: int, returns_rotated: bool):
        super().__init__(codec)
        self.recent, self.returns_rotated = recent, returns_rotated
        self.tail = torch.empty(0)

    def update(self, states: Tensor) -> Tensor:
        """Store new states (B, H_kv, T, D); return all, (B, H_kv, S, D), the new and the latest ones exact."""
        first, states = not self.used, rotated(states)
        self.append(states)
        if not self.recent:
            return self._returned(self.read())
        exact = states if first else torch.cat([self.tail, states], 2)
        quantised = self.used - exact.shape[2]
        self.tail = exact[:, :, max(0, exact.shape[2] - self.recent + 1) :].clone()  # a view would hold all of it
        return self._returned(torch.cat([self.read(quantised), exact], 2) if quantised else exact)

    def _returned(self, states: Tensor) -> Tensor:
        return states if self.returns_rotated else rotated(states, back=True)

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
    codec = codec_of(kind)
    if not rotates(kind):
        return ColumnLayer(partial(Columns, codec))
    return ColumnLayer(partial(Quantised, codec, recent if keeps_recent(kind) else 0, returns_rotated))


class QuantizedKVCache(Cache):
    """A cache for a model's config whose layers are quantised as `bits` says, but for layers with a window.

    Keys and values come back rotated if `returns_rotated`, as `quantizing` expects them.
    """

    def __init__(self, config: PreTrainedConfig, bits: KvBits, returns_rotated: bool = False):
        layers = DynamicCache(config=config).layers
        for layer, plain in enumerate(layers):
            kind = bits.kind(layer)
            if kind is not None and type(plain) is DynamicLayer:
                layers[layer] = new_layer(kind, bits.recent, returns_rotated)
        super().__init__(layers=layers)
        self.bits, self.returns_rotated = bits, returns_rotated
