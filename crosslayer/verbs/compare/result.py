"""The result of a comparison. Losses are in nats per token; differences are candidate − baseline."""

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from crosslayer.environment import Machine
from crosslayer.output.record import Frozen, SameLengths
from crosslayer.output.result import Result
from crosslayer.stats.estimate import Estimate, Verdict
from crosslayer.stats.times import TimeComparison
from crosslayer.training.record import DepthMixing

ALPHA = 0.05  # an adjusted p-value below it is significant
# Logged entries that a band must at least lie on one side of 0, since a single one may by chance: of pure noise, 90% of
# variants have a band of three seeds below 0 somewhere.
SHORTEST = 2
MISSING = "not set"  # value of a key that only other configurations have
EVALUATIONS = 8  # of a run with a speedup: with fewer, the line between two of them decides the answer
RELEVANT = 0.01  # nats per token: the difference for which the number of needed seeds is estimated

Cost = Literal["parameters", "tokens", "flops"]
COSTS: dict[str, str] = {"parameters": "parameters", "tokens": "tokens", "flops": "FLOPs"}


class Configuration(Frozen):
    """The values of recipe keys in which configurations differ; empty if there is a single configuration."""

    label: str
    values: dict[str, Any]

    @classmethod
    def from_values(cls, values: dict[str, Any], labeled: Sequence[str] | None = None) -> Self:
        """Return the configuration of values, with the keys `labeled`, by default all, in its label."""
        written = {key: json.dumps(value).strip('"') for key, value in values.items()}
        label = ", ".join(f"{key}={written[key]}" for key in (values if labeled is None else labeled))
        return cls(label=label, values=values)


class Variant(Frozen):
    """A model variant: no method, one, or several together, and its key/value heads if the recipe states them."""

    label: str = Field(min_length=1)
    methods: list[dict[str, Any]]
    num_key_value_heads: int | None = None
    learning_rate: float | None = Field(default=None, description="its own, where variants have different ones")


class Trace(SameLengths):
    """A loss by step."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]


class SnapshotMeans(Frozen):
    """A snapshot of a model after a step: means over layers, and the residual stream's last norm / its first.

    A spread is the largest norm over the smallest, from the second layer on: the first writes into the embedding.
    """

    step: int
    first_token_share: float | None
    sink_rate: float | None
    stream_growth: float | None
    entropy: float | None = None
    token_similarity: float | None = None
    output_spread: float | None = Field(default=None, description="of what attention and MLPs add")
    gradient_spread: float | None = Field(default=None, description="of the gradient by what they add")


class ComparedRun(Frozen):
    """The compared properties of a training run; `seconds` covers training steps only."""

    configuration: str
    variant: str
    seed: int
    name: str
    parameters: int = Field(ge=1)
    flops_per_token: float = Field(ge=0)
    steps: int = Field(ge=1)
    tokens: int = Field(ge=1)
    seconds: float = Field(ge=0)
    learning_rate: float | None = Field(default=None, description="peak; None in records of an earlier release")
    constant_rate: bool = Field(default=False, description="whether it stays there after the warmup")
    step_seconds: float | None = Field(ge=0, description="median of the logged steps; None if none was logged")
    peak_bytes: int | None
    kv_bytes_per_token: float = Field(ge=0, description="stored")
    kv_read_bytes_per_token: float = Field(ge=0)
    dtype: str = Field(description="of the cache")
    machine: Machine
    final_loss: float = Field(description="over the mixture, on held-out text")
    losses: dict[str, float] = Field(min_length=1, description="the same by domain")
    held_out_tokens: int | None = Field(default=None, description="None in records of an earlier release")
    curve: Trace = Field(description="training loss, each the mean since the previous entry")
    validation: Trace = Field(description="held-out loss over the mixture")
    snapshots: tuple[SnapshotMeans, ...]
    depth_mixing: DepthMixing | None = None


class RelativeCurve(SameLengths):
    """Smoothed training loss minus the baseline's by step: mean over pairs, and a band from three pairs on.

    The band is the 95% Student-t interval. It holds at each step, not at all steps at once: a verdict needs it over
    several entries.
    """

    window: int = Field(ge=1, description="logged entries per average")
    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None


class Difference(Frozen):
    """A loss less the baseline's: of each pair of seeds, and their mean."""

    values: tuple[float, ...] = Field(min_length=1)
    change: Estimate


class CriticalPoints(Frozen):
    """The step from which the baseline's training loss stays lower, by pair; None if that did not happen."""

    reached: tuple[float | None, ...]
    step: Estimate | None = Field(description="the mean of `reached`, if all pairs reached it")


class Speedup(Frozen):
    """What the baseline needs over what the variant needs, for the higher of their two final losses; above 1 it saves.

    Geometric means over seeds, with Student's t interval of the logarithms.
    """

    by_seed: tuple[float, ...] = Field(description="in tokens")
    tokens: Estimate
    flops: Estimate | None
    seconds: Estimate | None = Field(description="None where step times were not measured in turn")


