"""Read a model's wiring from its config, without loading or downloading weights.

Steps: name → config → what each layer caches, which layers share, the form of the residual → result.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosslayer.models.checks import check_layers
from crosslayer.models.embedded import EMBEDDED
from crosslayer.output.formatting import folder_name
from crosslayer.wiring.dtypes import DEFAULT, dtype_name, item_sizes
from crosslayer.wiring.fields import NO_KV_CACHE, depth_plan, layer_states, layer_types_of, residual_form
from crosslayer.wiring.plain_config import GgufConfig, PlainConfig
from crosslayer.wiring.result import ModelPlan
from crosslayer.wiring.source import Source, read_source
from crosslayer.wiring.states import LayerStates
from crosslayer.wiring.values import field, int_field

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

REFUSED = {  # model types whose states are of another kind
    "blt": "consists of several models",
    "recurrent_gemma": "keeps its states in its modules, not in a cache",
    "reformer": "caches hidden states and hash buckets",
    "rwkv": "has no attention, and keeps states of its own kind",
    "xlnet": "caches hidden states",
    "xlstm": "has no attention, and keeps states of its own kind",
}
NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # how names of classes with a cache end
ENCODERS = ("Encoder", "Bidirectional", "MaskedLM")  # in names of classes without one, on a decoder's type


def read_plan(
    model: "PreTrainedModel | PreTrainedConfig | str | Path",
    length: int | Sequence[int] = 1,
    dtype: "str | torch.dtype | None" = None,
    *,
    kv_dtype: str | None = None,
    batch: int = 1,
    engine: str | None = None,
    memory: int | None = None,
    like: str | None = None,
) -> ModelPlan:
    """Return which layers of a model share states, what its cache holds, and the form of its residual: see `plan`."""
    lengths = (length,) if isinstance(length, int) else tuple(length)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"length must be at least 1 token, got {min(lengths, default='none')}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1 sequence, got {batch}")
    if isinstance(model, str | Path):
        source, name, caches = read_source(str(model), like), str(model), True
    else:
        source, name, caches = _loaded(model)
    config, values = source.config, source.values
    if like is not None and values is None:
        raise ValueError(f"--like must come with a config.json, got a {type(config).__name__}; leave it out")
    if values is not None and not isinstance(config, PlainConfig):
        from crosslayer.wiring.ignored import check_ignored

        check_ignored(values, config, folder_name(name), read_wiring)
    is_file = isinstance(config, GgufConfig) and model not in EMBEDDED
    engine = engine or ("llama.cpp" if is_file else "transformers")
    return _counted(source, name, caches, lengths, dtype, kv_dtype, batch, engine, memory)


def model_plan(
    model: "PreTrainedModel | PreTrainedConfig",
    length: int = 1,
    dtype: "str | torch.dtype | None" = None,
    *,
    kv_dtype: str | None = None,
    batch: int = 1,
) -> ModelPlan:
    """Return the plan of a model that is loaded, or of its config."""
    return _counted(*_loaded(model), (length,), dtype, kv_dtype, batch)


def _loaded(model: Any) -> tuple[Source, str, bool]:
    """Return the config of a model or a config as it is, the model's name, and whether it takes a cache."""
    if not hasattr(model, "state_dict"):
        return Source(model), "", True
    from crosslayer.wiring.transformers_config import takes_cache

    weights_bytes = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    return Source(model.config, weights_bytes), model.name_or_path or "", takes_cache(model)


def _counted(
    source: Source,
    name: str,
    caches: bool,
    lengths: tuple[int, ...],
    dtype: Any,
    kv_dtype: str | None,
    batch: int,
    engine: str = "transformers",
    memory: int | None = None,
) -> ModelPlan:
    """Return the plan of a config, with the bytes of its cache."""
    config, weights_bytes, parameters, values = source
    wiring = read_wiring(config)
    dtype = dtype_name(dtype or wiring["dtype"])
    sizes = item_sizes(dtype, kv_dtype, engine)
    if memory is not None and weights_bytes is None:
        from crosslayer.wiring.transformers_config import count_parameters

        parameters = count_parameters(config if values is None else values)
    if engine == "llama.cpp" and weights_bytes is not None:
        parameters = None  # it loads a file as it is
    return ModelPlan(
        **{**wiring, "caches": wiring["caches"] and caches, "dtype": dtype},
        model=folder_name(name) or wiring["type"],
        kv_dtype=kv_dtype or dtype,
        engine=engine,
        sizes=sizes,
        lengths=lengths,
        batch=batch,
        weights_bytes=weights_bytes if parameters is None else round(parameters * sizes.model),
        parameters=parameters,
        memory=memory,
    )


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
    if not isinstance(text, PlainConfig) and field(text, "plan") is None:
        from crosslayer.wiring.transformers_config import check_readers

        check_readers(text, plan)
    residual, streams = residual_form(text)
    states = [
        layer_states(text.per_layer_config[layer], layer_type, layer) for layer, layer_type in enumerate(layer_types)
    ]
    layers = (s if plan.attends(i) or not s.keys else LayerStates("no attention") for i, s in enumerate(states))
    return {
        "type": config.model_type,
        "plan": plan,
        "layers": tuple(layers),
        "residual": residual,
        "streams": streams,
        "methods": tuple(method.name() for method in field(text, "methods", default=())),
        "caches": _caches(config, text),
        "dtype": str(text.dtype or config.dtype or DEFAULT).removeprefix("torch."),
    }


def _caches(config: Any, text: Any) -> bool:
    """Return whether a config's model keeps a cache, by its class or its model type."""
    if _is_encoder_type(config, text) and not field(text, "is_decoder", default=False):
        return False
    classes = config.architectures or ()
    if classes and not any(name.endswith(CAUSAL) for name in classes):  # another head, or none, on a decoder or encoder
        from crosslayer.wiring.transformers_config import is_decoder_type

        bidirectional = field(text, "use_bidirectional_attention") is True
        named = any(word in name for name in classes for word in ENCODERS)
        if bidirectional or named or not is_decoder_type(config.model_type, text.model_type):
            return False
    return field(text, "use_cache", "layer_types") is not None


def _is_encoder_type(config: Any, text: Any) -> bool:
    if isinstance(config, PlainConfig):
        return bool(field(config, "masked", default=False) or field(text, "masked", default=False))
    from crosslayer.wiring.transformers_config import is_encoder_type

    return is_encoder_type(config.model_type, text.model_type)


def _check(config: Any, text: Any) -> None:
    """Refuse a config that does not describe a stack of Transformer layers, or has impossible values."""
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder; only decoders and encoders are supported")
    layers = field(text, "num_hidden_layers")
    check_layers(layers)
    first = text if layers is None else text.per_layer_config[0]  # layers may differ
    needed: list[str] = list(NEEDED)
    if layers is None or not set(layer_types_of(text)) <= set(NO_KV_CACHE):
        needed.insert(1, "num_attention_heads")
    missing = [name for name in needed if field(first, name) is None]
    if missing:
        raise ValueError(
            f"the config of {config.model_type} has no {', '.join(missing)}, so it does not describe a language "
            "model with attention"
        )
    for name in needed:
        int_field(first, 0, name)
