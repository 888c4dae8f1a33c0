"""What `record.json` of an evaluation holds: a row for each task and metric, and for each group of tasks."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.output.record import Frozen, Options, Seed
from crosslayer.verbs.evaluate.paired import Paired


class Settings(Options):
    """What is evaluated, and how.

    Raises:
        ValueError: there is no task, a number is out of range, or the eviction cannot be read.

    """

    tasks: tuple[str, ...]
    limit: int | None
    num_fewshot: int | None
    batch: int | Literal["auto"]
    evict: str | None = None
    seed: Seed

    @field_validator("batch", mode="before")
    @classmethod
    def _check_batch(cls, batch: Any) -> Any:
        if batch == "auto" or str(batch).isdecimal() and int(batch) > 0:
            return batch
        raise ValueError(f"batch is {batch!r}; it is auto or a number of requests, at least 1")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.tasks or not all(name.strip() for name in self.tasks):
            raise ValueError("there is no task; name some, such as arc_easy,piqa")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it is a number of items, at least 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot is {self.num_fewshot}; it must be at least 0")
        if self.evict is not None:
            parse_eviction(self.evict)
        return self


class ModelFacts(Frozen):
    """What a model is."""

    name: str = Field(description="name without folders above it, or the class")
    class_: str = Field(validation_alias="class", serialization_alias="class")
    parameters: int
    dtype: str
    device: str
    seconds: float = Field(ge=0, description="of its evaluation, loading left out")
    requests: int = Field(ge=0, description="texts that were scored or continued")
    shortened: int = Field(ge=0, description="of them without their beginning, for which positions were too few")
    reduced: int | None = Field(default=None, ge=0, description="of them with tokens evicted before the last was read")


class Models(Frozen):
    """Both sides; a baseline need not be there."""

    candidate: ModelFacts
    baseline: ModelFacts | None


class Score(Frozen):
    """What lm-eval reports: a score, and its standard error where it has one."""

    value: float
    stderr: float | None = Field(default=None, ge=0)


class Row(Frozen):
    """A metric of a task; `kind` says what its items are, None where the score is no mean over items."""

    task: str
    metric: str
    filter: str = Field(description="what lm-eval's tasks may do with an answer before it is judged; none is usual")
    higher_is_better: bool
    kind: Literal["share", "mean", "perplexity"] | None
    items: PositiveInt
    shots: int = Field(ge=0)
    candidate: Score
    baseline: Score | None
    paired: Paired | None = Field(description="None without a baseline, or where items cannot be paired")


class GroupRow(Frozen):
    """The mean of a metric over tasks: each counts the same, or, as in some groups of lm-eval's own, each item does."""

    group: str
    metric: str = Field(description="acc; or acc_norm, and acc of tasks that lack it")
    tasks: tuple[str, ...] = Field(min_length=1)
    weighting: Literal["tasks", "items"] = Field(default="tasks", description="what counts the same")
    items: PositiveInt
    candidate: float
    baseline: float | None
    paired: Paired | None
