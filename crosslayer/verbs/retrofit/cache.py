"""The KV cache of a retrofit: counted for a plan, measured for a model, and compared with quantized caches."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from crosslayer.cache.kv_cache import held_bytes
from crosslayer.cache.running import CacheOptions, prefill, smaller_cache
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.hidden import Sample
from crosslayer.judge.report import ALL, Against, Row
from crosslayer.judge.rows import bytes_row, window_rows
from crosslayer.probe.shapes import CONTEXT, CacheShare
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import ORIGINAL, RETROFIT, CacheRecord
from crosslayer.wiring.kv_bits import KINDS, RECENT, REFERENCE_DTYPE, keeps_recent
from crosslayer.wiring.read import model_plan

PROMPT = 64  # tokens of the forward pass that fills a cache
# By --kv-bits. The cache of a retrofit can be quantized as well, so it is also measured in 4 bits.
MEASURED = ((ORIGINAL, "fp8"), (ORIGINAL, "8"), (ORIGINAL, "4"), (RETROFIT, "4"))
# For hidden numbers, too, whose prompts are long: of the original's quantized caches only the smallest.
ASKED = (RETROFIT, f"{ORIGINAL}, {KINDS['4']}")
# Of the evaluation text, from all domains: each of them runs through every cache of `MEASURED`.
WINDOWS = 16


def cache_record(original: Original, retrofit: PreTrainedModel, context: int | None) -> CacheRecord:
    """Return what the caches of a model and of its retrofit hold and read; None: at the default context."""
    context = CacheShare(original.sublayers.shapes, context).context
    before, after = token_bytes(original.model, context), token_bytes(retrofit, context)
    plan = original.plan
    changed = model_plan(retrofit, dtype=REFERENCE_DTYPE)
    layers = range(original.model.config.num_hidden_layers) if changed.plan.reads_less else ()
    return CacheRecord(
        context=context,
        bytes_per_token_before=before,
        bytes_per_token_after=after,
        share=after / before,
        read_share=changed.read_at(context) / plan.read_at(context),
        layer_reads=[changed.layer_read_at(layer, context) / plan.layer_read_at(layer, context) for layer in layers],
    )


def token_bytes(model: PreTrainedModel, context: int = CONTEXT) -> float:
    """Return the bytes of a dynamic cache for each of `context` tokens, in 16 bits.

    A short prompt shows what each layer stores. A cache is then filled with `context` tokens of it, layer by layer and
    in two steps, so that sliding windows are cut as in decoding. The model never runs on the long context.
    """
    cache = prefill(model, torch.arange(PROMPT, device=model.device)[None] % model.config.vocab_size)  # (1, PROMPT)
    total = 0
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            continue
        filled = DynamicCache(config=model.config)
        for count in (context - 1, 1):
            keys = layer.keys[:, :, :1].expand(-1, -1, count, -1)  # (1, H_kv, 1, D) → (1, H_kv, count, D)
            values = layer.values[:, :, :1].expand(-1, -1, count, -1)
            filled.update(keys, values, index)
        total += held_bytes(filled).sixteen
    return total / context


def other_caches(
    original: Original, retrofit: PreTrainedModel, context: int, samples: Sequence[Sample]
) -> tuple[Row, ...]:
    """Return the bytes, the damage and the numbers found of other caches; the first rows are the retrofit's, as it is.

    All are measured on the same windows, some of the evaluation text's. Bytes are counted at `context` tokens. Without
    a quantized cache of the original there are no rows.
    """
    models = {ORIGINAL: original.model, RETROFIT: retrofit}
    quantizable = []
    for name, model in models.items():
        with suppress(ValueError), smaller_cache(model, bits=4):  # raises where no quantized cache is defined
            quantizable.append(name)
    if ORIGINAL not in quantizable:
        return ()

    windows = original.windows["evaluation"]
    long = windows.ids.shape[1] > RECENT  # else all tokens stay exact with less than 8 bits
    candidates = [Candidate(RETROFIT, retrofit)]
    kinds: dict[str, str | None] = {RETROFIT: None}
    for model_name, bits in MEASURED:
        name = f"{model_name}, {KINDS[bits]}"
        if model_name in quantizable and (long or not keeps_recent(KINDS[bits])):
            candidates.append(Candidate(name, models[model_name], CacheOptions(kv_bits=bits).running))
            kinds[name] = KINDS[bits]

    # windows are in the order of their domains: equal distances take some of each
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(WINDOWS, len(windows))).round().astype(int)).tolist()
    few = replace(original.judge, windows=windows.take(chosen))
    losses = few.kl(candidates, "measuring other caches")
    rows = []
    for candidate in candidates:
        name = candidate.name
        rows.append(stored_row(original, candidate, context, kinds[name]))
        rows += window_rows(name, losses[name], original.seed)
        if name != RETROFIT:
            rows += window_rows(name, losses[name], original.seed, losses[RETROFIT], Against.FIRST)[:1]  # KL
    rows += original.judge.retrieval([candidate for candidate in candidates if candidate.name in ASKED], samples)
    return tuple(row for row in rows if row.scope == ALL)  # there are too few windows of a domain


def stored_row(original: Original, candidate: Candidate, context: int, kv_dtype: str | None = None) -> Row:
    """Return the row of the bytes of a cache, in 16 bits or as it is quantized, at `context` tokens."""
    assert isinstance(candidate.model, PreTrainedModel)
    size = model_plan(candidate.model, context, REFERENCE_DTYPE, kv_dtype=kv_dtype).stored_bytes
    return bytes_row("bytes", size, original.plan.stored_at(context), candidate=candidate.name)
