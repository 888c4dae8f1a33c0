"""What `record.json` of a comparison holds: losses in nats a token, differences candidate − baseline."""

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from crosslayer.environment import Machine
from crosslayer.output.record import Frozen
from crosslayer.stats import Interval
from crosslayer.stats.means import Difference, Verdict

ALPHA = 0.05  # adjusted p-values below it decide
SHORTEST = 2  # logged entries of a stretch: a single point says little
MISSING = "not set"  # a key that other settings have
RELEVANT = 0.01  # nats a token: the difference for which needed seeds are counted

Cost = Literal["parameters", "tokens", "flops"]
COSTS: dict[str, str] = {"parameters": "parameters", "tokens": "tokens", "flops": "FLOPs"}


class Setting(Frozen):
    """What runs have in common: the values of a recipe in which settings differ, none where there is a single one."""

    label: str
    values: dict[str, Any]

    @classmethod
    def of(cls, values: dict[str, Any], telling: Sequence[str] | None = None) -> Self:
        """Return the setting of values; its label has those of the keys that tell it from others, by default all."""
        words = {key: json.dumps(value).strip('"') for key, value in values.items()}
        label = ", ".join(f"{key}={words[key]}" for key in (values if telling is None else telling))
        return cls(label=label, values=values)


class Variant(Frozen):
    """What is compared: a method, several together, or none."""

    label: str = Field(min_length=1)
    methods: list[dict[str, Any]]


class Trace(Frozen):
    """A loss by step."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.steps) != len(self.losses):
            raise ValueError(f"{len(self.steps)} steps have {len(self.losses)} losses")
        return self


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, None where there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class SnapshotMeans(Frozen):
    """What was seen inside of a model after a step: means over its layers, and its stream's last norm / its first."""

    step: int
    first_token_share: float | None
    sink_rate: float | None
    stream_growth: float | None


class ComparedRun(Frozen):
    """A training run, as far as it is compared; `seconds` are of training steps alone."""

    setting: str
    variant: str
    seed: int
    name: str
    parameters: int = Field(ge=1)
    flops_per_token: float = Field(ge=0)
    steps: int = Field(ge=1)
    tokens: int = Field(ge=1)
    length: int = Field(ge=1, description="tokens of a sequence")
    seconds: float = Field(ge=0)
    step_seconds: float | None = Field(ge=0, description="median of what was logged; None where nothing was")
    peak_bytes: int | None
    kv_bytes_per_token: float = Field(ge=0, description="stored")
    kv_read_bytes_per_token: float = Field(ge=0)
    dtype: str = Field(description="of the cache")
    machine: Machine
    final_loss: float = Field(description="over the mixture, on held-out text")
    losses: dict[str, float] = Field(min_length=1, description="the same by domain")
    curve: Trace = Field(description="training loss, each the mean since the entry before")
    validation: Trace = Field(description="held-out loss over the mixture")
    snapshots: tuple[SnapshotMeans, ...]


class RelativeCurve(Frozen):
    """Smoothed training loss less the baseline's by step: mean over pairs, and a band from two pairs on.

    The band is the 95 % Student-t interval from three pairs on, and both curves of two. It holds point by point
    and strays somewhere by chance, so what is said of the curve must hold of the band over a stretch.
    """

    window: int = Field(ge=1, description="logged entries that are averaged")
    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if {len(values) for values in (self.mean, self.low, self.high) if values is not None} != {len(self.steps)}:
            raise ValueError("the parts of a relative curve have different lengths")
        return self

    @property
    def stretch(self) -> int:
        """Over how many logged entries a band must lie on one side of 0."""
        return max(SHORTEST, self.window)

    @property
    def ahead(self) -> bool:
        """Whether the variant was lower for a stretch; one pair alone has no band and does not tell."""
        length = 0
        for edge in self.high or ():
            length = length + 1 if edge < 0 else 0
            if length == self.stretch:
                return True
        return False

    @property
    def ends(self) -> Verdict:
        """Whether the variant is lower or higher over the last stretch."""
        if self.high is not None and max(self.high[-self.stretch :]) < 0:
            return "lower"
        return "higher" if self.low is not None and min(self.low[-self.stretch :]) > 0 else "undecided"


