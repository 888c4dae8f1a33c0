"""What a config says of a layer's attention and of the residual stream: its fields by name, and what they mean.

An architecture is recognised by the fields of its config alone; there is no adapter per architecture. Elements are
those that transformers' own caches allocate for a token.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from crosslayer.core.method import Method
from crosslayer.core.plan import DepthPlan
from crosslayer.core.transformers_versions import layers_without_cache

NO_KV_CACHE = {  # layer types that keep no keys and values, and what they are
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
# key-value heads of a sliding layer for each of a full layer, where no field says it
SLIDING_HEADS = {"mimo_v2_flash": 2}
SELECTED = ("index_topk", "indexer_budget")  # tokens, or compressed entries, that a query may look at
INDEX_SIZE = ("index_head_dim", "indexer_head_dim")  # of an indexer's key
STREAMS = {  # number of residual streams
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
    "altup_num_inputs": "alternating updates",
}
DEPTH_BLOCK = "n_layers_per_attn_res_block"  # attention over depth: layers that are summed into a source


@dataclass(frozen=True)
class LayerStates:
    """What a layer's attention sees, keeps and reads.

    Attributes:
        mask: in words.
        keys: elements of a token's keys, or of the latent that stands for keys and values; 0 without attention.
        values: elements of a token's values, or of what stands beside the latent; 0 where the keys are the values.
        index: elements that an indexer keeps of a token.
        window: tokens that a query sees, with its own; None for all.
        every: tokens that an entry stands for, beside the window; None without such entries.
        selected: tokens, or such entries, that a query reads of all that it may see; None for all.
        prompt: tokens that the model itself puts before a sequence.

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
        """Return how many entries stand for a sequence, beside its window."""
        return 0 if self.every is None else length // self.every

    def stored(self, length: int, owned: tuple[str, ...] = ("keys", "values")) -> int:
        """Return the elements that a sequence leaves in the cache; a window keeps what the next token sees beside it.

        States of fixed size, as those of linear attention and of unfinished entries, do not count.
        """
        tokens = length + self.prompt if self.window is None else min(length, self.window - 1)
        size = (self.keys if "keys" in owned else 0) + (self.values if "values" in owned else 0)
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
    """Return the first field among `names` that a config has and has set."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def int_field(config: PreTrainedConfig, layer: int, *names: str, least: int = 1, default: Any = None) -> Any:
    """Return the first field among `names` that a layer's config has set, which must be a whole number.

    Raises:
        ValueError: it is none, or below `least`.

    """
    name = next((name for name in names if field(config, name) is not None), None)
    if name is None:
        return default
    value = field(config, name)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"layer {layer}: {name} is {value}; it must be a whole number of at least {least}")
    return value


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the type of each layer, by the rule of transformers' caches where the config names none."""
    named = [kinds for name in ("layers_block_type", "layer_types") if (kinds := field(config, name)) is not None]
    if named:
        kinds = next((kinds for kinds in named if set(kinds) <= set(KNOWN)), named[0])  # Jamba's blocks are "mamba"
        return list(kinds[: config.num_hidden_layers])
    windows = [field(layer, "sliding_window") for layer in config.per_layer_config]
    chunks = [field(layer, "attention_chunk_size") for layer in config.per_layer_config]
    return [
        "sliding_attention" if window is not None else "full_attention" if chunk is None else "chunked_attention"
        for window, chunk in zip(windows, chunks, strict=True)
    ]


def layer_states(config: PreTrainedConfig, kind: str, layer: int) -> LayerStates:
    """Return what a layer of a type keeps; `config` is the layer's own (`per_layer_config`).

    Raises:
        ValueError: the layer's type is not known here.

    """
    if kind in NO_KV_CACHE:
        return LayerStates(NO_KV_CACHE[kind])
    if kind not in KNOWN:
        raise ValueError(f"layer {layer} is of type {kind!r}; the types that can be read are {', '.join(KNOWN)}")
    keys, values = _sizes(config, kind, layer)
    window, every, selected, index = None, None, None, 0
    if kind in SLIDING or kind in COMPRESSED:
        window = int_field(config, layer, "sliding_window")
    elif kind == "chunked_attention":
        window = int_field(config, layer, "attention_chunk_size")
    if kind in COMPRESSED:
        every = config.compress_rates[kind]
    if kind in ("indexed_attention", "compressed_sparse_attention"):
        selected, index = int_field(config, layer, *SELECTED), _index_size(config, layer)
    mask = _mask(kind, window, every, selected) + _choice(config, layer)
    mask += "" if _rotates(config, layer) else ", no rope"
    prompt = int_field(config, layer, "prompt_length", least=0, default=0)
    return LayerStates(mask, keys, values, index, window, every, selected, prompt)