class Outcome(Frozen):
    """A variant compared with the baseline in a configuration; `seeds` are those with a run of both."""

    configuration: str
    variant: str
    seeds: tuple[int, ...]
    missing: tuple[int, ...] = Field(description="seeds with a run of only one of the two")
    loss: float | None = Field(description="mean of the variant's final loss over `seeds`; None without a pair")
    final: Difference | None = Field(description="of the final loss over the mixture; None without a pair")
    adjusted: float | None = Field(ge=0, le=1, description="p-value corrected for all comparisons of this page")
    domains: dict[str, Difference]
    seeds_needed: int | None = Field(ge=1, description=f"to detect a difference of {RELEVANT}")
    curve: RelativeCurve | None = Field(description="None if steps differ")
    critical: CriticalPoints | None = Field(description="None if the variant was never ahead for long enough")
    step_time: TimeComparison | None = Field(
        default=None, description="of a training step, variant and baseline in turn"
    )
    speedup: Speedup | None = Field(
        default=None, description="None unless learning rates stay constant after the warmup"
    )

    @property
    def verdict(self) -> Verdict | None:
        """Whether the loss is lower or higher than the baseline's, corrected for all comparisons.

        None if there are too few pairs for a test.
        """
        if self.final is None or self.adjusted is None:
            return None
        return "no difference seen" if self.adjusted >= ALPHA else self.final.change.verdict

    @property
    def rank(self) -> float:
        """The value that tables are sorted on: the loss; outcomes without one come last."""
        return math.inf if self.loss is None else self.loss

    @property
    def overtaken(self) -> bool:
        """Whether the baseline overtook the variant: every pair has a critical point, and the curve ends above 0."""
        if self.critical is None or self.critical.step is None or self.curve is None:
            return False
        # Overtaken if the band lies above 0 over the last window; fewer than three pairs have no band.
        low, stretch = self.curve.low, max(SHORTEST, self.curve.window)
        return low is not None and min(low[-stretch:]) > 0


class Law(Frozen):
    """A power law of a variant's final loss, L = scale · C^−exponent, through the means of configurations.

    `fewer` is the share of the baseline's largest cost that the variant saves to reach the baseline's loss there
    (0.1: 10% fewer; below 0: more); None if the variant's law does not reach it.
    """

    variant: str
    where: str = Field(description="what its configurations share, if there are several groups")
    cost: Cost
    configurations: tuple[str, ...] = Field(min_length=2)
    costs: tuple[float, ...]
    losses: tuple[float, ...]
    scale: float
    exponent: Estimate = Field(description="of the fit, over configurations")
    exponent_over_seeds: Estimate = Field(description="the mean of each seed's own law")
    fewer: Estimate | None = Field(description="the interval is from the laws of each seed, paired")
    extrapolated: bool = Field(description="whether no run of the variant had the cost that it needs")


class Comparison(Result):
    """What `crosslayer.compare` returns: an outcome for each variant in each configuration, and a page."""

    schema_: Literal["crosslayer/compare/5"] = Field(default="crosslayer/compare/5", alias="schema")
    name: str
    baseline: str
    smooth: int | None = Field(ge=1, description="steps; None: 1/20 of each run")
    configurations: tuple[Configuration, ...] = Field(min_length=1)
    variants: tuple[Variant, ...] = Field(min_length=1)
    domains: tuple[str, ...] = Field(min_length=1)
    runs: tuple[ComparedRun, ...] = Field(min_length=1)
    stopped: dict[str, str] = Field(description="runs that diverged, which are excluded, and their messages")
    outcomes: tuple[Outcome, ...]
    laws: tuple[Law, ...]
    no_laws: str | None = Field(description="why there is no power law")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        configurations = {configuration.label for configuration in self.configurations}
        variants = {variant.label for variant in self.variants}
        entries = (*self.runs, *self.outcomes)
        named = {self.baseline} | {entry.variant for entry in (*entries, *self.laws)}
        if not {entry.configuration for entry in entries} <= configurations or not named <= variants:
            raise ValueError("configurations and variants must list those of every run and result")
        return self

    @property
    def ordered(self) -> list[str]:
        """Labels of the variants, the baseline first."""
        return [self.baseline, *(variant.label for variant in self.variants if variant.label != self.baseline)]

    def runs_of(self, configuration: str, variant: str) -> list[ComparedRun]:
        """Return the runs of a variant in a configuration, in the order of their seeds."""
        runs = [run for run in self.runs if run.configuration == configuration and run.variant == variant]
        return sorted(runs, key=lambda run: run.seed)

    def law_groups(self) -> dict[tuple[str, Cost], list[Law]]:
        """Return the laws by what their configurations share and by cost, the baseline's first in each group."""
        groups: dict[tuple[str, Cost], list[Law]] = {}
        for law in self.laws:
            groups.setdefault((law.where, law.cost), []).append(law)
        return groups

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return how to look into a run of the best variant, if the comparison trained it; read runs may be gone."""
        out = out or (self.typed or {}).get("out")
        if out is None:
            return None
        folder = Path(out) / "runs"
        best = min(self.outcomes, key=lambda outcome: outcome.rank)
        for run in self.runs_of(best.configuration, best.variant):
            if (folder / run.name / "model").is_dir():
                return f"crosslayer diagnose {shlex.quote(str(folder / run.name / 'model'))} --out diagnosis"
        return None

    def headline(self) -> dict[str, Any]:
        """Return the baseline, and for each variant and configuration the difference, its interval and the verdict."""
        results = []
        for outcome in self.outcomes:
            change = None if outcome.final is None else outcome.final.change
            results.append(
                {
                    **({"configuration": outcome.configuration} if outcome.configuration else {}),
                    "variant": outcome.variant,
                    "seeds": len(outcome.seeds),
                    "loss": None if outcome.loss is None else round(outcome.loss, 5),
                    "difference": None if change is None else round(change.value, 5),
                    "interval": [round(end, 5) for end in change.interval] if change and change.interval else None,
                    "verdict": outcome.verdict,
                    **({"speedup": round(outcome.speedup.tokens.value, 4)} if outcome.speedup else {}),
                }
            )
        return {"name": self.name, "baseline": self.baseline, "results": results}
