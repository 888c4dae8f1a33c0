"""Interpretation of config fields: each layer's attention and cache, which layers share, the residual stream.

An architecture is recognized by the fields of its config alone; there is no adapter per architecture. Counts of
elements are what transformers' caches allocate per token.
"""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from crosslayer.core.method import Method
from crosslayer.core.plan import DepthPlan, TokenCount
from crosslayer.core.transformers_versions import layers_without_cache
from crosslayer.models.errors import check_layers
from crosslayer.wiring.classes import reads
from crosslayer.wiring.states import LayerStates, field, fixed_states, int_field

REFUSED = {  # model types whose states are of another kind
    "blt": "consists of several models",
    "recurrent_gemma": "keeps its states in its modules, not in a cache",
    "reformer": "caches hidden states and hash buckets",
    "rwkv": "has no attention, and keeps states of its own kind",
    "xlnet": "caches hidden states",
    "xlstm": "has no attention, and keeps states of its own kind",
}
ENCODERS = frozenset(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)  # masked language models; some can be decoders too
DECODERS = frozenset({**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
# LlamaBidirectionalModel has the model type of Llama, so the names of classes count, too.
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # how names of classes with a cache end
NOT_CAUSAL = ("Encoder", "Bidirectional", "MaskedLM")  # in names of classes without one, on a decoder's type
IMAGES = "images"  # a layer that attends to images, whose keys and values grow with the images
NO_KV_CACHE = {  # layer types without keys and values of the text, and how tables show them
    IMAGES: "images",
    "linear_attention": "linear attention",
    "conv": "convolution",
    "moe": "no attention",
    "mlp": "no attention",
}
SLIDING = ("sliding_attention", "hybrid_sliding")
OVERLAPPING = "compressed_sparse_attention"
COMPRESSED = (OVERLAPPING, "heavily_compressed_attention")
INDEXED = "indexed_attention"
KNOWN = (*NO_KV_CACHE, *SLIDING, *COMPRESSED, "full_attention", "chunked_attention", INDEXED, "hybrid")

# names of fields, of which the first that is set counts
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
HEAD_SIZE = ("head_dim", "dim_head")
SELECTED = ("index_topk", "indexer_budget")  # tokens, or compressed entries, that a query reads
INDEX_SIZE = ("index_head_dim", "indexer_head_dim")  # of an indexer's key
# Two facts that only the code of a model has, and no field: key-value heads of a sliding layer per head of a full one,
# and model types whose indexers cache float32 whatever the dtype.
SLIDING_HEADS = {"mimo_v2_flash": 2}
INDEX_IN_FLOAT32 = ("dots3_note_text",)
STREAMS = {  # number of residual streams
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
    "altup_num_inputs": "alternating updates",
}
DEPTH_BLOCK = "n_layers_per_attn_res_block"  # attention over depth: layers per source


def layer_types_of(config: Any) -> list[str]:
    """Return the type of each layer, by the rule of transformers' caches if the config has no layer types."""
    if field(config, "cross_attention_layers"):
        images = set(field(config, "cross_attention_layers"))
        return [IMAGES if layer in images else "full_attention" for layer in range(config.num_hidden_layers)]

    candidates = [field(config, name) for name in ("layers_block_type", "layer_types")]
    candidates = [types for types in candidates if types is not None]
    if candidates:
        # Jamba's blocks are "mamba" and "attention", which caches do not know, so its layer_types are used.
        layer_types = next((types for types in candidates if set(types) <= set(KNOWN)), candidates[0])
        return list(layer_types[: config.num_hidden_layers])

    # Without either field, transformers makes a windowed cache for a layer with a window, or else with a chunk.
    windows = [field(layer, "sliding_window") for layer in config.per_layer_config]
    chunks = [field(layer, "attention_chunk_size") for layer in config.per_layer_config]
    return [
        "sliding_attention" if window is not None else "full_attention" if chunk is None else "chunked_attention"
        for window, chunk in zip(windows, chunks, strict=True)
    ]


def layer_states(config: Any, layer_type: str, layer: int) -> LayerStates:
    """Return the states of a layer by its type; `config` is that of the layer (`per_layer_config`).

    Raises:
        ValueError: the layer's type is not known here.
    """
    if layer_type not in KNOWN:
        raise ValueError(f"layer {layer} is of type {layer_type!r}; the types that can be read are {', '.join(KNOWN)}")
    fixed, fixed_float32, kernel = fixed_states(config, layer_type, layer)
    states = LayerStates(NO_KV_CACHE.get(layer_type, ""), fixed=fixed, fixed_float32=fixed_float32, kernel=kernel)
    if layer_type in NO_KV_CACHE:
        return states
    rotating = field(config, "no_rope_layers")  # by layer, 1: rotary, 0: none
    rotates = not rotating or bool(rotating[layer])
    keys, values, heads = _sizes(config, layer_type, layer, rotates)

    window = None
    if layer_type in SLIDING or layer_type in COMPRESSED:
        window = int_field(config, layer, "sliding_window")
    elif layer_type == "chunked_attention":
        window = int_field(config, layer, "attention_chunk_size")
    every = config.compress_rates[layer_type] if layer_type in COMPRESSED else None

    selected, index = None, 0
    if layer_type in (INDEXED, OVERLAPPING):
        selected = int_field(config, layer, *SELECTED)
        indexers = field(config, "indexer_types")
        # A layer that reuses an earlier layer's selection caches nothing for it.
        if indexers is None or indexers[layer] != "shared":
            index = int_field(config, layer, *INDEX_SIZE, default=0)
            if field(config, "index_kpool") is not None:
                index = 2 * index + 1  # key, gate, and whether the token counts

    mask = _mask(layer_type, window, every, selected)
    return replace(
        states,
        mask=mask if rotates else f"{mask}, no rope",
        keys=keys,
        values=values,
        heads=heads,
        index=index,
        index_float32=config.model_type in INDEX_IN_FLOAT32,
        window=window,
        every=every,
        overlap=layer_type == OVERLAPPING,
        selected=selected,
        prompt=int_field(config, layer, "prompt_length", least=0, default=0),
        passes=_passes(config, layer),
    )


def _passes(config: Any, layer: int) -> int:
    """Return how often a token goes through a layer, if each time has a cache of its own."""
    if field(config, "loop_num_passes") is not None:  # Inkling 2 Loop
        first, behind = field(config, "loop_layer_index_start"), field(config, "loop_layer_index_end")
        return int_field(config, layer, "loop_num_passes") if first <= layer < behind else 1
    if field(config, "recurrent_kv_cache_mode") == "per_loop":  # Dory
        first = field(config, "n_input_layers")
        behind = first + field(config, "n_recurrent_layers")
        return int_field(config, layer, "n_recurrent_loops") if first <= layer < behind else 1
    return 1


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


def _sizes(config: Any, layer_type: str, layer: int, rotates: bool) -> tuple[int, int, int]:
    """Return the elements of a token's keys and values in a layer's cache, and the number of heads (0: a latent)."""
    # No class declares `use_mla`, so it is read from the file. If it is False, published configs have latents of 0.
    off = getattr(config, "use_mla", None) is False and reads(config, "kv_lora_rank")
    latent = None if off else int_field(config, layer, "kv_lora_rank")
    if latent is not None:
        # The latent holds keys and values together; only the rotated part of the keys is cached in addition.
        rope = int_field(config, layer, "qk_rope_head_dim", least=0, default=0)
        return latent, rope if rotates else 0, 0

    prefix = "swa_" if layer_type in SLIDING and field(config, "swa_head_dim") is not None else ""
    heads = int_field(config, layer, *(f"{prefix}{name}" for name in KV_HEADS))
    # Falcon 7B has a single head. Falcon's newer decoders also set `multi_query`, and read `num_kv_heads` instead.
    if field(config, "multi_query") and not field(config, "new_decoder_architecture"):
        heads = 1
    if layer_type in SLIDING and not prefix:
        heads *= SLIDING_HEADS.get(config.model_type, 1)

    whole = config.hidden_size // config.num_attention_heads
    size = whole if off else int_field(config, layer, *(f"{prefix}{name}" for name in HEAD_SIZE), default=whole)
    if layer_type in COMPRESSED or field(config, "keys_hold_values"):
        return heads * size, 0, heads
    value_size = size if off else int_field(config, layer, f"{prefix}v_head_dim", default=size)
    return heads * size, heads * value_size, heads


def as_in_transformers(config: Any, layers: tuple[LayerStates, ...]) -> tuple[LayerStates, ...]:
    """Return the states of layers as transformers caches them: Falcon 40B and 180B for each query head."""
    text = config.get_text_config(decoder=True)
    if not field(text, "new_decoder_architecture"):
        return layers
    # Their class repeats keys and values for the query heads before it caches them; other engines do not.
    heads = text.num_attention_heads
    repeated = []
    for states in layers:
        keys, values = states.keys // states.heads * heads, states.values // states.heads * heads
        repeated.append(replace(states, keys=keys, values=values, heads=heads))
    return tuple(repeated)


def depth_plan(config: Any, layer_types: list[str]) -> DepthPlan:
    """Return which layer reads which states.

    Raises:
        ValueError: the config shares keys and values in an unknown way.
    """
    ours = field(config, "plan")
    if ours is not None:
        return ours
    layers = range(len(layer_types))
    sources: list[int | None] = [None if layer_types[layer] in NO_KV_CACHE else layer for layer in layers]
    for layer, source in _readers(config, layer_types).items():
        sources[layer] = source
    queries = tuple(None if source is None else layer for layer, source in enumerate(sources))
    plan = DepthPlan(queries, tuple(sources), tuple(sources), tuple(layers))
    selected = None if INDEXED not in layer_types else int_field(config, layer_types.index(INDEXED), *SELECTED)
    if selected is None:  # there are no indexers
        return plan

    # Each layer's tokens are selected by its own indexer, or by that of the nearest layer below that has one.
    choosers: list[int] = []
    for layer, indexer in enumerate(field(config, "indexer_types") or ["full"] * len(layer_types)):
        if indexer == "shared" and not choosers:
            raise ValueError(f"layer {layer} of {config.model_type} shares an indexer, and no layer below has one")
        choosers.append(choosers[-1] if indexer == "shared" else layer)
    choices = tuple(choosers[layer] if layer_types[layer] == INDEXED else None for layer in layers)
    return replace(plan, choices=choices, chosen=TokenCount(selected))


def _readers(config: Any, layer_types: list[str]) -> dict[int, int]:
    """Return the source of each layer that reads another's keys and values."""
    named = field(config, "kv_source_layers")
    if named is not None:
        return {layer: source for layer, source in enumerate(named) if source != layer}
    shared = field(config, "num_kv_shared_layers", default=0)
    if not 0 <= shared <= len(layer_types):
        raise ValueError(f"num_kv_shared_layers must be 0 to {len(layer_types) - 1}, got {shared}")
    # Gemma's rule: each of the last layers reads the last one of its own type before them.
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


def residual_form(config: Any) -> tuple[str, int]:
    """Return a description of the residual connection, and its number of streams."""
    methods = field(config, "methods", default=())
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


def read_wiring(config: Any) -> dict[str, Any]:
    """Return the fields of a `ModelPlan` that its config decides.

    Raises:
        ValueError: the config describes no attention layers, or something unsupported.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type in REFUSED:
        raise ValueError(f"{text.model_type} {REFUSED[text.model_type]}, which is not counted")
    _check(config, text)
    layer_types = layer_types_of(text)
    plan = depth_plan(text, layer_types)
    if isinstance(text, PreTrainedConfig) and field(text, "plan") is None:
        # transformers' cache knows which layers store nothing. If the plan differs, layers share by an unknown rule.
        reading = {layer for layer, source in enumerate(plan.keys) if source not in (layer, None)}
        reusing = layers_without_cache(text)
        if reusing != reading:
            raise ValueError(f"layers {sorted(reusing)} of {text.model_type} reuse a cache; no known field says whose")
    residual, streams = residual_form(text)
    layers = []
    for layer, layer_type in enumerate(layer_types):
        states = layer_states(text.per_layer_config[layer], layer_type, layer)
        layers.append(states if plan.attends(layer) or not states.keys else LayerStates("no attention"))
    return {
        "type": config.model_type,
        "plan": plan,
        "layers": tuple(layers),
        "residual": residual,
        "streams": streams,
        "methods": tuple(method.name() for method in field(text, "methods", default=())),
        "caches": _caches(config, text),
        "dtype": str(text.dtype or config.dtype or "bfloat16").removeprefix("torch."),
    }


def _caches(config: Any, text: Any) -> bool:
    """Return whether a config's model keeps a cache, by its class or its model type."""
    types = {config.model_type, text.model_type}
    if types & ENCODERS and not field(text, "is_decoder", default=False):
        return False
    classes = config.architectures or ()
    # With another head or none, the model may be a decoder (a reward model, which has a cache) or an encoder.
    if classes and not any(name.endswith(CAUSAL) for name in classes):
        bidirectional = field(text, "use_bidirectional_attention") is True
        if bidirectional or any(word in name for name in classes for word in NOT_CAUSAL) or not types & DECODERS:
            return False
    return field(text, "use_cache", "layer_types") is not None


def _check(config: Any, text: Any) -> None:
    """Refuse a config that does not describe a stack of Transformer layers, or has impossible values."""
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder; only decoders and encoders are supported")
    layers = field(text, "num_hidden_layers")
    check_layers({"num_hidden_layers": layers})
    first = text if layers is None else text.per_layer_config[0]  # layers may differ
    needed: list[str] = list(NEEDED)
    if layers is None or not set(layer_types_of(text)) <= set(NO_KV_CACHE):
        needed.insert(1, "num_attention_heads")
    missing = [name for name in needed if field(first, name) is None]
    if missing:
        names = ", ".join(missing)
        raise ValueError(f"the config of {config.model_type} has no {names}, so it does not describe a language model")
    for name in needed:
        int_field(first, 0, name)
