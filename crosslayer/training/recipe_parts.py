"""The sections of a recipe with their checks: text, schedule, stages, and what is measured."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import EMBEDDED
from crosslayer.corpus.files import KINDS, file_kind
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.training.arguments import Arguments
from crosslayer.training.recipe_file import Part, WrongKey, nearest
from crosslayer.training.texts import EVERY, Columns, Domain, Instructions

Count = Annotated[int, Field(ge=1, lt=2**63)]
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # of a domain, and so of a folder and a metric
# chunks of an embedded domain for each that is held out to be measured on: a twentieth of these texts is too little
OFTEN = 5
# share of the peak rate at which linear schedules start and end if the minimum is 0: at 0 the first step does nothing
LOWEST = 1e-4


def left_out(default: Any = None) -> Any:
    """Return a field that is left out of a written recipe where it has its default."""
    return Field(default=default, exclude_if=lambda value: value == default)


class DomainPart(Part):
    """A text domain, with a share of the mixture and a validation loss of its own."""

    name: str
    """Its name in results; without `source`, one of the embedded domains that docs/start/concepts.md lists."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the tokens, relative to the weights of the other domains."""
    source: str | None = None
    """A file, a folder, a pattern such as `texts/*.jsonl.gz`, or the name of a dataset; paths are relative to the
    working directory."""
    config: str | None = None
    """Configuration of the dataset."""
    split: str = "train"
    """Split of the dataset."""
    column: str = "text"
    """Column of a table or a dataset that holds the text."""
    where: dict[str, str | int | float | bool] = Field(default={}, exclude_if=lambda where: not where)
    """Only rows with these values, by column: `{meta.redpajama_set_name: RedPajamaC4}`; a dot leads into a column that
    holds an object."""
    validation: str | None = Field(default=None, min_length=1)
    """Held-out text, in the form of `source`; of a dataset, the split `validation`. Null: every 20th document, or every
    20th chunk of long documents."""
    columns: Columns | None = left_out()
    """For instructions with responses: the columns of .jsonl files, or of a dataset. Null: plain text."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"must be 1 to 64 letters, digits, _, - and ., starting with a letter or digit, got {name!r}"
            )
        return name

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        """Refuse a name or columns without the text for them, and options that have no effect with the source."""
        if self.source is None:
            if self.name not in EMBEDDED:
                hint = nearest(self.name, list(EMBEDDED))
                raise WrongKey("name", f"must be an embedded domain, got {self.name!r}; {hint}")
            for option in ("config", "split", "column", "where"):
                if vars(self)[option] != DomainPart.model_fields[option].default:
                    raise WrongKey(option, "has no effect without source; remove it")

        if self.columns is not None:
            suffix = None if self.source is None else file_kind(Path(self.source))
            if suffix is None or (suffix in KINDS and suffix != ".jsonl"):
                raise WrongKey("columns", f"needs a source of .jsonl files, or a dataset, got {self.source!r}")
            for option in ("column", "where", *(("config", "split") if suffix == ".jsonl" else ())):
                if vars(self)[option] != DomainPart.model_fields[option].default:
                    raise WrongKey(option, "has no effect with columns; remove it")
        return self

    def text(self, held_out_often: bool = False) -> Domain:
        """Return the domain with its text; `held_out_often`: a fifth of an embedded one, enough to measure on."""
        source = TextSource(self.source, self.config, self.split, self.column, where=self.where)
        held_out = None if self.validation is None else replace(source, name=self.validation, split="validation")
        if self.columns is not None:
            return Instructions(self.name, source, held_out, columns=self.columns)
        return Domain(self.name, source, held_out, OFTEN if held_out_often and self.source is None else EVERY)


class DataPart(Part):
    """The training data."""

    length: int = Field(default=512, ge=2, lt=2**31)
    """Tokens per sequence."""
    domains: list[DomainPart] = Field(default=[DomainPart(name=name) for name in EMBEDDED], min_length=1)
    """The domains of the mixture; by default the embedded ones."""

    @field_validator("domains")
    @classmethod
    def _check_domains(cls, domains: list[DomainPart]) -> list[DomainPart]:
        # a name is a key of losses and a part of the names of files
        names = [domain.name for domain in domains]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"must have different names, got {name!r} twice")
        return domains


class SchedulePart(Part):
    """The length of training, and the learning rate: a linear warmup, then a decay of this `kind`."""

    tokens: Count | None = None
    """Training tokens, rounded up to whole steps."""
    steps: Count | None = None
    """Or optimizer steps."""
    warmup: float = Field(default=0, ge=0)
    """Warmup steps, or if below 1 their share of all steps."""
    kind: Literal["cosine", "linear", "wsd"] = "cosine"
    """How the learning rate decays after the warmup: `cosine`; `linear`; `wsd` (warmup, stable, decay): linearly over
    the last `decay` steps."""
    decay: float = Field(default=0.2, gt=0)
    """With `wsd`: decay steps, or if below 1 their share of all steps."""
    minimum: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate, as a share of `train.learning_rate`; 1 keeps it constant after the warmup."""

    @field_validator("warmup", "decay")
    @classmethod
    def _check_whole(cls, steps: float) -> float:
        if steps >= 1 and steps != int(steps):
            raise ValueError(f"must be a whole number of steps or a share below 1, got {steps}")
        return steps

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            given = "neither" if self.steps is None else "both"
            raise ValueError(f"must have either steps or tokens (the other one null), got {given}")
        if self.kind != "wsd" and self.decay != SchedulePart.model_fields["decay"].default:
            raise WrongKey("decay", f"has no effect with kind: {self.kind}; remove it, or set kind: wsd")
        # with tokens, the steps and so the check of warmup and decay wait for the batch
        if self.steps is not None:
            self.schedule_arguments(self.steps)
        return self

    def total_steps(self, step_tokens: int) -> int:
        """Return the number of steps of `step_tokens` tokens, summed over all ranks."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // step_tokens)

    def schedule_arguments(self, steps: int, evaluate: int = 0) -> dict[str, Any]:
        """Return Trainer's arguments for `steps` steps, with an evaluation every `evaluate` steps; 0: only at the end.

        A warmup starts above zero: at the rate of one step up, or for linear decays at the minimum.
        """
        warmup = int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        if warmup >= steps:
            raise WrongKey("warmup", f"must be less than the {steps} steps of the schedule, got {self.warmup:g}")
        falling = steps - warmup
        decay = max(1, int(self.decay * steps)) if self.decay < 1 else int(self.decay)
        if self.kind == "wsd" and decay > falling:
            raise WrongKey("decay", f"must be at most the {falling} steps after the warmup, got {decay}")
        if self.kind == "cosine":
            scheduler = "cosine_warmup_with_min_lr"
            settings = {"min_lr_rate": self.minimum}
        else:
            # transformers' "linear" has no minimum; a decay over all steps, without a stable phase, has one
            scheduler = "warmup_stable_decay"
            over = decay if self.kind == "wsd" else falling
            settings = {"num_decay_steps": over, "decay_type": "linear", "min_lr_ratio": self.minimum or LOWEST}
        return {
            "max_steps": steps,
            "warmup_steps": warmup,
            "lr_scheduler_type": scheduler,
            "lr_scheduler_kwargs": settings,
            "eval_steps": evaluate or steps,
        }


class EvalPart(Part):
    """When the validation loss of each domain is measured; always at the end."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only at the end."""
    windows: Count = 32
    """Held-out sequences per domain, or as many as it has."""
    snapshots: int = Field(default=0, ge=0, lt=2**31)
    """Held-out sequences on which each evaluation measures sinks, norms and gradients of every layer; 0: none."""


class StopPart(Part):
    """Early stopping of a stage."""

    smoothing: float = Field(default=0.95, ge=0, lt=1)
    """β of the exponential moving average of the logged losses."""
    patience: Count = 50
    """The stage ends if the average has not fallen for this many logged losses."""
    least: float = Field(default=0.001, gt=0, lt=1)
    """The relative fall of the average that counts."""


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


class JudgePart(Part):
    """What retrofits are measured on, before training and after each stage."""

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
        count = len(self.domains or ())
        least = MIN_WINDOWS * count
        if self.windows is not None and self.windows < least:
            raise WrongKey("windows", f"must be at least {least} for {count} domains, got {self.windows}")
        return self
