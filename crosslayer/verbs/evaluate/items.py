"""The items of a metric, out of lm-eval's samples: numbers whose mean, or perplexity, is the score that it reports."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

CLOSE = 1e-9  # relative, within which items must give the score that is reported
Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Items:
    """Values and weights (n,) of a metric; of a perplexity the values are log likelihoods.

    The score is Σ values / Σ weights, or exp(−Σ values / Σ weights); `kind` share says that all values are 0 or 1.
    """

    kind: Literal["share", "mean", "perplexity"]
    values: np.ndarray
    weights: np.ndarray


def samples_of(samples: Sequence[Sample], metric: str, name: str) -> list[Sample]:
    """Return the samples that hold a metric, under the name of a filter, in the order of their documents."""
    found = [sample for sample in samples if sample["filter"] == name and metric in sample]
    return sorted(found, key=lambda sample: sample["doc_id"])


def items_of(samples: Sequence[Sample], metric: str, reported: float) -> Items | None:
    """Return the items of a metric, or None where the score that is reported is neither their mean nor a perplexity.

    How a task adds its items up is code of its own, which its results do not name: the sum that gives the reported
    score is the right one.
    """
    entries = [sample[metric] for sample in samples]
    if entries and all(_is_number(entry) for entry in entries):
        values, weights = np.array(entries, dtype=float), np.ones(len(entries))
    elif entries and all(_is_pair(entry) for entry in entries):
        values, weights = np.array([entry[0] for entry in entries], float), np.array([e[1] for e in entries], float)
    else:
        return None
    mean = values.sum() / weights.sum() if weights.sum() else math.nan
    if _is_close(mean, reported):
        return Items("share" if set(values.tolist()) <= {0.0, 1.0} else "mean", values, weights)
    if _is_close(-mean, math.log(reported) if reported > 0 else math.nan):
        return Items("perplexity", values, weights)
    if _is_close(-mean / math.log(2), reported):  # bits a byte
        return Items("mean", -values / math.log(2), weights)
    return None


def check_same(candidate: Sequence[Sample], baseline: Sequence[Sample], task: str) -> None:
    """Refuse to pair samples of other documents, or of other prompts.

    Raises:
        ValueError: they differ.

    """
    for name in ("doc_id", "doc_hash", "prompt_hash"):
        if [sample[name] for sample in candidate] != [sample[name] for sample in baseline]:
            raise ValueError(f"{task}: candidate and baseline were asked different things ({name}); nothing is paired")


def _is_close(value: float, reported: float) -> bool:
    return math.isfinite(value) and math.isclose(value, reported, rel_tol=CLOSE, abs_tol=CLOSE)


def _is_number(entry: Any) -> bool:
    return isinstance(entry, bool | int | float | np.number) and math.isfinite(float(entry))


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and all(_is_number(part) for part in entry)
