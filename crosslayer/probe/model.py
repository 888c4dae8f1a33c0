"""What a probe needs to know of a Hugging Face model: layers, positions, and which token ids it takes.

Shapes: B batch, T tokens, C hidden.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.core.transformers_versions import layers_without_cache

NO_MASKS = "expected attn_implementation eager or sdpa, got {}; try attn_implementation='sdpa'"


def unwrapped(model: Any) -> Any:
    """Return a model as transformers built it: without what torch.compile puts around it, or PEFT.

    Names and everything else that is not a module come back as they are.

    Raises:
        ValueError: adapters of PEFT are not merged, so that the model inside computes something else; or it is a module
            of another library.
    """
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    # of torch.compile, whose class is costly to import
    if "_orig_mod" in model._modules:
        return unwrapped(model._modules["_orig_mod"])
    # A model of PEFT exists only if PEFT is imported already.
    if "peft" in sys.modules:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer

        if isinstance(model, PeftModel):
            adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
            if not all(module.merged for module in adapters):
                raise ValueError("a PEFT model must be merged, got separate adapters; try model.merge_and_unload()")
            return unwrapped(model.get_base_model())
    raise ValueError(f"a model must be a name, a folder or a PreTrainedModel, got {type(model).__name__}")


def plan_of(config: PreTrainedConfig) -> DepthPlan | None:
    """Return the plan of one of our own models, from its config."""
    text = config.get_text_config()
    return text.plan if isinstance(text, CrossLayerConfig) else None


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices of the layers that have softmax attention, from the config alone."""
    plan, text = plan_of(config), config.get_text_config()
    if plan is not None:
        return [i for i in range(plan.layers) if plan.attends(i)]
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    if not kinds:
        return list(range(text.num_hidden_layers))
    # the list may be longer than the stack
    kinds = kinds[: text.num_hidden_layers]
    return [i for i, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind or "hybrid" in kind]


def stored_states(config: PreTrainedConfig, layer: int) -> tuple[str, ...]:
    """Return which of its keys and values a layer keeps in the cache: none where it reuses another's."""
    plan = plan_of(config)
    if plan is not None:
        return plan.stored(layer)
    return () if layer in layers_without_cache(config) else CACHED


def layer_stack(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of Transformer layers: the largest `ModuleList` with `num_hidden_layers` entries.

    Raises:
        ValueError: the model has no such list (for example, it reuses one layer), or it is an encoder-decoder.
    """
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoders and encoders can be probed")
    count = config.num_hidden_layers
    lists = [m for m in text_model(model).modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of {count} layers, so it cannot be probed; neither can other models "
            "that reuse one layer's weights at every depth (ALBERT) or attend several times in a layer (LongCat-Flash)"
        )
    # another list may have as many entries by chance, or hold one small module for each layer
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def no_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return use_cache=False where the model knows it: packed positions and less memory."""
    return {"use_cache": False} if "use_cache" in model.config.get_text_config().to_dict() else {}


def text_model(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that its text config describes: without a vision tower."""
    config = model.config.get_text_config()
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config), model)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, and every module back into its own afterwards."""
    # by module: parts of a model may be frozen in evaluation mode, which `model.train()` would undo
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def position_embedding(model: PreTrainedModel) -> tuple[str, nn.Embedding] | None:
    """Return name and module of the text model's learned position table, known by its name (BERT, GPT-2, OPT)."""
    for name, module in text_model(model).named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            return name, module
    return None


def config_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a config names, if any; with YaRN as many as it extends them to, as in vLLM."""
    text: Any = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # of all layers, or by their type
        if limit is not None and isinstance(parameters, dict) and parameters.get("rope_type") == "yarn":
            original = parameters.get("original_max_position_embeddings") or limit
            # the larger one: some configs name the extended limit already
            limit = max(limit, int(original * parameters.get("factor", 1.0)))
    return limit


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has, if any limit; rows of the table for padding (RoBERTa) do not count."""
    limit = config_positions(model.config)
    embedding = position_embedding(model)
    if embedding is None:
        return limit
    _, table = embedding
    if table.padding_idx is None:
        return limit
    # positions begin behind the row for padding
    rows = table.num_embeddings - table.padding_idx - 1
    return rows if limit is None else min(limit, rows)


def positions(model: PreTrainedModel) -> int:
    """Return how many positions a model has; far more than enough where its config names no limit."""
    return position_limit(model) or 2**31


def check_ids(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse token ids that a model cannot take.

    Raises:
        ValueError: `ids` are no integers (B ≥ 1, T ≥ 2), not in the vocabulary, or more than the model's positions; or
            the model has flex attention, whose masks cannot be read.
    """
    if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2 or ids.is_floating_point():
        raise ValueError(f"ids must be integers (B ≥ 1, T ≥ 2), got {ids.dtype} of shape {tuple(ids.shape)}")
    config = model.config.get_text_config()
    check_length(model, ids.shape[1])
    least, most, size = int(ids.min()), int(ids.max()), config.vocab_size
    if least < 0 or most >= size:
        raise ValueError(f"token ids must be below {size}, got {least} to {most}; use this model's tokenizer")
    check_masks(model, "flex")


def check_masks(model: PreTrainedModel, *refused: str) -> None:
    """Refuse implementations of attention whose masks cannot be read or edited, by a part of their name.

    Raises:
        ValueError: the model runs with one of `refused`.
    """
    attention = model.config.get_text_config()._attn_implementation or "eager"
    if any(name in attention for name in refused):
        raise ValueError(NO_MASKS.format(attention))


def check_length(model: PreTrainedModel, length: int) -> None:
    """Refuse sequences of more tokens than the model has positions, by a ValueError."""
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ValueError(f"length {length} is above the model's {limit} positions")


@contextmanager
def attention_of(models: Sequence[PreTrainedModel], kind: str) -> Iterator[None]:
    """Run all models with the same attention implementation; restores the former ones at the end."""
    before = [model.config.get_text_config()._attn_implementation or "eager" for model in models]
    try:
        for model in models:
            model.set_attn_implementation(kind)
        yield
    finally:
        for model, former in zip(models, before, strict=True):
            model.set_attn_implementation(former)
