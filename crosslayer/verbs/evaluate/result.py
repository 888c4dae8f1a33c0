"""The result of an evaluation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from crosslayer.output.result import Result
from crosslayer.verbs.bench.record import Row
from crosslayer.verbs.evaluate.record import EvaluatedModels, EvaluateSettings, ScoreRow

HARNESS = "lm_eval"  # the folder of lm-eval's own results


class Evaluation(Result):
    """What `crosslayer.evaluate` returns: a row for each metric of a task, and a page.

    Its fields are the contents of `record.json`, and two evaluations are equal if these are. `save` also writes what
    lm-eval returned (except the git commit, which is None), unless the evaluation was loaded from a folder.
    """

    schema_: Literal["crosslayer/evaluate/6"] = Field(default="crosslayer/evaluate/6", alias="schema")
    models: EvaluatedModels
    settings: EvaluateSettings
    rows: tuple[ScoreRow, ...] = Field(min_length=1)
    groups: tuple[ScoreRow, ...]
    cost: Row | None = Field(default=None, description="measurements of `bench`; None without `cost`")
    lm_eval: str = Field(description="version of lm-eval")

    _results: dict[str, Mapping[str, Any]] = PrivateAttr(default_factory=dict)  # by candidate and baseline

    @model_validator(mode="after")
    def _check_baseline(self) -> Self:
        """Refuse rows with a baseline if there is no such model, and the other way round."""
        alone = self.models.baseline is None
        for row in (*self.rows, *self.groups):
            if (row.baseline is None) != alone or row.paired is not None and alone:
                raise ValueError(f"{row.title} {'has' if alone else 'lacks'} a baseline, unlike the record")
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Evaluation) and self.record() == other.record()

    @property
    def lm_eval_results(self) -> dict[str, Mapping[str, Any]]:
        """What lm-eval returned for candidate and baseline, with samples; empty if loaded from a folder."""
        return self._results

    def headline(self) -> dict[str, Any]:
        """Return the names of the models, and rounded scores with differences of rows and groups."""
        baseline = self.models.baseline
        return {
            "candidate": self.models.candidate.name,
            "baseline": None if baseline is None else baseline.name,
            **({} if self.cost is None else {"kv_share": round(self.cost.cache.dynamic.share, 6)}),
            "results": [{"task": row.name, **_figures(row)} for row in self.rows],
            "groups": [{"group": row.name, **_figures(row)} for row in self.groups],
        }

    def _write(self, folder: Path) -> None:
        """Also write lm-eval's results as lm-eval does: one sample per line, everything else as JSON."""
        super()._write(folder)
        for role, results in self._results.items():
            from lm_eval.utils import handle_non_serializable

            options = {"default": handle_non_serializable, "ensure_ascii": False}
            (folder / HARNESS).mkdir(exist_ok=True)
            rest = {name: value for name, value in results.items() if name != "samples"}
            (folder / HARNESS / f"{role}.json").write_text(json.dumps(rest, indent=2, **options), encoding="utf-8")
            for task, samples in results["samples"].items():
                path = folder / HARNESS / f"{role}.samples.{task.replace('/', '_')}.jsonl"
                lines = "".join(json.dumps(sample, **options) + "\n" for sample in samples)
                path.write_text(lines, encoding="utf-8")


def _figures(row: ScoreRow) -> dict[str, Any]:
    figures: dict[str, Any] = {"metric": row.metric, "candidate": round(row.candidate.value, 4)}
    if row.baseline is not None:
        figures["baseline"] = round(row.baseline.value, 4)
    if row.paired is not None:
        change = row.paired.change
        figures["ratio" if row.kind == "perplexity" else "difference"] = round(change.value, 4)
        figures["interval"] = change.interval and [round(end, 4) for end in change.interval]
        figures["verdict"] = change.verdict
    return figures
