"""The KV cache of a retrofit: counted for a plan, measured for a model, and compared with quantized caches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from crosslayer.cache.kv_cache import held_bytes
from crosslayer.cache.running import CacheOptions, prefill, smaller_cache
from crosslayer.core.plan import DepthPlan
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.damage import Losses, damage, difference
from crosslayer.probe.shapes import LayerShape
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import Alternative, CacheRecord
from crosslayer.wiring.kv_bits import KINDS, RECENT, REFERENCE_DTYPE, keeps_recent
from crosslayer.wiring.read import model_plan

CONTEXT = 2048  # default context length at which the cache is counted
PROMPT = 64  # tokens of the forward pass that fills a cache
MEASURED = (("original", "fp8"), ("original", "8"), ("original", "4"), ("retrofit", "4"))
ASKED = ("original", "4")  # for hidden numbers, too
WINDOWS = 16  # of the evaluation text, from all domains


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
        kept = sum(size[state] for layer, size in enumerate(self.sizes) for state in plan.stored(layer))
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


def token_bytes(model: PreTrainedModel, context: int = CONTEXT) -> float:
    """Return the bytes of a dynamic cache for each of `context` tokens, in 16 bits.

    A short prompt shows what each layer stores. A cache is then filled with `context` tokens of it, layer by layer and
    in two steps, so that sliding windows are cut as in decoding. The model never runs on the long context.
    """
    cache = prefill(model, torch.arange(PROMPT, device=model.device)[None] % model.config.vocab_size)  # (1, PROMPT)
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


class Compared(NamedTuple):
    """A model whose cache is measured: its row's `of`, the model, and the bits of its cache; None: as it is."""

    of: str
    model: PreTrainedModel
    kv_bits: str | None = None
    is_asked: bool = False  # for hidden numbers

    @property
    def candidate(self) -> Candidate:
        """What the judge runs."""
        return Candidate(f"{self.of} {self.kv_bits}", self.model, CacheOptions(kv_bits=self.kv_bits).running)


def measure_alternatives(
    original: Original, retrofit: PreTrainedModel, context: int, seed: int, asks: bool
) -> tuple[Alternative, ...]:
    """Return the cache's share, the KL to the original and the numbers retrieved with other caches.

    The first is the retrofit as it is. All are measured on the same windows, some of the evaluation text's. Bytes are
    counted at `context` tokens; `asks`: whether numbers are hidden. Without a quantized cache of the original there are
    no rows.
    """
    models = {"original": original.model, "retrofit": retrofit}
    quantizable = [of for of, model in models.items() if _takes_quantized(model)]
    if "original" not in quantizable:
        return ()
    windows = original.windows["evaluation"]
    long = windows.ids.shape[1] > RECENT  # else all tokens stay exact with less than 8 bits
    quantized = [(of, bits) for of, bits in MEASURED if of in quantizable and (long or not keeps_recent(KINDS[bits]))]
    compared = [Compared("retrofit", retrofit)]
    compared += [Compared(of, models[of], bits, asks and (of, bits) == ASKED) for of, bits in quantized]
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(WINDOWS, len(windows))).round().astype(int)).tolist()
    few = replace(original.judge, windows=windows.take(chosen))
    found = few.kl([one.candidate for one in compared], "measuring other caches")
    return rows_of(original, compared, found, context, seed)


def rows_of(
    original: Original, compared: Sequence[Compared], found: Mapping[str, Losses], context: int, seed: int
) -> tuple[Alternative, ...]:
    """Return a row of the table for each model, from what the judge found; the differences are to the first."""
    rows = []
    for one in compared:
        own, first = found[one.candidate.name], found[compared[0].candidate.name]
        kind = None if one.kv_bits is None else KINDS[one.kv_bits]
        rows.append(
            Alternative(
                of=one.of,
                kv_bits=one.kv_bits,
                share=model_plan(one.model, context, REFERENCE_DTYPE, kv_dtype=kind).stored_bytes
                / original.plan.stored_at(context),
                kl=damage(own, seed).kl,
                kl_by_domain={domain: float(own.for_domain(domain).kl.mean()) for domain in dict.fromkeys(own.domains)},
                change=difference(own, first, seed),
                needles=original.judge.needles(one.candidate, seed) if one.is_asked else (),
            )
        )
    return tuple(rows)


def _takes_quantized(model: PreTrainedModel) -> bool:
    try:
        with smaller_cache(model, bits=4):
            return True
    except ValueError:
        return False
