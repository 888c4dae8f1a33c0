"""What bytes cost elsewhere, on the same text: quantised caches of the original and of the retrofit."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.running import quantized_cache, smaller_cache
from crosslayer.core.sixteen_bits import DTYPE
from crosslayer.corpus.windows import Windows
from crosslayer.judge.damage import damage, difference
from crosslayer.judge.losses import Losses, Run, logits_of, losses
from crosslayer.judge.retrieval import measure_retrieval
from crosslayer.verbs.retrofit.result import Alternative
from crosslayer.wiring.kv_bits import KINDS, RECENT, keeps_recent
from crosslayer.wiring.read import model_plan

MEASURED = (("original", "fp8"), ("original", "8"), ("original", "4"), ("retrofit", "4"))
ASKED = ("original", "4")  # for hidden numbers, too
WINDOWS = 16  # of the evaluation text, from all domains


class Compared(NamedTuple):
    """A model whose cache is measured: its row's `of`, the model, and the bits of its cache; None: as it is."""

    of: str
    model: PreTrainedModel
    kv_bits: str | None = None


class Judged(NamedTuple):
    """On what caches are measured."""

    windows: Windows  # the evaluation text
    context: int  # tokens at which bytes are counted
    tokenizer: PreTrainedTokenizerBase | None  # that of all models; None: no hidden numbers are asked for
    seed: int  # of the bootstrap and of the hidden numbers


def measure_alternatives(
    original: PreTrainedModel,
    retrofit: PreTrainedModel,
    judged: Judged,
) -> tuple[Alternative, ...]:
    """Return the cache's share, the KL to the original and the numbers retrieved with other caches.

    The first is the retrofit as it is. All are measured on the same windows, some of the evaluation text's.

    Args:
        original: the original model, which is also measured with quantised caches.
        retrofit: the retrofit, likewise.
        judged: on what they are measured.

    Returns:
        rows of the models for which quantised caches are defined; nothing if they are not for the original.

    """
    windows = judged.windows
    models = {"original": original, "retrofit": retrofit}
    quantisable = [of for of, model in models.items() if _takes_quantised(model)]
    if "original" not in quantisable:
        return ()
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(WINDOWS, len(windows))).round().astype(int)).tolist()
    fewer = Windows(
        windows.ids[chosen],
        tuple(windows.documents[index] for index in chosen),
        tuple(windows.domains[index] for index in chosen) if windows.domains else (),
    )
    long = windows.ids.shape[1] > RECENT  # else all tokens stay exact with less than 8 bits
    quantised = [(of, bits) for of, bits in MEASURED if of in quantisable and (long or not keeps_recent(KINDS[bits]))]
    compared = [
        Compared("retrofit", retrofit),
        *(Compared(of, models[of], bits) for of, bits in quantised),
    ]
    runs = {str(number): _run(one) for number, one in enumerate(compared)}
    measured = list(losses(logits_of(original), runs, fewer, "measuring other caches").values())
    return rows_of(original, compared, measured, judged)


def rows_of(
    original: PreTrainedModel,
    compared: Sequence[Compared],
    measured: Sequence[Losses],
    judged: Judged,
) -> tuple[Alternative, ...]:
    """Return a row of the table for each model and its losses; the differences are to the first."""
    _, context, tokenizer, seed = judged
    rows, whole = [], model_plan(original, context, DTYPE).stored_bytes
    for one, own in zip(compared, measured, strict=True):
        kind = None if one.kv_bits is None else KINDS[one.kv_bits]
        asked = tokenizer is not None and (one.of, one.kv_bits) == ASKED
        rows.append(
            Alternative(
                of=one.of,
                kv_bits=one.kv_bits,
                share=model_plan(one.model, context, DTYPE, kv_dtype=kind).stored_bytes / whole,
                kl=damage(own, seed).kl,
                kl_by_domain={domain: float(own.of(domain).kl.mean()) for domain in dict.fromkeys(own.domains)},
                change=difference(own, measured[0], seed),
                needles=measure_retrieval(one.model, tokenizer, seed, kv_bits=one.kv_bits) if asked else (),
            )
        )
    return tuple(rows)


def _takes_quantised(model: PreTrainedModel) -> bool:
    try:
        quantized_cache(model)
    except ValueError:
        return False
    return True


def _run(compared: Compared) -> Run:
    """Return the forward pass of a model with its cache."""
    plain, bits = logits_of(compared.model), compared.kv_bits

    def run(ids: Tensor) -> Tensor:
        with nullcontext() if bits is None else smaller_cache(compared.model, bits=bits):
            return plain(ids)

    return run
