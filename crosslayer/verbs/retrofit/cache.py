"""The size of the KV cache: counted for a plan, measured for a model."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from crosslayer.cache.kv_cache import held_bytes
from crosslayer.core.plan import DepthPlan
from crosslayer.core.transformers_versions import CACHE
from crosslayer.probe.shapes import LayerShape
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import CacheRecord
from crosslayer.wiring.kv_bits import REFERENCE_DTYPE
from crosslayer.wiring.read import model_plan

CONTEXT = 2048  # default context length at which the cache is counted
PROMPT = 64  # tokens of the forward pass that fills a cache


class CacheShare:
    """The share of the original's cache that a plan keeps, in elements at `context` tokens."""

    def __init__(self, shapes: Sequence[LayerShape | None], context: int | None = None):
        windows = [shape.window for shape in shapes if shape is not None and shape.window is not None]
        self.context = context or max([CONTEXT, *(2 * window for window in windows)])
        self.sizes: list[dict[str, int]] = []  # of keys and values as allocated, by layer
        for shape in shapes:
            keys = values = 0
            if shape is not None:  # a cache allocates a whole window, and keeps all but one token of it
                tokens = self.context if shape.window is None else min(self.context, shape.window)
                keys, values = replace(shape, window=None).cached(tokens)
            self.sizes.append({"keys": keys, "values": values})
        self.total = sum(sum(size.values()) for size in self.sizes)

    def of(self, plan: DepthPlan) -> float:
        """Return the share of the cache that a plan keeps."""
        layers = enumerate(self.sizes)
        kept = sum(plan.stored_share(state, layer) * size[state] for layer, size in layers for state in size)
        return kept / self.total

    def saved(self, states: Sequence[str], layer: int) -> float:
        """Return the saving if a layer no longer stores these states, in units of a mean layer's keys or values."""
        return sum(self.sizes[layer][state] for state in states) * 2 * len(self.sizes) / self.total

    @property
    def least(self) -> float:
        """The smallest possible share: that of a single layer."""
        return min(sum(size.values()) for size in self.sizes if sum(size.values())) / self.total


def cache_record(original: Original, retrofit: PreTrainedModel, context: int | None) -> CacheRecord:
    """Return what the caches of a model and of its retrofit hold and read; None: at the default context."""
    context = CacheShare(original.sublayers.shapes, context).context
    before, after = token_bytes(original.model, context), token_bytes(retrofit, context)
    own, changed = original.plan, model_plan(retrofit, dtype=REFERENCE_DTYPE)
    layers = range(original.layers) if changed.plan.reads_less else ()
    return CacheRecord(
        context=context,
        bytes_per_token_before=before,
        bytes_per_token_after=after,
        share=after / before,
        read_share=changed.read_at(context) / own.read_at(context),
        layer_reads=[changed.layer_read_at(i, context) / own.layer_read_at(i, context) for i in layers],
    )


@torch.no_grad()
def token_bytes(model: PreTrainedModel, context: int = CONTEXT) -> float:
    """Return the bytes of a dynamic cache for each of `context` tokens, in 16 bits.

    A short prompt shows what each layer stores. A cache is then filled with `context` tokens of it, layer by layer and
    in two steps, so that sliding windows are cut as in decoding. The model never runs on the long context.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.arange(PROMPT, device=model.device)[None] % model.config.vocab_size  # (1, PROMPT)
    model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    total = 0
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            continue
        filled = DynamicCache(config=model.config)
        for count in (context - 1, 1):
            keys = layer.keys[:, :, :1].expand(-1, -1, count, -1)  # (1, H_kv, 1, D) → (1, H_kv, count, D)
            values = layer.values[:, :, :1].expand(-1, -1, count, -1)
            filled.update(keys, values, number)
        total += held_bytes(filled).sixteen
    return total / context
