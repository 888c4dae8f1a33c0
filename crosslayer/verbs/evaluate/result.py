"""The result of an evaluation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr, field_validator

from crosslayer.cache.eviction import Evict
from crosslayer.judge.report import Report, Row
from crosslayer.output.record import Options, Seed
from crosslayer.wiring.kv_bits import KvBitsText

HARNESS = "lm_eval"  # the folder of lm-eval's own results


class EvaluateSettings(Options):
    """The options of an evaluation."""

    tasks: tuple[str, ...]
    limit: PositiveInt | None
    num_fewshot: NonNegativeInt | None
    batch: int | Literal["auto"]
    evict: Evict | None = None
    kv_bits: KvBitsText | None = None
    engine: Literal["transformers", "vllm"] = "transformers"
    seed: Seed

    @field_validator("batch", mode="before")
    @classmethod
    def _check_batch(cls, batch: Any) -> Any:
        if batch == "auto" or str(batch).isdecimal() and int(batch) > 0:
            return batch
        raise ValueError(f"`batch` must be auto or at least 1, got {batch!r}")

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks or not all(name.strip() for name in tasks):
            raise ValueError("`tasks` must name at least one task, such as arc_easy,piqa")
        return tasks


class Evaluation(Report):
    """What `crosslayer.evaluate` returns: a row for each metric of a task, and a page.

    The scope of a row is a task or a group of tasks, which its details name. The fields are the contents of
    `record.json`, and two evaluations are equal if these are. `save` also writes what lm-eval returned (except the git
    commit, which is None), unless the evaluation was loaded from a folder.
    """

    schema_: Literal["crosslayer/evaluate/7"] = Field(default="crosslayer/evaluate/7", alias="schema")
    settings: EvaluateSettings
    lm_eval: str = Field(description="version of lm-eval")

    _results: dict[str, Mapping[str, Any]] = PrivateAttr(default_factory=dict)  # by candidate and baseline

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Evaluation) and self.record() == other.record()

    @property
    def lm_eval_results(self) -> dict[str, Mapping[str, Any]]:
        """What lm-eval returned for candidate and baseline, with samples; empty if loaded from a folder."""
        return self._results

    @property
    def groups(self) -> list[Row]:
        """The rows of groups of tasks."""
        return [row for row in self.rows if "tasks" in row.details]

    @property
    def tasks(self) -> list[Row]:
        """The rows of tasks."""
        return [row for row in self.rows if "items" in row.details and "tasks" not in row.details]

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
