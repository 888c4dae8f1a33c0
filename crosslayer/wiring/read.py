"""The plan of a model from its config, without loading or downloading weights.

Steps: name → config → what each layer caches, which layers share, the form of the residual → bytes.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.embedded import EMBEDDED
from crosslayer.models.load import one_line_errors
from crosslayer.output.formatting import folder_name
from crosslayer.wiring.engines import dtype_name, item_sizes
from crosslayer.wiring.fields import read_wiring
from crosslayer.wiring.gguf import GgufConfig
from crosslayer.wiring.result import ModelPlan
from crosslayer.wiring.source import Source

WHOLE = (auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING)


def model_plan(
    model: PreTrainedModel | PreTrainedConfig | Source,
    length: int | Sequence[int] = 1,
    dtype: str | torch.dtype | None = None,
    *,
    kv_dtype: str | None = None,
    batch: int = 1,
    engine: str | None = None,
    memory: int | None = None,
) -> ModelPlan:
    """Return which layers of a model share states, what its cache holds, and the form of its residual: see `plan`."""
    lengths = (length,) if isinstance(length, int) else tuple(length)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"length must be at least 1 token, got {min(lengths, default='none')}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1 sequence, got {batch}")
    takes_cache = True
    if isinstance(model, Source):
        config, weights_bytes, parameters, name = model
    elif isinstance(model, PreTrainedModel):
        config, parameters, name = model.config, None, model.name_or_path or ""
        weights_bytes = sum(weight.numel() * weight.itemsize for weight in model.parameters())
        takes_cache = CACHE in inspect.signature(type(model).forward).parameters
    else:
        config, weights_bytes, parameters, name = Source(model)
    try:
        wiring = read_wiring(config)
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"the config of {config.model_type} has a value that cannot be used: {error}") from error
    dtype = dtype_name(dtype or wiring["dtype"])
    engine = engine or ("llama.cpp" if isinstance(config, GgufConfig) and name not in EMBEDDED else "transformers")
    sizes = item_sizes(dtype, kv_dtype, engine)
    if memory is not None and weights_bytes is None:
        parameters = _count_parameters(config)
    if engine == "llama.cpp" and weights_bytes is not None:
        parameters = None  # it loads a file as it is
    return ModelPlan(
        **{**wiring, "caches": wiring["caches"] and takes_cache, "dtype": dtype},
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


def _count_parameters(config: Any) -> int | None:
    """Return the parameters of the whole model of a config, None if transformers cannot build it by itself."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    if any("/" in str(getattr(part, "_attn_implementation", None)) for part in parts):
        return None  # attention code of the hub, which never runs
    try:
        with one_line_errors("config"), torch.device("meta"):
            model_class: Any = next(mapping[type(config)] for mapping in WHOLE if type(config) in mapping)
            return sum(weight.numel() for weight in model_class(config).parameters())
    except ValueError:
        return None
