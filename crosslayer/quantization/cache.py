"""A transformers cache whose keys and values are quantised, layer by layer.

With 8 bits or float8 all tokens are read back as they are stored. Below, a query reads the latest tokens exactly, all
others quantised. The tokens of a call read one another exactly, unless the model runs under `quantizing`: there it
makes no difference how a text is cut into calls.

Shapes: B batch, T new tokens, S cached + new tokens, H_kv key-value heads, D head size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from crosslayer.core.decoder.columns import Codec, ColumnLayer, Columns
from crosslayer.quantization.codec import codec_of
from crosslayer.wiring.kv_bits import KvBits, keeps_recent


class RecentExact(Columns):
    """Keys or values that are quantised but for the latest tokens.

    All tokens are stored quantised, and beside it as they are those that the next query reads exactly: `tail`
    (B, H_kv, at most recent - 1, D).
    """

    def __init__(self, codec: Codec, recent: int):
        super().__init__(codec)
        self.recent = recent
        self.tail = torch.empty(0)

    def update(self, states: Tensor) -> Tensor:
        """Store new states (B, H_kv, T, D); return all, (B, H_kv, S, D), the new and the latest ones exact."""
        before = self.used
        self.append(states)
        exact = torch.cat([self.tail, states], 2) if before else states
        quantised = self.used - exact.shape[2]
        self.tail = exact[:, :, max(0, exact.shape[2] - self.recent + 1) :].clone()  # a view would hold all of it
        return torch.cat([self.read(quantised), exact], 2) if quantised else exact

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch, in this order; a row may occur several times."""
        super().select(rows)
        self.tail = self.tail[rows.to(self.tail.device)]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that is allocated."""
        return *self.memory, self.tail


def new_columns(kind: str | None, bits: KvBits) -> Callable[[], Columns]:
    """Return what makes the columns of a layer whose keys and values are stored as `kind`."""
    codec = codec_of(kind)
    return partial(RecentExact, codec, bits.recent) if keeps_recent(kind) else partial(Columns, codec)


class QuantizedKVCache(Cache):
    """A cache for a model's config whose layers are quantised as `bits` says, but for layers with a window."""

    def __init__(self, config: PreTrainedConfig, bits: KvBits):
        layers = DynamicCache(config=config).layers
        for layer, plain in enumerate(layers):
            kind = bits.kind(layer)
            if kind is not None and type(plain) is DynamicLayer:
                layers[layer] = ColumnLayer(new_columns(kind, bits))
        super().__init__(layers=layers)
        self.bits = bits
