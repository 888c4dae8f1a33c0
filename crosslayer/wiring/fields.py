"""Interpretation of config fields: each layer's attention and cache, which layers share, the residual stream.

An architecture is recognised by the fields of its config alone; there is no adapter per architecture. Counts of
elements are what transformers' caches allocate per token.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from crosslayer.core.method import Method
from crosslayer.core.plan import DepthPlan
from crosslayer.core.transformers_versions import layers_without_cache

NO_KV_CACHE = {  # layer types without keys and values, and how tables show them
    "linear_attention": "linear attention",
    "conv": "convolution",
    "moe": "no attention",
    "mlp": "no attention",
}
SLIDING = ("sliding_attention", "hybrid_sliding")
COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
KNOWN = (*NO_KV_CACHE, *SLIDING, *COMPRESSED, "full_attention", "chunked_attention", "indexed_attention", "hybrid")

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")  # the first that is set
HEAD_SIZE = ("head_dim", "dim_head")
# key-value heads of a sliding layer per head of a full layer, for models without a field for it
SLIDING_HEADS = {"mimo_v2_flash": 2}
SELECTED = ("index_topk", "indexer_budget")  # tokens, or compressed entries, that a query reads
INDEX_SIZE = ("index_head_dim", "indexer_head_dim")  # of an indexer's key
STREAMS = {  # number of residual streams
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
    "altup_num_inputs": "alternating updates",
}
DEPTH_BLOCK = "n_layers_per_attn_res_block"  # attention over depth: layers per source


@dataclass(frozen=True)
class LayerStates:
    """What a layer's attention reads and what its cache holds.

    Attributes:
        mask: a short description of the mask.
        keys: elements of a token's keys, or of the latent for keys and values; 0 without attention.
        values: elements of a token's values, or of what is cached beside the latent; 0 if the keys are the values.
        index: elements of a token that an indexer caches.
        window: tokens that a query can attend to, including its own; None: all.
        every: tokens per compressed entry, beside the window; None: no compressed entries.
        selected: tokens, or compressed entries, that a query selects of those it can attend to; None: all.
        prompt: tokens that the model itself adds before a sequence.

    """

    mask: str
    keys: int = 0
    values: int = 0
    index: int = 0
    window: int | None = None
    every: int | None = None
    selected: int | None = None
    prompt: int = 0

    def entries(self, length: int) -> int:
        """Return the number of compressed entries of a sequence."""
        return 0 if self.every is None else length // self.every

    def stored(self, length: int, states: tuple[str, ...] = ("keys", "values")) -> int:
        """Return the elements that the cache holds of a sequence; a windowed cache leaves space for the next token.

        `states` are those that the layer stores. States of fixed size, as of linear attention and of unfinished
        entries, are not counted.
        """
        tokens = length + self.prompt if self.window is None else min(length, self.window - 1)
        size = (self.keys if "keys" in states else 0) + (self.values if "values" in states else 0)
        return (tokens + self.entries(length)) * size + self._indexed(length) * self.index

    def read(self, length: int) -> int:
        """Return the elements that attention reads for the last token of a sequence."""
        tokens = length + self.prompt if self.window is None else min(length, self.window)
        entries = self.entries(length)
        if self.selected is not None:
            tokens = min(tokens, self.selected) if self.every is None else tokens
            entries = min(entries, self.selected)
        return (tokens + entries) * (self.keys + self.values) + self._indexed(length) * self.index

    def _indexed(self, length: int) -> int:
        return length if self.every is None else self.entries(length)


def field(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return the value of the first of the fields `names` that is set in a config, otherwise `default`."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def int_field(config: PreTrainedConfig, layer: int, *names: str, least: int = 1, default: Any = None) -> Any:
    """Return the first of the fields `names` that is set in a layer's config, as a whole number.

    Raises:
        ValueError: the value is not a whole number, or is below `least`.

    """
    name = next((name for name in names if field(config, name) is not None), None)
    if name is None:
        return default
    value = field(config, name)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"layer {layer}: {name} must be a whole number of at least {least}, got {value}")
    return value


def layer_types_of(config: PreTrainedConfig) -> list[str]:
    """Return the type of each layer, by the rule of transformers' caches if the config has no layer types."""
    candidates = [field(config, name) for name in ("layers_block_type", "layer_types")]
    candidates = [types for types in candidates if types is not None]
    if candidates:  # Jamba's blocks are "mamba", so its layer_types are used
        layer_types = next((types for types in candidates if set(types) <= set(KNOWN)), candidates[0])
        return list(layer_types[: config.num_hidden_layers])
    windows = [field(layer, "sliding_window") for layer in config.per_layer_config]
    chunks = [field(layer, "attention_chunk_size") for layer in config.per_layer_config]
    return [
        "sliding_attention" if window is not None else "full_attention" if chunk is None else "chunked_attention"
        for window, chunk in zip(windows, chunks, strict=True)
    ]


