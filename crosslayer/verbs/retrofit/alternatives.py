"""What bytes cost elsewhere, on the same text: quantized caches of the original and of the retrofit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from crosslayer.cache.running import CacheOptions, smaller_cache
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.damage import Losses, damage, difference
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.result import Alternative
from crosslayer.wiring.kv_bits import KINDS, RECENT, REFERENCE_DTYPE, keeps_recent
from crosslayer.wiring.read import model_plan

MEASURED = (("original", "fp8"), ("original", "8"), ("original", "4"), ("retrofit", "4"))
ASKED = ("original", "4")  # for hidden numbers, too
WINDOWS = 16  # of the evaluation text, from all domains


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

    The first is the retrofit as it is. All are measured on the same windows, some of the evaluation text's.

    Args:
        original: the original model, which is also measured with quantized caches.
        retrofit: the retrofit, likewise.
        context: tokens at which bytes are counted.
        seed: of the bootstrap and of hidden numbers.
        asks: whether numbers are hidden.

    Returns:
        rows of the models for which quantized caches are defined; nothing if they are not for the original.
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
                kl_by_domain={domain: float(own.of(domain).kl.mean()) for domain in dict.fromkeys(own.domains)},
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
