"""What a recovery's recipe says: text, loss, stages, and what is measured; docs/reference/recipes.md lists its keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import EMBEDDED
from crosslayer.corpus.files import file_kind
from crosslayer.output.record import Seed
from crosslayer.verbs.heal.instructions import Columns, Instructions
from crosslayer.verbs.retrofit.damage import MIN_WINDOWS
from crosslayer.verbs.train.arguments import Arguments
from crosslayer.verbs.train.recipe import Count, DataPart, DomainPart, Part, SchedulePart
from crosslayer.verbs.train.recipe_file import nearest, read_recipe
from crosslayer.verbs.train.texts import EVERY, Domain

STAGES = 8  # at most
HOLD_OUT_EVERY = 5  # of an embedded domain every fifth piece is held out, which is enough to measure on


class HealDomainPart(DomainPart):
    """Text of a kind, or instructions with their responses."""

    columns: Columns | None = None
    """Of instructions: the columns of .jsonl files. Null: plain text."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns is None:
            return self
        if self.source is None or file_kind(Path(self.source)) != ".jsonl":
            raise ValueError(f"columns is for a source of .jsonl files, and this one is {self.source!r}")
        for option in ("config", "split", "column"):
            if vars(self)[option] != DomainPart.model_fields[option].default:
                raise ValueError(f"{option} does nothing beside columns; leave it out")
        return self

    def domain(self) -> Domain:
        """Return the domain's text."""
        training, validation = self.training_source(), self.validation_source()
        if self.columns is None:
            return Domain(self.name, training, validation, HOLD_OUT_EVERY if embedded_source(self) else EVERY)
        return Instructions(self.name, training, validation, columns=self.columns)


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
            raise ValueError(f"hidden is {self.hidden:g}, and only loss: distill has hidden states to match")
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
    train: Arguments = {}
    """Keys of transformers' `TrainingArguments` for this stage, on top of the recipe's."""
    stop: StopPart | None = None
    """When it ends early; null: never."""
    lora: LoraPart | None = None
    """Of `parameters: lora`."""

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and self.parameters != "lora":
            raise ValueError(f"lora does nothing with parameters: {self.parameters}; leave it out")
        return self


class MeasurePart(Part):
    """What the model is measured on before, after each stage, and beside the trained original."""

    domains: list[str] | None = Field(default=None, min_length=1)
    """Embedded domains, listed in docs/reference/text.md. Domains without training say most. Null, as for the next
    two: those of the reports."""
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
        for name in domains or ():
            if name not in EMBEDDED:
                raise ValueError(f"{name!r} is no embedded domain; {nearest(name, list(EMBEDDED))}")
        if domains is not None and len(set(domains)) < len(domains):
            raise ValueError(f"{domains} names a domain twice")
        return domains

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.domains is None or self.windows is None:
            return self
        least = MIN_WINDOWS * len(self.domains)
        if self.windows < least:
            raise ValueError(f"windows is {self.windows}; {len(self.domains)} domains need at least {least}")
        return self


class HealRecipe(Part):
    """A recovery: text, loss, stages and measurement."""

    name: str = Field(default="", max_length=100)
    """How the result calls it; by default the file's name."""
    seed: Seed = 0
    """Of the order of data, dropout and adapters; windows are drawn with the reports' seed."""
    objective: ObjectivePart = ObjectivePart()
    """What is made smaller."""
    data: HealDataPart
    """What is read."""
    train: Arguments = {}
    """Keys of transformers' `TrainingArguments`, for all stages."""
    stages: list[StagePart] = Field(min_length=1, max_length=STAGES)
    """One after the other."""
    baseline: bool = True
    """Whether the original trains as well: as the last stage, on its rows, to its last step."""
    eval: MeasurePart = MeasurePart()
    """What is measured."""

    @model_validator(mode="after")
    def _check_domains(self) -> Self:
        """Refuse plain text as responses, and text that would go by the name of another to measure on."""
        judged = EMBEDDED if self.eval.domains is None else self.eval.domains
        for domain in self.data.domains:
            if self.objective.loss == "response" and domain.columns is None:
                raise ValueError(f"domain {domain.name!r} has no columns; objective.loss is response, so it needs them")
            if domain.name in judged and not embedded_source(domain):
                raise ValueError(
                    f"domain {domain.name!r} has the name of an embedded one to measure on, and its source is "
                    f"{domain.source!r}; give that text another name"
                )
        return self

    @property
    def trains_original(self) -> bool:
        """Whether there is a trained original to compare with: it has no W_c, and nothing to learn from itself."""
        last = self.stages[-1].parameters
        return self.baseline and self.objective.loss != "distill" and last != "compensation"


def load_heal_recipe(path: str | Path, settings: Sequence[str] = ()) -> HealRecipe:
    """Read a recipe and check it; arguments and errors as `read_recipe`."""
    return read_recipe(HealRecipe, path, settings)


def embedded_source(domain: HealDomainPart) -> bool:
    """Return whether a domain is one of the embedded ones, on which models are measured too."""
    return domain.training_source() == TextSource()