def layer_states(config: PreTrainedConfig, layer_type: str, layer: int) -> LayerStates:
    """Return the states of a layer by its type; `config` is that of the layer (`per_layer_config`).

    Raises:
        ValueError: the layer's type is not known here.

    """
    if layer_type in NO_KV_CACHE:
        return LayerStates(NO_KV_CACHE[layer_type])
    if layer_type not in KNOWN:
        raise ValueError(f"layer {layer} is of type {layer_type!r}; the types that can be read are {', '.join(KNOWN)}")
    keys, values = _sizes(config, layer_type, layer)
    window, every, selected, index = None, None, None, 0
    if layer_type in SLIDING or layer_type in COMPRESSED:
        window = int_field(config, layer, "sliding_window")
    elif layer_type == "chunked_attention":
        window = int_field(config, layer, "attention_chunk_size")
    if layer_type in COMPRESSED:
        every = config.compress_rates[layer_type]
    if layer_type in ("indexed_attention", "compressed_sparse_attention"):
        selected, index = int_field(config, layer, *SELECTED), _index_size(config, layer)
    mask = _mask(layer_type, window, every, selected) + _shared_indexer(config, layer)
    mask += "" if _rotates(config, layer) else ", no rope"
    prompt = int_field(config, layer, "prompt_length", least=0, default=0)
    return LayerStates(mask, keys, values, index, window, every, selected, prompt)


def _mask(layer_type: str, window: int | None, every: int | None, selected: int | None) -> str:
    """Describe the mask of a layer."""
    limit = "chunk" if layer_type == "chunked_attention" else "window"
    seen = "full" if window is None else f"{limit} {window}"
    top = "" if selected is None else f"top {selected}"
    if every is not None:
        entries = f"{top} of entries" if top else "entries"
        return f"{seen} + {entries} of {every}"
    beside = " + recurrent state" if layer_type.startswith("hybrid") else ""
    return f"{seen}{f', {top}' if top else ''}{beside}"


def _rotates(config: PreTrainedConfig, layer: int) -> bool:
    rotating = field(config, "no_rope_layers")  # by layer, 1: rotary, 0: none
    return not rotating or bool(rotating[layer])


def _shared_indexer(config: PreTrainedConfig, layer: int) -> str:
    """Return " as layer N" if a layer reuses the tokens that the indexer of layer N selected, otherwise ""."""
    layer_types = field(config, "indexer_types")
    if layer_types is None or layer_types[layer] != "shared":
        return ""
    return f" as layer {max(earlier for earlier in range(layer) if layer_types[earlier] == 'full')}"


