"""Whether a configuration fits into memory, checked before it runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from crosslayer.machine import free_memory
from crosslayer.verbs.bench.record import AttentionKind, Role
from crosslayer.wiring.read import read_plan
from crosslayer.wiring.result import ModelPlan

Models = Mapping[Role, PreTrainedModel]


@dataclass(frozen=True)
class Load:
    """A configuration: B sequences of `context` tokens, then `new_tokens` decoded step by step, and the attention."""

    context: int
    batch: int
    new_tokens: int
    attention: AttentionKind = "sdpa"

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return self.context + self.new_tokens


def read_plans(models: Models, load: Load, dtype: str | None = None) -> dict[Role, ModelPlan]:
    """Return the plans of both models at the end of a configuration; empty if one of them has none."""
    plans: dict[Role, ModelPlan] = {}
    try:
        for role, model in models.items():
            plans[role] = read_plan(model, load.total, dtype or model.dtype, batch=load.batch)
    except ValueError:
        return {}
    return plans


def too_large(models: Models, load: Load, evicts: bool = False) -> str | None:
    """Return why a configuration is skipped: caches, activations and logits would not fit in free memory.

    If the candidate `evicts`, its prompt also needs a mask for each head. Its cache is counted in full, evicted or
    quantised: it is at most that.
    """
    caches = [plan.stored_bytes for plan in read_plans(models, load).values()]
    if not caches:
        return None
    free = free_memory(models["baseline"].device)
    activations = max(_activation_bytes(model, load.batch * load.context) for model in models.values())
    logits = max(load.batch * model.config.get_text_config().vocab_size * 8 for model in models.values())
    need = sum(caches) + max(caches) + activations + logits
    if evicts:  # the boolean mask that eviction makes, and the additive one that sdpa makes of it
        model = models["candidate"]
        need += load.batch * _heads(model) * load.context**2 * (2 + model.dtype.itemsize)
    if load.attention == "eager":  # two copies of a layer's maps
        need += 2 * load.batch * max(map(_heads, models.values())) * load.context**2 * 4
    if need <= free:
        return None
    return (
        f"context {load.context}, batch {load.batch} needs about {need / 1e9:.1f} GB of memory with {load.attention} "
        f"attention, and {free / 1e9:.1f} GB are free"
    )


def _heads(model: PreTrainedModel) -> int:
    return model.config.get_text_config().per_layer_config[0].num_attention_heads


def _activation_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return roughly how many bytes an MLP's activations and the residual streams around it take."""
    head, linear = model.get_output_embeddings(), (nn.Linear, Conv1D)
    weights = [module.weight for module in model.modules() if isinstance(module, linear) and module is not head]
    if not weights:  # all are stored in a form of their own
        return 0
    outputs, inputs = max(weights, key=lambda weight: weight.numel()).shape
    return tokens * (3 * outputs + 4 * inputs) * weights[0].element_size()
