"""Value embeddings: some layers add an embedding of the token, from a table of their own, to their values.

    V'_n = V_n + g_n(x) ∘ E_n[token],  g_n(x) = 2 σ(W_n x_{1..c})

x is the layer's normed input; the gate of each head reads its first c channels and begins at 1.

Flows: the token ids. Reads: the chosen layers, by default every second one, including the last. Cache: unchanged in
size, it holds V'. Source: nanochat (Karpathy 2025), `has_ve` and `ve_gate` in its gpt.py; tables begin like embeddings.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from crosslayer.core.method import INPUT, TOKENS, Carry, Config, HeadMixer, Method, Mixed, State, Wiring
from crosslayer.core.options import check_layers


@dataclass(frozen=True)
class ValueEmbeddings(Method):
    """A layer's own token embeddings are added to its values."""

    reads_tokens = True

    layers: tuple[int, ...] | None = None
    """0-based layers that have a table; None: every second layer, counted down from the last."""
    channels: int = 32
    """c: number of channels of the layer's input that its gates read."""

    def heads(self, config: Config, wiring: Wiring, layer: int) -> HeadMixer | None:
        """Add in the chosen layers."""
        if not 1 <= self.channels <= config.hidden_size:
            raise ValueError(
                f"value_embeddings: channels must be 1 to hidden_size = {config.hidden_size}, got {self.channels}"
            )
        return _Table(config, self.channels) if layer in self._chosen(wiring) else None

    def _chosen(self, wiring: Wiring) -> list[int]:
        count = wiring.plan.layers
        own_layers = wiring.plan.own_layers("values")
        if self.layers is None:
            chosen = [layer for layer in own_layers if layer % 2 == (count - 1) % 2]
        else:
            check_layers("value_embeddings", "layers", self.layers, count)
            chosen = list(self.layers)
        if not chosen or not set(chosen) <= set(own_layers):
            by_default = " by default" if self.layers is None else ""
            raise ValueError(
                f"value_embeddings: set layers to some of those with values of their own, {own_layers}, got "
                f"{chosen}{by_default}"
            )
        return chosen


class _Table(HeadMixer):
    """The table and the gates of a layer."""

    reads_input = True
    split_by_head = {"table": 1, "gate": 0}

    def __init__(self, config: Config, channels: int):
        super().__init__()
        assert config.num_key_value_heads is not None and config.head_dim is not None
        self.channels, self.scale = channels, config.initializer_range
        heads, size = config.num_key_value_heads, config.head_dim
        self.table = nn.Parameter(torch.zeros(config.vocab_size, heads * size))  # (V, H_kv·D)
        self.gate = nn.Parameter(torch.zeros(heads, channels))  # (H_kv, c)

    def reset(self) -> None:
        """Begin like embeddings, with gates of 1."""
        init.normal_(self.table, mean=0.0, std=self.scale)
        init.zeros_(self.gate)

    def resize_tokens(self, count: int) -> None:
        """Keep the rows of existing tokens; rows of new tokens begin as in a new model."""
        old = self.table
        if count == len(old):
            return
        new = old.new_empty(count, old.shape[1]).normal_(std=self.scale)
        new[: len(old)] = old.detach()[:count]
        self.table = nn.Parameter(new, requires_grad=old.requires_grad)

    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        assert v is not None
        gates = 2 * torch.sigmoid(F.linear(carry[INPUT][..., : self.channels], self.gate))  # (B, T, H_kv)
        added = F.embedding(carry[TOKENS], self.table).unflatten(-1, (v.shape[1], -1))  # (B, T, H_kv, D)
        added = (gates.unsqueeze(-1) * added).transpose(1, 2)  # (B, H_kv, T, D)
        return q, k, v + added.to(v.dtype), carry  # the table may be wider in mixed precision
