"""Attention of a layer, whose queries, keys and values are its own or read from other layers, as the wiring says.

A module that a layer does not need is None: the projection and norm of a state that it reads from another layer, and
the linear compensation (W_c). Mixers are a list, often empty.

Shapes: B batch, T new tokens, S cached + new tokens, C hidden, H heads, H_kv key-value heads, D head size.
"""

import functools
from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward  # Llama's, and it caps scores
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from crosslayer.core.choice import TokenChoice, mask_of
from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.families import norm
from crosslayer.core.method import FROM_VALUES, ON_HEADS, Carry, Compensation, HeadMixer, StateReader, Wiring
from crosslayer.core.methods import state_reader
from crosslayer.core.plan import PASSED, STATES, DepthPlan
from crosslayer.core.sources import SharedStates, outside_layer_graphs
from crosslayer.core.transformers_versions import read_paged, takes_cache

UNWATCHED = (sdpa_attention_forward, eager_attention_forward)  # attention functions that no probe has replaced
SHARED = "states"  # key in the carry: the states that later layers read
# in `States`; a map is not a state of the plan
QUERIES, CHOICE, MAP = PASSED.index("queries"), PASSED.index("choices"), len(PASSED)
States = list[Tensor | None]  # queries, keys, values, chosen tokens, softmax map; None if another layer's are read
Inputs = tuple[Tensor, Tensor, Tensor]  # of the query, key and value projections


