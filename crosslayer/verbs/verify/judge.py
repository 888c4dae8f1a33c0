"""How far is too far: what a check measured becomes a row that passes or fails."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from crosslayer.verbs.verify.result import FAIL, NOT_APPLICABLE, PASS, Check

# Measured over 33 tokens of SmolLM2, of five retrofits of it and of tiny models of 25 families: at most 3e-5 in
# float32. More layers and other kernels need room; the mildest fault planted, positions off by 1 behind the cache,
# makes 0.85.
EXACT = {"float64": 1e-8, "float32": 1e-3}
# Lower precisions have no single number: the root mean square of what bfloat16's rounding does to the plain pass is
# 0.045 in SmolLM2, 0.01 to 0.04 in tiny models, 0.26 in SmolLM2 where all layers but the first borrow their values
# (arXiv 2410.17897). Two roundings were at most 1.4 times that from each other, √2 as if independent. Positions off
# by 1 make 0.094, unrelated logits 1.4.
ROUNDINGS, FLOOR, WEAK = 2, 0.005, 0.5
SENTENCE = 200  # characters of an error that are shown


@dataclass(frozen=True)
class Measurement:
    """What a check measured; `tolerance` None stands for that of the dtype."""

    difference: float
    reason: str = ""
    tolerance: float | None = None


class NotApplicable(Exception):
    """What a check asks for cannot be had from this model or on this machine; the text says why."""


def tolerance_of(dtype: str, rounding: float) -> tuple[float, str]:
    """Return what a dtype tolerates whose rounding moves the plain pass so far, and a note where that tells little."""
    tolerance = EXACT.get(dtype) or max(FLOOR, ROUNDINGS * rounding)
    return tolerance, f"weak: rounding alone moves logits by {rounding:.1f}" if tolerance > WEAK else ""


def judged(name: str, dtype: str | None, tolerance: float, check: Callable[[], Measurement], note: str = "") -> Check:
    """Run a check; whatever it raises is a row too. `note` is said where `tolerance` is used."""
    try:
        measured = check()
    except NotApplicable as reason:
        return Check(name=name, dtype=dtype, status=NOT_APPLICABLE, reason=str(reason))
    except Exception as error:
        return Check(name=name, dtype=dtype, status=FAIL, reason=f"{type(error).__name__}: {in_brief(error)}")
    limit, reasons = tolerance, [measured.reason, note]
    if measured.tolerance is not None:
        limit, reasons = measured.tolerance, [measured.reason]
    if not math.isfinite(measured.difference) or not math.isfinite(limit):
        reason = f"the difference is {measured.difference}, the tolerance {limit}"
        return Check(name=name, dtype=dtype, status=FAIL, reason=reason)
    return Check(
        name=name,
        dtype=dtype,
        status=PASS if measured.difference <= limit else FAIL,
        difference=measured.difference,
        tolerance=limit,
        reason="; ".join(reason for reason in reasons if reason),
    )


def in_brief(error: Exception) -> str:
    """Return an error's text as a short line."""
    text = " ".join(str(error).split())
    return text if len(text) <= SENTENCE else f"{text[:SENTENCE]} …"
