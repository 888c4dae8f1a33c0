"""The contents of an evaluation's `record.json`: a row for each task and metric, and for each group of tasks."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from crosslayer.eviction.eviction import Evict
from crosslayer.output.record import Frozen, ModelFacts, Options, Seed
from crosslayer.verbs.evaluate.paired import Paired
from crosslayer.wiring.kv_bits import KvBitsText


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


class EvaluatedModel(ModelFacts):
    """A model, and counts of its requests."""

    seconds: float = Field(ge=0, description="evaluation time, without loading")
    requests: int = Field(ge=0, description="texts that were scored or continued")
    shortened: int = Field(ge=0, description="requests truncated on the left to fit the model's positions")
    reduced: int | None = Field(default=None, ge=0, description="requests with tokens evicted before the last was read")


class EvaluatedModels(Frozen):
    """The candidate and, if there is one, the baseline."""

    candidate: EvaluatedModel
    baseline: EvaluatedModel | None


class Score(Frozen):
    """A score as lm-eval reports it, with its standard error if it has one."""

    value: float
    stderr: float | None = Field(default=None, ge=0)


class ScoreRow(Frozen):
    """A metric of a task, or its mean over the tasks of a group."""

    name: str = Field(description="name of the task or the group")
    metric: str = Field(description="for a group: acc, or acc_norm with acc for tasks that lack it")
    filter: str = Field(default="none", description="lm-eval's filter of answers before they are scored")
    higher_is_better: bool = True
    kind: Literal["share", "mean", "perplexity"] | None = Field(description="None: the score is not a mean over items")
    items: PositiveInt
    shots: NonNegativeInt | None = Field(default=None, description="examples before an item; None for a group")
    tasks: tuple[str, ...] = Field(default=(), description="tasks of a group")
    weighting: Literal["tasks", "items"] = Field(default="tasks", description="for a group: what is weighted equally")
    candidate: Score
    baseline: Score | None
    paired: Paired | None = Field(description="None without a baseline, or if items cannot be paired")

    @property
    def is_better(self) -> bool | None:
        """Whether the candidate is better; None if no difference is seen, or if items are not paired."""
        better = "higher" if self.higher_is_better else "lower"
        return None if self.paired is None else self.paired.change.is_better(better)

    @property
    def title(self) -> str:
        """Its name and metric, with the filter if it is not the default."""
        return f"{self.name} {self.metric}" + ("" if self.filter == "none" else f" ({self.filter})")
