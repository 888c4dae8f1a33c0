"""The result of a comparison."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from crosslayer.output.result import Result
from crosslayer.verbs.compare.record import Budget, ComparedRun, Cost, Law, LengthTrend, Outcome, Setting, Variant


class Comparison(Result):
    """What `crosslayer.compare` returns. Shapes: A outcomes (a variant beside the baseline in a setting)."""

    schema_: Literal["crosslayer/compare/3"] = Field(
        "crosslayer/compare/3", validation_alias="schema", serialization_alias="schema"
    )
    name: str
    baseline: str
    smooth: int | None = Field(ge=1, description="steps; None: a twentieth of each run")
    budget: Budget | None
    settings: tuple[Setting, ...] = Field(min_length=1)
    extends: tuple[tuple[int, ...], ...] = Field((), description="seeds of the pages that were seen before this one")
    variants: tuple[Variant, ...] = Field(min_length=1)
    domains: tuple[str, ...] = Field(min_length=1)
    runs: tuple[ComparedRun, ...] = Field(min_length=1)
    stopped: dict[str, str] = Field(description="runs that diverged, and how; they are left out")
    outcomes: tuple[Outcome, ...]
    laws: tuple[Law, ...]
    no_laws: str | None = Field(description="why there is no power law")
    trends: tuple[LengthTrend, ...]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        settings, variants = {setting.label for setting in self.settings}, {variant.label for variant in self.variants}
        parts = [(part.setting, part.variant) for part in (*self.runs, *self.outcomes)]
        named = (
            {variant for _, variant in parts} | {self.baseline} | {part.variant for part in (*self.laws, *self.trends)}
        )
        if not {setting for setting, _ in parts} <= settings or not named <= variants:
            raise ValueError("a run or a result is of a setting or a variant that the record does not list")
        return self

    @property
    def ordered(self) -> list[str]:
        """Labels of the variants, the baseline first."""
        return [self.baseline, *(variant.label for variant in self.variants if variant.label != self.baseline)]

    def of(self, setting: str, variant: str) -> list[ComparedRun]:
        """Return the runs of a variant in a setting, in the order of their seeds."""
        runs = [run for run in self.runs if run.setting == setting and run.variant == variant]
        return sorted(runs, key=lambda run: run.seed)

    def law_groups(self) -> dict[tuple[str, Cost], list[Law]]:
        """Return the laws by the settings and the cost that they share; the baseline's is the first of a group."""
        groups: dict[tuple[str, Cost], list[Law]] = {}
        for law in self.laws:
            groups.setdefault((law.where, law.cost), []).append(law)
        return groups

    @property
    def differences(self) -> np.ndarray:
        """Final losses, variant − baseline, mean over pairs of seeds, (A,); NaN without a pair."""
        return np.array([np.nan if result.final is None else result.final.mean for result in self.outcomes])

    @property
    def intervals(self) -> np.ndarray:
        """Their 95 % intervals, each taken alone, (A, 2); NaN below three pairs."""
        none = (np.nan, np.nan)
        return np.array([(result.final and result.final.interval) or none for result in self.outcomes])

    @property
    def adjusted(self) -> np.ndarray:
        """Their p-values by Holm, for all comparisons together, (A,); NaN below three pairs."""
        return np.array([result.adjusted for result in self.outcomes], dtype=float)

    def headline(self) -> dict[str, Any]:
        """Return the baseline, and of each variant in each setting the difference, its interval and the verdict."""
        results = []
        for part in self.outcomes:
            final = part.final
            results.append(
                {
                    **({"setting": part.setting} if part.setting else {}),
                    "variant": part.variant,
                    "seeds": len(part.seeds),
                    "loss": round(part.loss, 5),
                    "difference": None if final is None else round(final.mean, 5),
                    "interval": [round(end, 5) for end in final.interval] if final and final.interval else None,
                    "verdict": part.verdict,
                }
            )
        return {"name": self.name, "baseline": self.baseline, "results": results}
