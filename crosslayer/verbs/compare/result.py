"""The result of a comparison."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from crosslayer.output.result import Result
from crosslayer.verbs.compare.record import Budget, ComparedRun, Configuration, Cost, Law, Outcome, Variant


class Comparison(Result):
    """What `crosslayer.compare` returns: an outcome for each variant in each configuration, and a page."""

    schema_: Literal["crosslayer/compare/5"] = Field(
        "crosslayer/compare/5", validation_alias="schema", serialization_alias="schema"
    )
    name: str
    baseline: str
    smooth: int | None = Field(ge=1, description="steps; None: 1/20 of each run")
    budget: Budget | None
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

    def of(self, configuration: str, variant: str) -> list[ComparedRun]:
        """Return the runs of a variant in a configuration, in the order of their seeds."""
        runs = [run for run in self.runs if run.configuration == configuration and run.variant == variant]
        return sorted(runs, key=lambda run: run.seed)

    def law_groups(self) -> dict[tuple[str, Cost], list[Law]]:
        """Return the laws by what their configurations share and by cost, the baseline's first in each group."""
        groups: dict[tuple[str, Cost], list[Law]] = {}
        for law in self.laws:
            groups.setdefault((law.where, law.cost), []).append(law)
        return groups

    def headline(self) -> dict[str, Any]:
        """Return the baseline, and for each variant and configuration the difference, its interval and the verdict."""
        results = []
        for outcome in self.outcomes:
            change = outcome.final and outcome.final.change
            results.append(
                {
                    **({"configuration": outcome.configuration} if outcome.configuration else {}),
                    "variant": outcome.variant,
                    "seeds": len(outcome.seeds),
                    "loss": round(outcome.loss, 5),
                    "difference": None if change is None else round(change.value, 5),
                    "interval": [round(end, 5) for end in change.interval] if change and change.interval else None,
                    "verdict": outcome.verdict,
                }
            )
        return {"name": self.name, "baseline": self.baseline, "results": results}
