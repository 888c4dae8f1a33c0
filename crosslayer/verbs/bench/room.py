"""Whether a setting fits into memory, asked before it is run."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from crosslayer.verbs.bench.costs import Structure
from crosslayer.verbs.bench.memory import free_memory
from crosslayer.verbs.bench.prediction import Load
from crosslayer.verbs.bench.record import Side

Models = Mapping[Side, PreTrainedModel]


def too_large(models: Models, structures: Mapping[Side, Structure], load: Load, evicts: bool = False) -> str | None:
    """Return why a setting is skipped: the caches, a prompt's activations and logits would not fit in free memory.

    Where the candidate `evicts`, its prompt needs a mask for each head besides, and its cache is at most the full one.
    """
    if not structures:
        return None
    free = free_memory(models["baseline"].device)
    caches = [structure.cache_bytes(load.batch, load.total) for structure in structures.values()]
    tokens = load.batch * load.context
    activations = max(_activation_bytes(structure, tokens) for structure in structures.values())
    logits = max(load.batch * model.config.get_text_config().vocab_size * 8 for model in models.values())
    need = sum(caches) + max(caches) + activations + logits
    if evicts:
        need += _mask_bytes(models["candidate"], load)
    if need <= free:
        return None
    setting = f"context {load.context}, batch {load.batch}"
    return f"{setting} needs about {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def _mask_bytes(model: PreTrainedModel, load: Load) -> int:
    """Return what a prompt's mask takes for each head: of booleans, which eviction makes, and as sdpa adds it."""
    heads = model.config.get_text_config().num_attention_heads
    return load.batch * heads * load.context**2 * (2 + model.dtype.itemsize)


def eager_skip(model: PreTrainedModel, load: Load) -> str | None:
    """Return why eager attention is not run: two copies of a layer's maps exceed half of the free memory."""
    heads, free = model.config.get_text_config().num_attention_heads, free_memory(model.device)
    need = 2 * load.batch * heads * load.context**2 * 4
    if need <= free / 2:
        return None
    return f"skipped: eager maps need {need / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB free"


def _activation_bytes(structure: Structure, tokens: int) -> int:
    """Return about what an MLP's products and the streams around it take."""
    outputs, inputs = structure.shape
    return tokens * (3 * outputs + 4 * inputs) * structure.itemsize