class CrossLayerAttention(nn.Module):
    """Attention of a layer; a W_c with a target in `ON_HEADS` adds to the heads' output, before W_o."""

    def __init__(self, config: CrossLayerConfig, wiring: Wiring, layer_idx: int):
        super().__init__()
        head_dim, pairs = config.head_dim, config.num_key_value_heads
        assert pairs is not None and head_dim is not None and config.layer_types is not None
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.is_causal = head_dim, True
        self.scaling = (config.query_pre_attn_scalar or head_dim) ** -0.5
        # without a cap it is not passed on: functions of other libraries need not know the argument
        cap = config.attn_logit_softcapping
        self.softcap = {} if cap is None else {"softcap": cap}
        self.num_key_value_groups = config.num_attention_heads // pairs
        self.attention_dropout = config.attention_dropout or 0.0
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.stored = wiring.plan.stored(layer_idx)
        self.sources, self.carried = dict(wiring.sources[layer_idx]), dict(wiring.carried[layer_idx])
        map_sources = find_map_sources(wiring.plan)
        source = map_sources[layer_idx]
        # A map, (B, H, T, S), has the name of its layer's queries, which the same layers read and whose slot is used
        # again after them. Under the layer's own number every map of a pass would live until the pass ends.
        if source is not None:
            self.sources[MAP] = (wiring.carried[source][QUERIES].replace("queries", "map"),)
        self.shares_map = layer_idx in map_sources
        if self.shares_map:
            self.carried[MAP] = self.carried[QUERIES].replace("queries", "map")
        # the compiler distinguishes layers by what is read of them: these flags are few, the names behind them many
        self.reads_others, self.is_read = bool(self.sources), bool(self.carried)
        plan = wiring.plan
        own_q, own_k, own_v = (layer_idx in plan.own_layers(state) for state in STATES)
        width, has_bias, output_bias = config.hidden_size, config.attention_bias, config.attention_output_bias
        heads, has_norms = config.num_attention_heads, config.qk_norm
        self.q_proj = nn.Linear(width, heads * head_dim, bias=has_bias) if own_q else None
        self.k_proj = nn.Linear(width, pairs * head_dim, bias=has_bias) if own_k else None
        self.v_proj = nn.Linear(width, pairs * head_dim, bias=has_bias) if own_v else None
        self.o_proj = nn.Linear(heads * head_dim, width, bias=has_bias if output_bias is None else output_bias)
        self.q_norm = norm(config, head_dim) if own_q and has_norms else None
        self.k_norm = norm(config, head_dim) if own_k and has_norms else None
        mixers = [mixer for m in wiring.methods if (mixer := m.heads(config, wiring, layer_idx)) is not None]
        self.mixers = nn.ModuleList(mixers)
        self.reader = state_reader(config, wiring, layer_idx) if wiring.reads_several[layer_idx] else None
        self.chooses, self.attends_to_choice = layer_idx in plan.choices, plan.choices[layer_idx] is not None
        self.choice = None
        if plan.involves_choice(layer_idx):
            modules = [method.choice(config, wiring, layer_idx) for method in wiring.methods]
            (self.choice,) = [module for module in modules if module is not None]
        target = wiring.compensation[layer_idx]
        self.compensation = Compensation(config, target) if target in ON_HEADS else None
        self.values_compensate = target == FROM_VALUES

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        carry: Carry,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Any,
        cache: Cache | None,
        inputs: Inputs | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Carry]:
        """Return the update (B, T, C) and the carry with the states that later layers read.

        `inputs` are the inputs (B, T, C) of the query, key and value projections if they are not `hidden_states`;
        `kwargs` are passed to the attention function.
        """
        for_q, for_k, for_v = (hidden_states,) * 3 if inputs is None else inputs
        q = self._project(for_q, self.q_proj, self.q_norm)  # (B, H, T, D)
        k = self._project(for_k, self.k_proj, self.k_norm)  # (B, H_kv, T, D)
        v = self._project(for_v, self.v_proj, None)  # (B, H_kv, T, D)
        if position_embeddings is not None and not (q is None and k is None):
            # the function takes both: in place of another layer's, the one that is here is rotated once more
            either_q, either_k = k if q is None else q, q if k is None else k
            rotated_q, rotated_k = apply_rotary_pos_emb(either_q, either_k, *position_embeddings)
            q, k = None if q is None else rotated_q, None if k is None else rotated_k
        states: States = [q, k, v]
        mixer: HeadMixer
        for mixer in self.mixers:  # type: ignore[assignment]
            *states, carry = mixer(*states, carry)
        if cache is not None and self.stored:
            states = self._cached(states, cache)  # the layer's own keys, values: (B, H_kv, S, D)
        own_states: States = [*states, None, None]
        choice = shared_map = None
        if self.reader is not None:
            new = hidden_states.shape[1]
            states, attention_mask = self._read_several(self.reader, own_states, attention_mask, new, carry)
        elif self.reads_others:
            *states, choice, shared_map = self._read_others(own_states, carry)
        if self.choice is None:
            # (B, T, H, D), (B, H, T, S)
            out, own_states[MAP] = self._attend(states, attention_mask, shared_map, **kwargs)
        else:
            out, own_states[CHOICE] = self._attend_to_choice(self.choice, choice, states, attention_mask, **kwargs)
        if self.is_read:
            carry = self._carry(own_states, carry)
        for mixer in self.mixers:  # type: ignore[assignment]
            out, carry = mixer.after(out, carry)
        out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()  # (B, T, H·D)
        if self.compensation is not None:
            read = hidden_states
            if self.values_compensate:
                assert v is not None
                read = v.transpose(1, 2).flatten(2)  # (B, T, H_kv·D)
            out = out + self.compensation(read)
        return self.o_proj(out), carry

    def _project(self, hidden_states: Tensor, linear: nn.Module | None, norm: nn.Module | None) -> Tensor | None:
        if linear is None:
            return None
        split = linear(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)  # (B, T, H or H_kv, D)
        return (split if norm is None else norm(split)).transpose(1, 2)  # (B, H or H_kv, T, D)

    @outside_layer_graphs
    def _read_several(
        self, reader: StateReader, states: States, mask: Any, new: int, carry: Carry
    ) -> tuple[States, Any]:
        """Return the states that attention reads if some combine several layers', and the mask for them."""
        if reader.needs_mask:
            self._check_mask(mask)
        q, keys, values = (
            tuple(states[i] if name is None else carry[SHARED][name] for name in self.sources.get(i, (None,)))
            for i in range(len(STATES))
        )
        k, v, mask = reader(keys, values, mask, new)
        return [q[0], k, v], mask

    def _check_mask(self, mask: Any) -> None:
        """Refuse attention that takes no mask as a tensor."""
        implementation = self.config._attn_implementation or "eager"
        # FlashAttention-2 ignores masks (B, 1, T, S) without a word
        if not isinstance(mask, Tensor | None) or "flash" in implementation:
            raise ValueError(f"attention {implementation!r} accepts no mask tensor; use sdpa or eager")

    # names in the carry differ from layer to layer: inside a layer's graph each would compile it again
    @outside_layer_graphs
    def _read_others(self, own_states: States, carry: Carry) -> States:
        """Return the layer's own states, and those of other layers that it reads instead."""
        shared = {i: carry[SHARED][name] for i, (name,) in self.sources.items() if name is not None}
        return [shared.get(i, state) for i, state in enumerate(own_states)]

    @outside_layer_graphs
    def _carry(self, own_states: States, carry: Carry) -> Carry:
        """Return the carry with the states that later layers read."""
        states = carry.get(SHARED, SharedStates({}))
        return {**carry, SHARED: states.updated({name: own_states[i] for i, name in self.carried.items()})}

    def _attend_to_choice(
        self, module: TokenChoice, choice: Tensor | None, states: States, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, H, D) of a layer that chooses tokens or attends to chosen ones, and the choice."""
        self._check_mask(mask)
        q, k, v = states
        assert q is not None and k is not None and v is not None
        softcap, watched = self.softcap.get("softcap"), self._attention() not in UNWATCHED
        # for one token the scores serve attention and choice: with keys read twice a chooser cost 1.5 layers
        if self.chooses and q.shape[2] == 1 and not self.training and not watched:
            return module.attend_and_choose(q, k, v, mask, self.scaling, softcap, sparse=self.attends_to_choice)
        if self.chooses:
            choice = module.choose(q, k, mask, self.scaling, softcap)
        # A probe sees all keys and rows in one call. With gathered keys an intervention on a position acted on another
        # one, and in blocks of rows a diagnosis of more than one block failed.
        if watched and choice is not None and self.attends_to_choice:
            chosen = mask_of(module.of_reader(choice), k.shape[2], q.shape[1] // k.shape[1], mask)
            return self._attend(states, chosen, **kwargs)[0], choice
        if not self.attends_to_choice:
            return self._attend(states, mask, **kwargs)[0], choice

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return self._attend([q, k, v], mask, **kwargs)[0]

        return module.attend(q, k, v, mask, choice, attend), choice

    def _attention(self) -> Any:
        """Return the function that computes attention, which probes may have replaced."""
        implementation = self.config._attn_implementation or "eager"
        return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)

    def _attend(
        self, states: States, attention_mask: Any, shared_map: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, H, D), and the softmax map (B, H, T, S) if later layers use it and it was built.

        `shared_map` is the source's, (B, H, T, S). Attention that builds no map computes it again from the queries and
        keys, and so does dropout, which differs from layer to layer.
        """
        dropout = self.attention_dropout if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.sliding_window}
        options = {**options, **self.softcap, **kwargs}
        paged = options.pop("paged_cache", None)
        q, k, v = states
        if paged is not None:
            assert k is not None and v is not None
            k, v = read_paged(paged, k, v, self.layer_idx, options)
        attention = self._attention()
        # SDPA and FlashAttention return no map, and a probe's function must see every layer's call
        builds_map = attention is eager_attention_forward and not dropout
        if shared_map is not None and builds_map:
            assert v is not None
            out = shared_map @ repeat_kv(v, self.num_key_value_groups)  # (B, H, T, D)
            return out.transpose(1, 2), None
        out, built = attention(self, q, k, v, attention_mask, **options)
        return out, built if builds_map and self.shares_map else None

    def _cached(self, states: States, cache: Cache) -> States:
        """Return the states with cached and new tokens of the layer's own keys and values, (B, H_kv, S, D)."""
        q, k, v = states
        if k is not None and v is not None:
            return [q, *cache.update(k, v, self.layer_idx)]
        state = v if k is None else k
        assert state is not None
        # A single state is stored as keys, with values of head size 0: caches measure their length by keys, and with
        # values alone four-beam search was off by 3.4 in the logits. A cache that was allocated before the model was
        # known (as torch.export needs it) has space for keys and values, and stores the state as both.
        layer = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        has_values = isinstance(layer, StaticLayer) and layer.is_initialized and layer.v_head_dim > 0
        stored = cache.update(state, state if has_values else state[..., :0], self.layer_idx)[0]
        return [q, stored, None] if v is None else [q, None, stored]


# every layer of a model asks for the same
@functools.lru_cache(8)
def find_map_sources(plan: DepthPlan) -> tuple[int | None, ...]:
    """Return the layer whose softmax map each layer uses (it reads its queries and keys), (L,); None: its own."""
    sources: list[int | None] = [None] * plan.layers
    for layer, source in enumerate(plan.keys):
        if isinstance(source, int) and source != layer and plan.queries[layer] == source:
            # concatenated tokens, or chosen ones, give the two layers maps of different columns
            both = (layer, source)
            if not any(isinstance(plan.values[each], tuple) or plan.involves_choice(each) for each in both):
                sources[layer] = source
    return tuple(sources)
