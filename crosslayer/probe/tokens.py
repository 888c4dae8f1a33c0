"""What a model takes: how many positions it has, and which token ids."""

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.probe.intercept import text_model
from crosslayer.probe.maps import UNREADABLE


def position_embedding(model: PreTrainedModel) -> tuple[str, nn.Embedding] | None:
    """Return name and module of the text model's learned position table, known by its name (BERT, GPT-2, OPT)."""
    for name, module in text_model(model).named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            return name, module
    return None


def config_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a config names, if any."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has, if any limit; rows of the table for padding (RoBERTa) do not count."""
    limit = config_positions(model.config)
    embedding = position_embedding(model)
    if embedding is None:
        return limit
    _, table = embedding
    if table.padding_idx is None:
        return limit
    rows = table.num_embeddings - table.padding_idx - 1
    return rows if limit is None else min(limit, rows)


def positions(model: PreTrainedModel) -> int:
    """Return how many positions a model has; far more than enough where its config names no limit."""
    return position_limit(model) or 2**31


def check_ids(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse token ids that a model cannot take.

    Raises:
        ValueError: `ids` are no integers (B ≥ 1, T ≥ 2), not in the vocabulary, or more than the model's positions; or
            the model has flex attention, whose masks cannot be read and would take long to compile.
    """
    if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2 or ids.is_floating_point():
        raise ValueError(f"ids must be integers (B ≥ 1, T ≥ 2), got {ids.dtype} of shape {tuple(ids.shape)}")
    config = model.config.get_text_config()
    check_length(model, ids.shape[1])
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"token ids must be below the vocabulary's size, {config.vocab_size}, got {int(ids.min())} to "
            f"{int(ids.max())}; use this model's tokenizer"
        )
    if config._attn_implementation == "flex_attention":
        raise ValueError(UNREADABLE)


def check_length(model: PreTrainedModel, length: int) -> None:
    """Refuse sequences of more tokens than the model has positions, by a ValueError."""
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ValueError(f"length {length} is above the model's {limit} positions")
