"""What a recovery's recipe says: text, loss, stages, and what is measured; docs/HEAL.md lists its keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import EMBEDDED
from crosslayer.corpus.files import file_kind
from crosslayer.output.record import Seed
from crosslayer.verbs.heal.instructions import Columns, Instructions
from crosslayer.verbs.retrofit.damage import FEWEST
from crosslayer.verbs.train.recipe import checked
from crosslayer.verbs.train.recipe_arguments import Misplaced, read_arguments
from crosslayer.verbs.train.recipe_file import nearest, read_draft
from crosslayer.verbs.train.recipe_parts import Count, DataPart, DomainPart, Part, SchedulePart
from crosslayer.verbs.train.texts import EVERY, Domain

STAGES = 8  # at most
JUDGED = 5  # of an embedded domain every fifth piece is held out, which is enough to measure on


class ColumnsPart(Part):
    """Where a table has instructions and their responses."""

    instruction: str = "instruction"
    """The column of the instruction."""
    input: str | None = None
    """The column of what the instruction is about, if there is any."""
    choices: str | None = None
    """The column of a list of answers to choose from, which follow the input, a line each."""
    response: str = "response"
    """The column of the response."""


class HealDomainPart(DomainPart):
    """Text of a kind, or instructions with their responses."""

    columns: ColumnsPart | None = None
    """Of instructions: the columns of .jsonl files. Null: plain text."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns is None:
            return self
        if self.source is None or file_kind(Path(self.source)) != ".jsonl":
            raise Misplaced(f"is for a source of .jsonl files, and this one is {self.source!r}", "columns")
        for option in ("config", "split", "column"):
            if vars(self)[option] != DomainPart.model_fields[option].default:
                raise Misplaced("does nothing beside columns; leave it out", option)
        return self

    def domain(self) -> Domain:
        """Return the domain's text."""
        training, validation = self.training_source(), self.validation_source()
        if self.columns is None:
            return Domain(self.name, training, validation, JUDGED if embedded_source(self) else EVERY)
        return Instructions(self.name, training, validation, columns=Columns(**self.columns.model_dump()))


class HealDataPart(DataPart):
    """What is read, in every stage from its beginning."""

    domains: list[HealDomainPart] = Field(min_length=1)  # type: ignore[assignment]
    """The mixture, domain by domain."""


class ObjectivePart(Part):
    """What is made smaller."""

    loss: Literal["text", "response", "distill"] = "text"
    """`text`: the loss of every token. `response`: that of responses to instructions, their end included. `distill`:
    the KL of the original's predictions to the retrofit's, at every token."""
    hidden: float = Field(default=0, ge=0)
    """With `distill`: the weight of the squared distance of the hidden states to the original's, relative to these."""

    @model_validator(mode="after")
    def _check_hidden(self) -> Self:
        if self.hidden and self.loss != "distill":
            raise Misplaced(f"is {self.hidden:g}, and only loss: distill has hidden states to match", "hidden")
        return self


class StopPart(Part):
    """When a stage ends before its schedule does."""

    smoothing: float = Field(default=0.95, ge=0, lt=1)
    """β of the exponential moving average of the logged losses."""
    patience: Count = 50
    """Logged losses within which the average must fall, or the stage ends."""
    least: float = Field(default=0.001, gt=0, lt=1)
    """By which share of itself."""


class LoraPart(Part):
    """Adapters of low rank at every linear map, merged at the end of the stage (arXiv 2106.09685)."""

    rank: Count = 16
    """Rank of each update."""
    alpha: Count = 32
    """The update is multiplied by alpha / rank."""


class StagePart(Part):
    """A part of the training, with a schedule of its own."""

    parameters: Literal["compensation", "all", "lora"]
    """What trains: `compensation` (W_c and nothing else), `all`, or `lora`."""
    schedule: SchedulePart
    """How long, and the learning rate on the way."""
    train: dict[str, Any] = {}
    """Keys of transformers' `TrainingArguments` for this stage, on top of the recipe's."""
    stop: StopPart | None = None
    """When it ends early; null: never."""
    lora: LoraPart | None = None
    """Of `parameters: lora`."""

    @field_validator("train")
    @classmethod
    def _check_train(cls, train: dict[str, Any]) -> dict[str, Any]:
        return read_arguments(train)

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and self.parameters != "lora":
            raise Misplaced(f"does nothing with parameters: {self.parameters}; leave it out", "lora")
        return self