def _mask(kind: str, window: int | None, every: int | None, selected: int | None) -> str:
    """Return what a layer's queries see, in words."""
    limit = "chunk" if kind == "chunked_attention" else "window"
    seen = "full" if window is None else f"{limit} {window}"
    top = "" if selected is None else f"top {selected}"
    if every is not None:
        entries = f"{top} of entries" if top else "entries"
        return f"{seen} + {entries} of {every}"
    beside = " + recurrent state" if kind.startswith("hybrid") else ""
    return f"{seen}{f', {top}' if top else ''}{beside}"


def _rotates(config: PreTrainedConfig, layer: int) -> bool:
    rotating = field(config, "no_rope_layers")  # by layer, 1: rotary, 0: none
    return not rotating or bool(rotating[layer])


def _choice(config: PreTrainedConfig, layer: int) -> str:
    """Return in words whose choice of tokens a layer takes over, if it makes none of its own."""
    kinds = field(config, "indexer_types")
    if kinds is None or kinds[layer] != "shared":
        return ""
    return f" as layer {max(earlier for earlier in range(layer) if kinds[earlier] == 'full')}"


def _sizes(config: PreTrainedConfig, kind: str, layer: int) -> tuple[int, int]:
    """Return the elements of a token in the two slots of a layer's cache."""
    latent = int_field(config, layer, "kv_lora_rank")
    if latent is not None:
        rope = int_field(config, layer, "qk_rope_head_dim", least=0, default=0)
        return latent, rope if _rotates(config, layer) else 0
    prefix = "swa_" if kind in SLIDING and field(config, "swa_head_dim") is not None else ""
    heads = int_field(config, layer, *(f"{prefix}{name}" for name in KV_HEADS))
    if field(config, "multi_query") and not field(config, "new_decoder_architecture"):
        heads = 1
    if kind in SLIDING and not prefix:
        heads *= SLIDING_HEADS.get(config.model_type, 1)
    whole = config.hidden_size // config.num_attention_heads
    size = int_field(config, layer, *(f"{prefix}{name}" for name in HEAD_SIZE), default=whole)
    if kind in COMPRESSED:  # keys are the values
        return heads * size, 0
    return heads * size, heads * int_field(config, layer, f"{prefix}v_head_dim", default=size)


def _index_size(config: PreTrainedConfig, layer: int) -> int:
    """Return what an indexer keeps of a token: nothing where a layer takes over an earlier layer's choice."""
    kinds, size = field(config, "indexer_types"), int_field(config, layer, *INDEX_SIZE, default=0)
    if kinds is not None and kinds[layer] == "shared":
        return 0
    return size if field(config, "index_kpool") is None else 2 * size + 1  # key, gate, and whether it counts


def depth_plan(config: PreTrainedConfig, kinds: list[str]) -> DepthPlan:
    """Return who owns and who reads.

    Raises:
        ValueError: no layer has attention, or keys and values are shared in a way that is not known here.

    """
    own = field(config, "plan")
    if own is not None:
        return own
    layers = range(len(kinds))
    sources: list[int | None] = [None if kinds[layer] in NO_KV_CACHE else layer for layer in layers]
    if all(source is None for source in sources):
        raise ValueError(f"no layer of {config.model_type} has softmax attention, so nothing is cached by token")
    readers = _readers(config, kinds)
    for layer, source in readers.items():
        sources[layer] = source
    reusing = layers_without_cache(config)
    if reusing != set(readers):
        raise ValueError(
            f"layers {sorted(reusing)} of {config.model_type} reuse a cache, and no known field says whose"
        )
    queries = tuple(None if source is None else layer for layer, source in enumerate(sources))
    return DepthPlan(queries, tuple(sources), tuple(sources), tuple(layers))


def _readers(config: PreTrainedConfig, kinds: list[str]) -> dict[int, int]:
    """Return the source of each layer that reads another's keys and values."""
    named = field(config, "kv_source_layers")
    if named is not None:
        return {layer: source for layer, source in enumerate(named) if source != layer}
    shared = field(config, "num_kv_shared_layers", default=0)
    if not 0 <= shared <= len(kinds):
        raise ValueError(f"num_kv_shared_layers is {shared}; it must be below the {len(kinds)} layers, or 0")
    first = len(kinds) - shared
    readers = {}
    for layer in range(first, len(kinds)):
        sources = [source for source in range(first) if kinds[source] == kinds[layer]]
        if not sources:
            raise ValueError(
                f"layer {layer} of {config.model_type} ({kinds[layer]}) owns no keys and values, nor does a layer "
                "below with its mask: it reads those of another model"
            )
        readers[layer] = sources[-1]
    return readers


def residual_form(config: PreTrainedConfig, methods: list[Method]) -> tuple[str, int]:
    """Return the form of the residual in words, and its number of streams."""
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