def _sizes(config: PreTrainedConfig, layer_type: str, layer: int) -> tuple[int, int]:
    """Return the elements of a token's keys and values in a layer's cache."""
    latent = int_field(config, layer, "kv_lora_rank")
    if latent is not None:
        rope = int_field(config, layer, "qk_rope_head_dim", least=0, default=0)
        return latent, rope if _rotates(config, layer) else 0
    prefix = "swa_" if layer_type in SLIDING and field(config, "swa_head_dim") is not None else ""
    heads = int_field(config, layer, *(f"{prefix}{name}" for name in KV_HEADS))
    if field(config, "multi_query") and not field(config, "new_decoder_architecture"):
        heads = 1
    if layer_type in SLIDING and not prefix:
        heads *= SLIDING_HEADS.get(config.model_type, 1)
    whole = config.hidden_size // config.num_attention_heads
    size = int_field(config, layer, *(f"{prefix}{name}" for name in HEAD_SIZE), default=whole)
    if layer_type in COMPRESSED:  # keys are the values
        return heads * size, 0
    return heads * size, heads * int_field(config, layer, f"{prefix}v_head_dim", default=size)


def _index_size(config: PreTrainedConfig, layer: int) -> int:
    """Return the elements of a token that an indexer caches: 0 if a layer reuses an earlier layer's selection."""
    layer_types, size = field(config, "indexer_types"), int_field(config, layer, *INDEX_SIZE, default=0)
    if layer_types is not None and layer_types[layer] == "shared":
        return 0
    return size if field(config, "index_kpool") is None else 2 * size + 1  # key, gate, and whether it counts


def depth_plan(config: PreTrainedConfig, layer_types: list[str]) -> DepthPlan:
    """Return which layer reads which states.

    Raises:
        ValueError: no layer has attention, or the config shares keys and values in an unknown way.

    """
    own = field(config, "plan")
    if own is not None:
        return own
    layers = range(len(layer_types))
    sources: list[int | None] = [None if layer_types[layer] in NO_KV_CACHE else layer for layer in layers]
    if all(source is None for source in sources):
        raise ValueError(f"no layer of {config.model_type} has softmax attention, so there is no KV cache")
    readers = _readers(config, layer_types)
    for layer, source in readers.items():
        sources[layer] = source
    reusing = layers_without_cache(config)
    if reusing != set(readers):
        raise ValueError(
            f"layers {sorted(reusing)} of {config.model_type} reuse a cache, but no known field says whose"
        )
    queries = tuple(None if source is None else layer for layer, source in enumerate(sources))
    return DepthPlan(queries, tuple(sources), tuple(sources), tuple(layers))


def _readers(config: PreTrainedConfig, layer_types: list[str]) -> dict[int, int]:
    """Return the source of each layer that reads another's keys and values."""
    named = field(config, "kv_source_layers")
    if named is not None:
        return {layer: source for layer, source in enumerate(named) if source != layer}
    shared = field(config, "num_kv_shared_layers", default=0)
    if not 0 <= shared <= len(layer_types):
        raise ValueError(f"num_kv_shared_layers must be 0 to {len(layer_types) - 1}, got {shared}")
    first = len(layer_types) - shared
    readers = {}
    for layer in range(first, len(layer_types)):
        sources = [source for source in range(first) if layer_types[source] == layer_types[layer]]
        if not sources:
            raise ValueError(
                f"layer {layer} of {config.model_type} ({layer_types[layer]}) has no keys and values of its own, and "
                "no earlier layer of its type has any: it reads those of another model"
            )
        readers[layer] = sources[-1]
    return readers


def residual_form(config: PreTrainedConfig, methods: list[Method]) -> tuple[str, int]:
    """Return a description of the residual connection, and its number of streams."""
    ours = [method.name() for method in methods if type(method).residual is not Method.residual]
    if ours:
        return f"by {' and '.join(ours)}", 1
    for name, form in STREAMS.items():
        count = field(config, name)
        if count is not None and count > 1:
            return f"{count} streams ({form})", count
    block = field(config, DEPTH_BLOCK)
    if block is not None:
        return f"attention over depth (a source for each {block} layers)", 1
    return "plain sum", 1
