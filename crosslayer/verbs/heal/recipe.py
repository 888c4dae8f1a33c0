"""The recipe of a recovery: text, loss, stages and measurements; docs/reference/recipes.md lists its keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import EMBEDDED
from crosslayer.corpus.files import READERS, file_kind
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.output.record import Seed
from crosslayer.training.arguments import Arguments
from crosslayer.training.recipe import Count, DataPart, DomainPart, Part, SchedulePart
from crosslayer.training.recipe_file import WrongKey, nearest, read_recipe
from crosslayer.training.texts import EVERY, Domain
from crosslayer.verbs.heal.instructions import Columns, Instructions

MAX_STAGES = 8
HOLD_OUT_EVERY = 5  # of an embedded domain every fifth piece is held out, enough to measure on


class HealDomainPart(DomainPart):
    """A domain of plain text, or of instructions with their responses."""

    columns: Columns | None = None
    """For instructions: the columns of .jsonl files, or of a dataset. Null: plain text."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns is None:
            return self
        suffix = None if self.source is None else file_kind(Path(self.source))
        if suffix is None or (suffix in READERS and suffix != ".jsonl"):
            raise WrongKey("columns", f"needs a source of .jsonl files, or a dataset, got {self.source!r}")
        for option in ("column", "where", *(("config", "split") if suffix == ".jsonl" else ())):
            if vars(self)[option] != DomainPart.model_fields[option].default:
                raise WrongKey(option, "has no effect with columns; remove it")
        return self

    def domain(self) -> Domain:
        """Return the domain with its text."""
        training, validation = self.training_source(), self.validation_source()
        if self.columns is None:
            return Domain(self.name, training, validation, HOLD_OUT_EVERY if embedded_source(self) else EVERY)
        return Instructions(self.name, training, validation, columns=self.columns)


class HealDataPart(DataPart):
    """The training text, read from its start in every stage."""

    domains: list[HealDomainPart] = Field(min_length=1)  # type: ignore[assignment]
    """The mixture, domain by domain."""


class ObjectivePart(Part):
    """The training objective."""

    loss: Literal["text", "response", "distill"] = "text"
    """`text`: the loss of all tokens. `response`: the loss of responses to instructions, with their end tokens.
    `distill`: the KL between the original's predictions and the retrofit's, at all tokens."""
    hidden: float = Field(default=0, ge=0)
    """With `distill`: the weight of the squared distance of hidden states to the original's, relative to their norm."""

    @model_validator(mode="after")
    def _check_hidden(self) -> Self:
        if self.hidden and self.loss != "distill":
            raise WrongKey("hidden", f"must be 0 unless loss is distill, got {self.hidden:g}")
        return self


class StopPart(Part):
    """Early stopping of a stage."""

    smoothing: float = Field(default=0.95, ge=0, lt=1)
    """β of the exponential moving average of the logged losses."""
    patience: Count = 50
    """The stage ends if the average has not fallen for this many logged losses."""
    least: float = Field(default=0.001, gt=0, lt=1)
    """By which share the average must fall to count."""


class LoraPart(Part):
    """LoRA adapters for every linear layer, merged at the end of the stage (arXiv 2106.09685)."""

    rank: Count = 16
    """Rank of each adapter."""
    alpha: Count = 32
    """The update is multiplied by alpha / rank."""


class StagePart(Part):
    """A training stage with its own schedule."""

    parameters: Literal["compensation", "all", "lora"]
    """What is trained: `compensation` (the linear compensation W_c only), `all`, or `lora`."""
    schedule: SchedulePart
    """Length and learning-rate schedule."""
    train: Arguments = {}
    """Keys of transformers' `TrainingArguments` for this stage, in addition to the recipe's."""
    stop: StopPart | None = None
    """Early stopping; null: none."""
    lora: LoraPart | None = None
    """Options for `parameters: lora`."""

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and self.parameters != "lora":
            raise WrongKey("lora", f"has no effect with parameters: {self.parameters}; remove it")
        return self


class MeasurePart(Part):
    """What models are measured on, before training and after each stage."""

    domains: list[str] | None = Field(default=None, min_length=1)
    """Embedded domains (docs/start/concepts.md); unseen ones are the most informative. Null, also for the next two: as
    in the retrofits' reports."""
    windows: Count | None = None
    """Windows of all domains together; at least 16 per domain."""
    length: int | None = Field(default=None, ge=2, lt=2**31)
    """Tokens per window."""
    held_out: Count = 8
    """Held-out rows of each training domain, for the loss after a stage."""
    needles: bool = True
    """Whether to test retrieval of hidden numbers, ten each in texts of 256, 512, 1,024 and 2,048 tokens."""

    @field_validator("domains")
    @classmethod
    def _check_domains(cls, domains: list[str] | None) -> list[str] | None:
        for name in domains or ():
            if name not in EMBEDDED:
                raise ValueError(f"{name!r} is not an embedded domain; {nearest(name, list(EMBEDDED))}")
        if domains is not None and len(set(domains)) < len(domains):
            raise ValueError(f"each domain must be listed once, got {domains}")
        return domains

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.domains is None or self.windows is None:
            return self
        least = MIN_WINDOWS * len(self.domains)
        if self.windows < least:
            raise WrongKey("windows", f"must be at least {least} for {len(self.domains)} domains, got {self.windows}")
        return self


class HealRecipe(Part):
    """The recipe of a recovery: text, loss, stages and measurements."""

    name: str = Field(default="", max_length=100)
    """Name of the recipe; by default the file's name."""
    seed: Seed = 0
    """Seed of data order, dropout and adapters; windows are drawn with the reports' seed."""
    objective: ObjectivePart = ObjectivePart()
    """The training objective."""
    data: HealDataPart
    """The training text."""
    train: Arguments = {}
    """Keys of transformers' `TrainingArguments`, for all stages."""
    stages: list[StagePart] = Field(min_length=1, max_length=MAX_STAGES)
    """The stages, in order."""
    baseline: bool = True
    """Whether to train the original too, with the last stage's settings and data, without early stop."""
    eval: MeasurePart = MeasurePart()
    """The measurements."""

    @model_validator(mode="after")
    def _check_domains(self) -> Self:
        """Raise for plain text with a response loss, and for training text with the name of an evaluation domain."""
        evaluated = EMBEDDED if self.eval.domains is None else self.eval.domains
        for domain in self.data.domains:
            if self.objective.loss == "response" and domain.columns is None:
                raise ValueError(f"objective.loss: response needs columns, domain {domain.name!r} has none")
            if domain.name in evaluated and not embedded_source(domain):
                raise ValueError(
                    f"domain {domain.name!r} (source {domain.source!r}) has the name of an embedded evaluation domain; "
                    "rename it"
                )
        return self

    @property
    def trains_original(self) -> bool:
        """Whether the original is trained as a reference; it cannot be if only W_c trains, or by distillation."""
        last = self.stages[-1].parameters
        return self.baseline and self.objective.loss != "distill" and last != "compensation"


def load_heal_recipe(path: str | Path, settings: Sequence[str] = ()) -> HealRecipe:
    """Read a recipe and check it; arguments and errors as `read_recipe`."""
    return read_recipe(HealRecipe, path, settings)


def embedded_source(domain: HealDomainPart) -> bool:
    """Return whether a domain is an embedded one, on which models may be measured too."""
    return domain.training_source() == TextSource()