class CriticalPoints(Frozen):
    """The step from which on the baseline's training loss is lower, by pair; None where that did not happen.

    `expected` is where the line through the end of the relative curve crosses 0, of pairs that are not overtaken yet.
    """

    reached: tuple[float | None, ...]
    expected: tuple[float | None, ...]
    mean: float | None = Field(description="of those reached, where all pairs have reached it")
    interval: Interval | None


class Outcome(Frozen):
    """A variant beside the baseline in a setting; `seeds` are those of both."""

    setting: str
    variant: str
    seeds: tuple[int, ...]
    missing: tuple[int, ...] = Field(description="seeds that a side alone has")
    loss: float = Field(description="mean of the final loss over all runs of the variant")
    final: Difference | None = Field(description="of the final loss over the mixture; None without a pair")
    adjusted: float | None = Field(
        ge=0, le=1, description="p-value for all comparisons of the page and the pages before it"
    )
    domains: dict[str, Difference]
    seeds_needed: int | None = Field(ge=1, description=f"for an interval that shows {RELEVANT}")
    curve: RelativeCurve | None = Field(
        description="None where steps differ: each variant has a schedule of its own then"
    )
    critical: CriticalPoints | None = Field(description="None where the variant is never seen ahead for a stretch")

    @property
    def verdict(self) -> Verdict:
        """Whether the loss is lower or higher than the baseline's, with all comparisons of the page in view."""
        if self.final is None or self.adjusted is None or self.adjusted >= ALPHA:
            return "undecided"
        return self.final.verdict

    @property
    def overtaken(self) -> bool:
        """Whether the variant was ahead, every pair has a critical point, and the relative curve ends above 0."""
        reached = self.critical is not None and self.critical.mean is not None
        return reached and self.curve is not None and self.curve.ends == "higher"

    @property
    def losing(self) -> bool:
        """Whether the variant is still ahead at the end, but a pair is expected to be overtaken."""
        expected = self.critical is not None and any(point is not None for point in self.critical.expected)
        return expected and self.curve is not None and self.curve.ends == "lower"


class Law(Frozen):
    """A power law of a variant's final loss, L = scale · C^−exponent, through the means of settings.

    `fewer` is the share of the baseline's cost that the variant saves at the loss which the baseline's law has at its
    largest cost (0.1: 10 % fewer; below 0: more); None where the variant's law does not reach it.
    """

    variant: str
    where: str = Field(description="in what its settings are alike and others are not")
    cost: Cost
    settings: tuple[str, ...] = Field(min_length=2)
    costs: tuple[float, ...]
    losses: tuple[float, ...]
    scale: float
    exponent: float
    exponent_interval: Interval | None = Field(description="from the scatter of three settings or more about the law")
    exponent_over_seeds: Interval | None = Field(description="from the laws of three seeds or more")
    fewer: float | None
    fewer_interval: Interval | None = Field(description="from the laws of three seeds or more, paired")
    extrapolated: bool = Field(description="whether the cost that the variant needs lies outside of its settings")


class LengthTrend(Frozen):
    """Critical points of a variant over lengths of a sequence: tokens read = scale · length^exponent, and continued."""

    variant: str
    where: str = Field(description="in what its settings are alike and others are not")
    lengths: tuple[int, ...] = Field(min_length=2)
    tokens: tuple[float, ...] = Field(description="that were read by then; steps of two lengths may differ in them")
    exponent: float
    interval: Interval | None = Field(description="of the exponent, from three lengths on")
    next_length: int
    next_tokens: float


class Budget(Frozen):
    """What every run was allowed: seconds of training steps, FLOPs, or tokens."""

    kind: Literal["time", "flops", "tokens"]
    amount: float = Field(gt=0)
    step_seconds: dict[str, float] = Field(description="measured beforehand, by setting and variant; of a time alone")

    @property
    def asked(self) -> Self:
        """The budget alone, without what was measured for it."""
        return self.model_copy(update={"step_seconds": {}})

    @property
    def text(self) -> str:
        """The budget as it is asked for: time=60."""
        return f"{self.kind}={self.amount:g}"
