"""Attention of a layer, which owns, borrows and lends queries, keys and values as the wiring says.

A module that a layer does without is None: a borrowed projection and its norm, W_c. Mixers are a list, often empty.

Shapes: B batch, T new tokens, S cached + new tokens, C hidden, H heads, H_kv key-value heads, D head size.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, eager_attention_forward

from crosslayer.decoder.caches import update_single
from crosslayer.decoder.configuration import CrossLayerConfig
from crosslayer.method import Carry, Compensation, HeadMixer, Wiring
from crosslayer.plan import STATES

States = list[Tensor | None]  # queries, keys and values; None for those that are borrowed


class CrossLayerAttention(nn.Module):
    """Attention of a layer; W_c that writes to the heads adds to their output, before W_o."""

    def __init__(self, config: CrossLayerConfig, wiring: Wiring, layer_idx: int):
        super().__init__()
        assert config.num_key_value_heads is not None and config.head_dim is not None
        assert config.layer_types is not None
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.scaling, self.is_causal = config.head_dim, config.head_dim**-0.5, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout = config.attention_dropout or 0.0
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.stored = wiring.stored[layer_idx]
        self.borrows, self.lends = wiring.borrows[layer_idx], wiring.lends[layer_idx]
        self._add_projections(config, [number not in self.borrows for number in range(len(STATES))])
        mixers = [mixer for m in wiring.methods if (mixer := m.heads(config, wiring, layer_idx)) is not None]
        self.mixers = nn.ModuleList(mixers)
        on_heads = wiring.compensation[layer_idx] == "heads"
        self.compensation = Compensation(config, "heads", wiring.compensation_bias[layer_idx]) if on_heads else None

    def _add_projections(self, config: CrossLayerConfig, owned: list[bool]) -> None:
        """Add W_q, W_k and W_v of the states that are owned, their norms, and W_o."""
        assert config.num_key_value_heads is not None
        width, bias = config.hidden_size, config.attention_bias
        heads = config.num_attention_heads * self.head_dim
        pairs = config.num_key_value_heads * self.head_dim
        owns_q, owns_k, owns_v = owned
        self.q_proj = nn.Linear(width, heads, bias=bias) if owns_q else None
        self.k_proj = nn.Linear(width, pairs, bias=bias) if owns_k else None
        self.v_proj = nn.Linear(width, pairs, bias=bias) if owns_v else None
        output_bias = bias if config.attention_output_bias is None else config.attention_output_bias
        self.o_proj = nn.Linear(heads, width, bias=output_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if owns_q and config.qk_norm else None
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if owns_k and config.qk_norm else None

    def forward(
        self,
        hidden_states: Tensor,
        carry: Carry,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Carry]:
        """Return the update (B, T, C) and the carry with what this layer lends; `kwargs` go on to attention."""
        states: States = [
            self._project(hidden_states, self.q_proj, self.q_norm),  # (B, H, T, D)
            self._project(hidden_states, self.k_proj, self.k_norm),  # (B, H_kv, T, D)
            self._project(hidden_states, self.v_proj, None),  # (B, H_kv, T, D)
        ]
        states = _rotate(states, position_embeddings)
        mixer: HeadMixer
        for mixer in self.mixers:  # type: ignore[assignment]
            q, k, v = states
            *states, carry = mixer(q, k, v, carry)
        if past_key_values is not None and self.stored:
            states = self._cached(states, past_key_values)  # owned keys, values: (B, H_kv, S, D)
        states = [carry[self.borrows[i]] if state is None else state for i, state in enumerate(states)]
        if self.lends:
            carry = {**carry, **{name: states[i] for i, name in self.lends.items()}}
        out = self._attend(states, attention_mask, **kwargs)  # (B, T, H, D)
        for mixer in self.mixers:  # type: ignore[assignment]
            out, carry = mixer.after(out, carry)
        out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()  # (B, T, H·D)
        if self.compensation is not None:
            out = out + self.compensation(hidden_states)
        return self.o_proj(out), carry

    def _project(self, hidden_states: Tensor, linear: nn.Module | None, norm: nn.Module | None) -> Tensor | None:
        if linear is None:
            return None
        split = linear(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)  # (B, T, H or H_kv, D)
        return (split if norm is None else norm(split)).transpose(1, 2)  # (B, H or H_kv, T, D)

    def _attend(self, states: States, attention_mask: Any, **kwargs: Any) -> Tensor:
        """Return what attention reads (B, T, H, D) with all three states at hand."""
        kind = self.config._attn_implementation or "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.sliding_window, **kwargs}
        return attend(self, *states, attention_mask, **options)[0]

    def _cached(self, states: States, cache: Cache) -> States:
        """Cache what this layer stores."""
        q, k, v = states
        if len(self.stored) == 2:
            return [q, *cache.update(k, v, self.layer_idx)]  # type: ignore[arg-type]
        if self.stored == ("keys",):
            assert k is not None
            return [q, update_single(cache, k, self.layer_idx), v]
        assert v is not None
        return [q, k, update_single(cache, v, self.layer_idx)]


def _rotate(states: States, rotary: tuple[Tensor, Tensor]) -> States:
    """Apply rotary embedding to the queries and keys that are there."""
    q, k, v = states
    if q is not None and k is not None:
        return [*apply_rotary_pos_emb(q, k, *rotary), v]
    if q is not None:
        return [apply_rotary_pos_emb(q, q, *rotary)[0], None, v]
    if k is not None:
        return [None, apply_rotary_pos_emb(k, k, *rotary)[1], v]
    return states
