"""Whether a configuration fits into memory, checked before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from crosslayer.machine import free_memory
from crosslayer.wiring.read import model_plan
from crosslayer.wiring.result import ModelPlan


@dataclass(frozen=True)
class Load:
    """A configuration: B sequences of `context` tokens, then `new_tokens` decoded step by step, and the attention."""

    context: int
    batch: int = 1
    new_tokens: int = 16
    attention: str = "sdpa"

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return self.context + self.new_tokens

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"context {self.context}, batch {self.batch}, {self.attention}"


def read_plans(models: Sequence[PreTrainedModel], load: Load, dtype: str | None = None) -> list[ModelPlan]:
    """Return the plans of models at the end of a configuration; empty if one of them has none."""
    try:
        return [model_plan(model, load.total, dtype or model.dtype, batch=load.batch) for model in models]
    except ValueError:
        return []


def too_large(models: Sequence[PreTrainedModel], load: Load, evicts: bool = False) -> str | None:
    """Return why a configuration is skipped: caches, activations and logits would not fit in free memory.

    If a candidate `evicts`, its prompt also needs a mask for each head. Its cache is counted in full, evicted or
    quantized: it is at most that.
    """
    caches = [plan.stored_bytes for plan in read_plans(models, load)]
    if not caches:
        return None
    free = free_memory(models[0].device)
    activations = max(_activation_bytes(model, load.batch * load.context) for model in models)
    logits = max(load.batch * model.config.get_text_config().vocab_size * 8 for model in models)
    need = sum(caches) + max(caches) + activations + logits
    heads = max(model.config.get_text_config().per_layer_config[0].num_attention_heads for model in models)
    if evicts:  # the boolean mask that eviction makes, and the additive one that sdpa makes of it
        need += load.batch * heads * load.context**2 * (2 + models[0].dtype.itemsize)
    if load.attention == "eager":  # two copies of a layer's maps
        need += 2 * load.batch * heads * load.context**2 * 4
    if need <= free:
        return None
    return (
        f"context {load.context}, batch {load.batch} needs about {need / 1e9:.1f} GB of memory with {load.attention} "
        f"attention, and {free / 1e9:.1f} GB are free"
    )


def _activation_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return roughly how many bytes an MLP's activations and the residual streams around it take."""
    head, linear = model.get_output_embeddings(), (nn.Linear, Conv1D)
    weights = [module.weight for module in model.modules() if isinstance(module, linear) and module is not head]
    if not weights:  # all are stored in a form of their own
        return 0
    outputs, inputs = max(weights, key=lambda weight: weight.numel()).shape
    return tokens * (3 * outputs + 4 * inputs) * weights[0].element_size()