class MeasurePart(Part):
    """What the model is measured on before, after each stage, and beside the trained original."""

    domains: list[str] | None = Field(default=None, min_length=1)
    """Embedded domains, as docs/TEXT.md lists them. Those that nothing was trained on say most. Null, as for the next
    two: those of the receipts."""
    windows: Count | None = None
    """Windows of all of them together; at least 16 of each."""
    length: int | None = Field(default=None, ge=2, lt=2**31)
    """Tokens of a window."""
    held_out: Count = 8
    """Rows of each domain that is trained on, held out, for the loss at the end of a stage."""
    needles: bool = True
    """Whether models are asked for numbers hidden in long texts, ten at each of 256, 512, 1,024 and 2,048 tokens."""

    @field_validator("domains")
    @classmethod
    def _check_domains(cls, domains: list[str] | None) -> list[str] | None:
        for place, name in enumerate(domains or ()):
            if name not in EMBEDDED:
                raise Misplaced(f"is {name!r}, no embedded domain; {nearest(name, list(EMBEDDED))}", place)
            if domains is not None and name in domains[:place]:
                raise Misplaced(f"is {name!r} a second time", place)
        return domains

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.domains is None or self.windows is None:
            return self
        least = FEWEST * len(self.domains)
        if self.windows < least:
            raise Misplaced(f"is {self.windows}; {len(self.domains)} domains need at least {least}", "windows")
        return self


class HealRecipe(Part):
    """A recovery: text, loss, stages and measurement."""

    name: str = Field(default="", max_length=100)
    """How the result calls it; by default the file's name."""
    seed: Seed = 0
    """Of the order of data, dropout and adapters; windows are drawn with the receipts' seed."""
    objective: ObjectivePart = ObjectivePart()
    """What is made smaller."""
    data: HealDataPart
    """What is read."""
    train: dict[str, Any] = {}
    """Keys of transformers' `TrainingArguments`, for all stages."""
    stages: list[StagePart] = Field(min_length=1, max_length=STAGES)
    """One after the other."""
    baseline: bool = True
    """Whether the original trains as well: as the last stage, on its rows, to its last step."""
    eval: MeasurePart = MeasurePart()
    """What is measured."""

    @field_validator("train")
    @classmethod
    def _check_train(cls, train: dict[str, Any]) -> dict[str, Any]:
        return read_arguments(train)

    @model_validator(mode="after")
    def _check_responses(self) -> Self:
        for place, domain in enumerate(self.data.domains):
            if self.objective.loss == "response" and domain.columns is None:
                raise Misplaced(
                    "is missing; objective.loss is response, and plain text has none",
                    "data",
                    "domains",
                    place,
                    "columns",
                )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Refuse a text that would go by the name of another on which models are measured."""
        judged = EMBEDDED if self.eval.domains is None else self.eval.domains
        for place, domain in enumerate(self.data.domains):
            if domain.name in judged and not embedded_source(domain):
                raise Misplaced(
                    f"is {domain.name!r}, an embedded domain to measure on, and its source is {domain.source!r}; "
                    "give that text another name",
                    "data",
                    "domains",
                    place,
                    "name",
                )
        return self

    @property
    def trains_original(self) -> bool:
        """Whether there is a trained original to compare with: it has no W_c, and nothing to learn from itself."""
        last = self.stages[-1].parameters
        return self.baseline and self.objective.loss != "distill" and last != "compensation"


def load_heal_recipe(path: str | Path, settings: Sequence[str] = ()) -> HealRecipe:
    """Read a recipe and check it; no file of data is opened.

    Args:
        path: of a YAML file.
        settings: values that replace the file's, such as "stages.1.schedule.tokens=20000".

    Raises:
        ValueError: in one line the file, the key, what is wrong with it, and what would be right.

    """
    draft = read_draft(Path(path), settings)
    return checked(HealRecipe, {"name": Path(path).stem, "data": {}, **draft.values}, draft)


def embedded_source(domain: HealDomainPart) -> bool:
    """Return whether a domain is one of the embedded ones, on which models are measured too."""
    return domain.training_source() == TextSource()
