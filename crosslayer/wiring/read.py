"""Read a model's wiring from its config: no weights are loaded, and none are fetched.

Flows: a name → its config → what each layer keeps, who reads whom, the residual's form → result.
"""

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.models.load import is_causal, load_config, public_name, resolve_dtype
from crosslayer.wiring.fields import LayerStates, depth_plan, field, layer_kinds, layer_states, residual_form
from crosslayer.wiring.result import ModelPlan

NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def read_plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    *,
    length: int = 4096,
    dtype: str | torch.dtype | None = None,
) -> ModelPlan:
    """Return who owns and who reads in a model, what its cache holds, and the form of its residual.

    Args:
        model: a model, a config, or a name: of the hub (its config.json alone is fetched), of a folder (which needs no
            weights), or smollm2 or minilm.
        length: tokens of the sequence that the cache holds.
        dtype: of the cache, or its name; default the checkpoint's own, bfloat16 where the config names none.

    Raises:
        ValueError: there is no such model, its config says nothing of layers with attention, or something that is not
            known here.

    """
    if length < 1:
        raise ValueError(f"length is {length}; the cache holds at least 1 token")
    config = model.config if isinstance(model, PreTrainedModel) else model
    config = config if isinstance(config, PreTrainedConfig) else load_config(str(config))
    text = config.get_text_config(decoder=True)
    _check(config, text)
    kinds = layer_kinds(text)
    plan, methods = depth_plan(text, kinds), field(text, "methods", default=[])
    residual, streams = residual_form(text, methods)
    wanted = resolve_dtype(dtype or text.dtype or config.dtype or torch.bfloat16, torch.device("cpu"))
    assert isinstance(wanted, torch.dtype)
    layers = [layer_states(text.per_layer_config[layer], kind, layer) for layer, kind in enumerate(kinds)]
    return ModelPlan(
        model=config.model_type if isinstance(model, PreTrainedConfig) else public_name(model),
        type=config.model_type,
        plan=plan,
        layers=tuple(s if plan.attends(i) or not s.keys else LayerStates("no attention") for i, s in enumerate(layers)),
        residual=residual,
        streams=streams,
        methods=tuple(method.name() for method in methods),
        caches="use_cache" in text.to_dict() and (is_causal(config) or not config.architectures),
        length=length,
        dtype=str(wanted).removeprefix("torch."),
        item_bytes=wanted.itemsize,
    )


def _check(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Refuse a config that says nothing of a stack of Transformer layers."""
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder; decoders and encoders can be read")
    kind = config.model_type
    missing = [name for name in NEEDED if field(text, name) is None]
    if missing:
        raise ValueError(
            f"the config of {kind} has no {', '.join(missing)}: it tells of no language model with attention"
        )
