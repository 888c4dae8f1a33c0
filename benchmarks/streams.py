"""What benchmarks of W_c share: models that go on from the stream below the first layer that a wiring changes.

All wirings that leave the lower layers alone have the same stream there, so it is computed once for each window.
"""

from typing import Any

import torch
from torch import Tensor, nn

from crosslayer.core.decoder.modeling import CrossLayerForCausalLM, masks_of


class Upper:
    """The layers of a model from `first` on, for windows of `length` tokens."""

    def __init__(self, model: Any, first: int, length: int):
        assert isinstance(model, CrossLayerForCausalLM)
        self.model, self.first, self.layers = model, first, list(model.model.layers)
        position = torch.arange(length, device=model.device)[None]
        like = torch.zeros(1, length, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.rotary = model.model.rotary_emb(like, position_ids=position)
        self.kinds = model.config.layer_types or []
        self.masks = masks_of(model.config, self.kinds, like, None, position)

    def below(self, ids: Tensor) -> Tensor:
        """Return the stream (B, T, C) that enters the first layer."""
        stream = self.model.model.embed_tokens(ids)
        for number in range(self.first):
            stream, _ = self.layer(number, stream, {})
        return stream

    def layer(self, number: int, stream: Tensor, carry: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Run one layer."""
        return self.layers[number](stream, carry, self.rotary, self.masks[self.kinds[number]])

    def logits(self, stream: Tensor) -> Tensor:
        """Return the logits (T, V) of a stream (1, T, C) that enters the first layer."""
        carry: dict[str, Any] = {}
        for number in range(self.first, len(self.layers)):
            stream, carry = self.layer(number, stream, carry)
        return self.model.lm_head(self.model.model.norm(stream))[0]


class Known(nn.Module):
    """Stands for the embedding and the layers below the first changed one: returns their stream, computed once."""

    def __init__(self, upper: Upper):
        super().__init__()
        self.streams: dict[tuple[int, ...], Tensor] = {}
        self.upper = [upper]  # in a list: no submodule

    def forward(self, ids: Tensor) -> Tensor:
        """Return the stream (B, T, C) that enters the first layer."""
        for row in ids:
            key = tuple(row.tolist())
            if key not in self.streams:
                self.streams[key] = self.upper[0].below(row[None])
        return torch.cat([self.streams[tuple(row.tolist())] for row in ids])


class Through(nn.Module):
    """A layer that was computed already."""

    self_attn = compensation = None

    def forward(self, stream: Tensor, carry: dict[str, Any], rotary: Any, mask: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return what came in."""
        return stream, carry


def from_known(model: Any, known: Known, first: int) -> Any:
    """Let a model begin at a layer, with the streams that are known."""
    model.model.embed_tokens = known
    for number in range(first):
        model.model.layers[number] = Through()
    return model
