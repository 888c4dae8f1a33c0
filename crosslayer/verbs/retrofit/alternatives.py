"""What the same bytes cost elsewhere: quantised caches of the original and of the retrofit, on the same text."""

from collections.abc import Callable

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import Meter
from crosslayer.quantization.running import quantized_cache, quantizing
from crosslayer.verbs.needles.retrieval import measure_retrieval
from crosslayer.verbs.retrofit.damage import Run, damage, difference, logits_of, losses
from crosslayer.verbs.retrofit.result import Alternative
from crosslayer.wiring.kv_bits import KINDS, RECENT, keeps_recent
from crosslayer.wiring.read import read_plan

MEASURED = (("original", "fp8"), ("original", "8"), ("original", "4"), ("retrofit", "4"))
ASKED = ("original", "4")  # for hidden numbers, too
WINDOWS = 16  # of the evaluation text, from all domains
DTYPE = "bfloat16"  # in which the original's cache is counted


def measure_alternatives(
    models: dict[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase | None,
    windows: Windows,
    context: int,
    seed: int,
    progress: Meter,
) -> tuple[Alternative, ...]:
    """Return the cache's share, the KL to the original and the numbers retrieved with quantised caches.

    The first is the retrofit as it is. All are measured on the same windows, some of the evaluation text's.

    Args:
        models: "original" and "retrofit".
        tokenizer: that of both; None: no hidden numbers are asked for.
        windows: the evaluation text.
        context: tokens at which bytes are counted.
        seed: of the bootstrap and of the hidden numbers.
        progress: shows progress.

    Returns:
        rows of the models for which quantised caches are defined; nothing if they are not for the original.

    """
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
    compared = [(of, bits) for of, bits in MEASURED if of in quantisable and (long or not keeps_recent(KINDS[bits]))]
    runs: dict[str, Run] = {"retrofit": logits_of(models["retrofit"])}
    runs |= {f"{of} {bits}": _quantised(models[of], bits) for of, bits in compared}
    with progress("measuring quantised caches", len(fewer)) as bar:
        measured = losses(logits_of(models["original"]), runs, fewer, bar.step)
    rows = []
    for of, bits in (("retrofit", None), *compared):
        own = measured[of if bits is None else f"{of} {bits}"]
        gap, interval = difference(own, measured["retrofit"], seed)
        cost = damage(own, seed)
        asked = tokenizer is not None and (of, bits) == ASKED
        rows.append(
            Alternative(
                of=of,  # type: ignore[arg-type]
                kv_bits=bits,
                share=_share(models, of, bits, context),
                kl=cost.kl,
                kl_ci95=cost.kl_ci95,
                minus_retrofit=gap,
                minus_retrofit_ci95=interval,
                needles=measure_retrieval(models[of], tokenizer, seed, progress, kv_bits=bits) if asked else (),
            )
        )
    return tuple(rows)


def _takes_quantised(model: PreTrainedModel) -> bool:
    try:
        quantized_cache(model)
    except ValueError:
        return False
    return True


def _quantised(model: PreTrainedModel, bits: str) -> Callable[[Tensor], Tensor]:
    plain = logits_of(model)

    def run(ids: Tensor) -> Tensor:
        with quantizing(model, bits):
            return plain(ids)

    return run


def _share(models: dict[str, PreTrainedModel], of: str, bits: str | None, context: int) -> float:
    """Return the bytes of a cache of `context` tokens over those of the original's in bfloat16."""
    whole = read_plan(models["original"], context, DTYPE).stored_bytes
    return read_plan(models[of], context, DTYPE, kv_dtype=None if bits is None else KINDS[bits]).stored_bytes / whole
