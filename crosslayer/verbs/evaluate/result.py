"""The result of an evaluation and its page: tables and figures of differences by task."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr, field_validator

from crosslayer.cache.eviction import Evict
from crosslayer.cache.running import CacheOptions
from crosslayer.judge.page import by_verdict, cards, change_panels, listing, models_table
from crosslayer.judge.report import Report, Row
from crosslayer.output.formatting import Table
from crosslayer.output.page import Page
from crosslayer.output.record import Options, Seed
from crosslayer.wiring.kv_bits import KvBitsText

HARNESS = "lm_eval"  # the folder of lm-eval's own results
COLUMNS = {  # of the table of tasks: details of a row
    "items": "items",
    "only_candidate": "only\ncandidate",
    "only_original": "only\noriginal",
    "items_for_a_point": "items for 1 point",
}


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

    The scope of a row is a task or a group of tasks, which its details name. `save` also writes what lm-eval returned
    (except the git commit, which is None), unless the evaluation was loaded from a folder.
    """

    schema_: Literal["crosslayer/evaluate/8"] = Field(default="crosslayer/evaluate/8", alias="schema")
    settings: EvaluateSettings
    lm_eval: str = Field(description="version of lm-eval")

    _results: dict[str, Mapping[str, Any]] = PrivateAttr(default_factory=dict)  # by candidate and baseline

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

    def layout(self) -> Page:
        """Return the page."""
        limit, shots = self.settings.limit, self.settings.num_fewshot
        items = "all" if limit is None else f"the first {limit}"
        return Page(
            title=self.title("Evaluation"),
            subtitle=(
                f"lm-eval {self.lm_eval}, {items} items of each task · few-shot examples: "
                f"{'task default' if shots is None else shots} · {self.candidates[0].place}"
            ),
            cards=cards((self.groups or self.tasks)[:4]),
            panels=change_panels([*self.groups, *self.tasks]),
            tables=[models_table(self)],
        )

    def tables(self) -> list[Table]:
        """Return the table of groups, if there are any, and the table of tasks."""
        if self.original is None:
            details = {"stderr": "standard error", "items": "items", "shots": "examples"}
            return [listing("Scores", [*self.groups, *self.tasks], details, "task")]
        tables = []
        if self.groups:
            title = "Groups: means over tasks, in points"
            tables.append(listing(title, self.groups, {"items": "items", "tasks": "tasks"}, "group"))
        title = "Tasks: candidate − baseline in points, or candidate ÷ baseline for perplexities"
        return [*tables, listing(title, self.tasks, COLUMNS, "task")]

    def sentences(self) -> list[str]:
        """Return the results in sentences, groups first; gains and losses are worded alike."""
        settings, details = self.settings, self.candidates[0].details
        limit, shots = settings.limit, settings.num_fewshot
        written = ["Scores of one model, with lm-eval's standard errors; add --baseline for paired differences."]
        if self.original is not None:
            written = [*by_verdict(self.groups), *by_verdict(self.tasks)]
            alone = [f"{row.scope} {row.quantity}" for row in self.tasks if row.change is None]
            if alone:
                written.append(f"Not compared, because their scores are not means over items: {', '.join(alone)}.")
            # Intervals are not corrected for the number of tasks, so one in 20 excludes 0 by chance.
            paired = len(self.tasks) - len(alone)
            if paired > 1:
                chance = f"{paired / 20:.{1 if paired < 200 else 0}f}"
                written.append(
                    f"Even between equal models, {paired} comparisons show up to about {chance} differences by chance."
                )
        written += CacheOptions(settings.evict, settings.kv_bits).sentences()
        # An eviction that never happened would read as one that does no harm.
        if settings.evict is not None:
            reduced, requests = int(details["reduced"]), int(details["requests"])
            line = f"Tokens were evicted in {reduced:,} of {requests:,} requests."
            if not reduced:
                line = f"No tokens were evicted: all {requests:,} requests fit in the budget, so this run says nothing "
                line += "about eviction."
            written.append(line)
        written += ["Scored with vLLM."] if settings.engine == "vllm" else []
        written += [] if limit is None else [f"Only the first {limit} items of each task were evaluated."]
        for model in self.models:
            if shortened := model.details["shortened"]:
                line = f"{shortened:,} requests to {model.name} were truncated on the left to fit its positions."
                written.append(line)
        examples = {row.scope: row.details["shots"] for row in self.tasks}
        fixed = [f"{task} ({number})" for task, number in examples.items() if shots not in (None, number)]
        if fixed:
            written.append(
                f"lm-eval fixes the number of examples of {', '.join(fixed)}: --num-fewshot {shots} does not apply."
            )
        return written

    def write_files(self, folder: Path) -> None:
        """Also write lm-eval's results as lm-eval does: one sample per line, everything else as JSON."""
        super().write_files(folder)
        for role, results in self._results.items():
            # Here, since a result that was loaded from a folder is saved again without lm-eval.
            from lm_eval.utils import handle_non_serializable

            options = {"default": handle_non_serializable, "ensure_ascii": False}
            (folder / HARNESS).mkdir(exist_ok=True)
            rest = {name: value for name, value in results.items() if name != "samples"}
            (folder / HARNESS / f"{role}.json").write_text(json.dumps(rest, indent=2, **options), encoding="utf-8")
            for task, samples in results["samples"].items():
                path = folder / HARNESS / f"{role}.samples.{task.replace('/', '_')}.jsonl"
                lines = "".join(json.dumps(sample, **options) + "\n" for sample in samples)
                path.write_text(lines, encoding="utf-8")
