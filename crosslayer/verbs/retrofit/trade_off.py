"""The trade-off that a search found, measured on text that it did not use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from crosslayer.core.method import Method
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.damage import damage, difference
from crosslayer.probe.shapes import Groups
from crosslayer.verbs.retrofit.measure import Measure
from crosslayer.verbs.retrofit.result import CurvePoint, MeasuredBaseline, SearchRecord

POINTS = 5  # at most, of the curve


class Step(NamedTuple):
    """A configuration of a search: its methods, the share that it takes, its KL on the search text."""

    methods: list[Method]
    share: float
    kl: float
    layers: dict[str, int]  # how many layers each method acts on


class Baseline(NamedTuple):
    """A configuration that no search was needed for: its methods, its groups of layers, the share that it takes."""

    methods: list[Method]
    groups: Groups
    share: float


def spread_steps(curve: Sequence[Any]) -> list[Any]:
    """Return at most `POINTS` steps of a curve at equal distances, with the last."""
    stride = max(1, math.ceil(len(curve) / POINTS))
    return list(curve[::-1][::stride][::-1])


def search_record(
    measure: Measure, passes: int, names: list[str], steps: Sequence[Step], baselines: Mapping[str, Baseline]
) -> SearchRecord:
    """Measure steps of a search, and each baseline against the last of them, on windows for the trade-off, if any.

    Args:
        measure: of the search.
        passes: how many configurations it measured.
        names: (L,), which method acts on each layer.
        steps: some of its steps, the last one too.
        baselines: by name.
    """
    curve, compared = [], []
    if "trade-off" in measure.original.windows:
        methods = {str(number): step.methods for number, step in enumerate(steps)}
        methods |= {name: baseline.methods for name, baseline in baselines.items()}
        candidates = [Candidate(name, measure.candidate(chosen)) for name, chosen in methods.items()]
        original = measure.original
        judge = replace(original.judge, windows=original.windows["trade-off"])
        measured = judge.kl(candidates, "measuring the trade-off on held-out text")
        for number, step in enumerate(steps):
            kl = damage(measured[str(number)]).kl
            curve.append(CurvePoint(share=step.share, kl_search=step.kl, kl=kl, layers=step.layers))
        for name, baseline in baselines.items():
            own, last = measured[name], measured[str(len(steps) - 1)]
            figures = {"kl": damage(own).kl, "change": difference(last, own)}
            compared.append(MeasuredBaseline(method=name, groups=baseline.groups, share=baseline.share, **figures))
    return SearchRecord(passes=passes, methods=names, curve=curve, baselines=compared)
