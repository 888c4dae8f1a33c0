"""What `record.json` of an evaluation holds: a row for each task and metric, and for each group of tasks."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from crosslayer.eviction.eviction import Evict
from crosslayer.output.record import Frozen, ModelFacts, Options, Seed
from crosslayer.verbs.evaluate.paired import Paired


class EvaluateSettings(Options):
    """What is evaluated, and how."""

    tasks: tuple[str, ...]
    limit: PositiveInt | None
    num_fewshot: NonNegativeInt | None
    batch: int | Literal["auto"]
    evict: Evict | None = None
    seed: Seed

    @field_validator("batch", mode="before")
    @classmethod
    def _check_batch(cls, batch: Any) -> Any:
        if batch == "auto" or str(batch).isdecimal() and int(batch) > 0:
            return batch
        raise ValueError(f"batch is {batch!r}; it is auto or a number of requests, at least 1")

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks or not all(name.strip() for name in tasks):
            raise ValueError("there is no task; name some, such as arc_easy,piqa")
        return tasks


class EvaluatedModel(ModelFacts):
    """A model, and what became of its requests."""

    seconds: float = Field(ge=0, description="of its evaluation, without loading")
    requests: int = Field(ge=0, description="texts that were scored or continued")
    shortened: int = Field(ge=0, description="requests that lost their beginning, since they exceed the positions")
    reduced: int | None = Field(default=None, ge=0, description="requests with tokens evicted before the last was read")


class EvaluatedModels(Frozen):
    """The candidate and, where there is one, the baseline."""

    candidate: EvaluatedModel
    baseline: EvaluatedModel | None


class Score(Frozen):
    """What lm-eval reports: a score, and its standard error where it has one."""

    value: float
    stderr: float | None = Field(default=None, ge=0)


class ScoreRow(Frozen):
    """A metric of a task, or its mean over the tasks of a group."""

    name: str = Field(description="of the task or the group")
    metric: str = Field(description="of a group: acc; or acc_norm, and acc of tasks that lack it")
    filter: str = Field(default="none", description="what lm-eval does with an answer before it is judged")
    higher_is_better: bool = True
    kind: Literal["share", "mean", "perplexity"] | None = Field(description="None: the score is no mean over items")
    items: PositiveInt
    shots: NonNegativeInt | None = Field(default=None, description="examples before an item; None of a group")
    tasks: tuple[str, ...] = Field(default=(), description="of a group")
    weighting: Literal["tasks", "items"] = Field(default="tasks", description="of a group: what counts the same")
    candidate: Score
    baseline: Score | None
    paired: Paired | None = Field(description="None without a baseline, or where items cannot be paired")

    @property
    def title(self) -> str:
        """Its name and metric, with the filter where it is not the usual one."""
        return f"{self.name} {self.metric}" + ("" if self.filter == "none" else f" ({self.filter})")
