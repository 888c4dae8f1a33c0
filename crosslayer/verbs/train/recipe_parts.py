"""The parts of a recipe, and what each refuses; docs/TRAIN.md lists their keys."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from transformers import LlamaConfig
from transformers.activations import ACT2FN

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.methods import load_methods
from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import EMBEDDED
from crosslayer.verbs.train.arguments import Schedule
from crosslayer.verbs.train.attention import Attention
from crosslayer.verbs.train.recipe_arguments import Misplaced, read_value
from crosslayer.verbs.train.recipe_file import nearest
from crosslayer.verbs.train.sizes import SIZES

Count = Annotated[int, Field(ge=1, lt=2**63)]
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")  # of a shape without a size
POSITIVE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
DEEPEST = 4096  # layers; a slip of the pen shall not build them for hours
ELSEWHERE = {  # keys of a config that a shape does not set, and why
    "cross_layer": "write model.method",
    "vocab_size": "the tokenizer decides it",
    "bos_token_id": "the tokenizer decides it",
    "eos_token_id": "the tokenizer decides it",
    "pad_token_id": "the tokenizer decides it",
    "use_cache": "training keeps no cache",
    "pretraining_tp": "it does nothing",
}
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # a domain's, also for a folder and a metric


class Part(BaseModel):
    """A part of a recipe: it does not change, and refuses keys that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                raise Misplaced(f"is not known; {nearest(str(key), list(cls.model_fields))}", key)
        return values


class ModelPart(Part):
    """Which model: a size, a shape or both, with a method; or one to train on."""

    size: str | None = None
    """A shape by name; `shape` may change parts of it."""
    shape: dict[str, Any] = {}
    """Keys of a Llama config or of `CrossLayerConfig`, such as `num_key_value_heads`; without `size` at least
    `num_hidden_layers`, `num_attention_heads`, `hidden_size` and `intermediate_size`."""
    method: str | dict[str, Any] | list[Any] | None = None
    """A method's name, `{name: …, option: …}`, or a list of these; null is a plain Transformer."""
    start: str | None = Field(default=None, min_length=1)
    """Instead: a model to train on with its own weights and wiring, a folder, a hub name or an embedded model."""
    attention: Attention | None = None
    """`sdpa`, document by document; `flex`, by block masks, on a GPU; `flash`, FlashAttention-2. Null: `sdpa`, or where
    scores are capped `eager`, whose mask is dense."""

    @field_validator("size")
    @classmethod
    def _check_size(cls, size: str | None) -> str | None:
        if size is not None and size not in SIZES:
            raise ValueError(f"is {size!r}; {nearest(size, list(SIZES))}")
        return size

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, shape: dict[str, Any]) -> dict[str, Any]:
        kinds = {**LlamaConfig.__annotations__, **CrossLayerConfig.__annotations__}
        read = {}
        for key, value in shape.items():
            if key in ELSEWHERE:
                raise Misplaced(f"is not set here: {ELSEWHERE[key]}", key)
            if key not in kinds:
                raise Misplaced(f"is not known; {nearest(key, [k for k in kinds if k not in ELSEWHERE])}", key)
            read[key] = read_value(value, kinds[key], key)
            if key in POSITIVE and value is not None and value < 1:
                raise Misplaced(f"is {value}; it must be at least 1", key)
            if key == "num_hidden_layers" and read[key] > DEEPEST:
                raise Misplaced(f"is {value}; it must be at most {DEEPEST}", key)
            if key == "hidden_act" and value not in ACT2FN:
                raise Misplaced(f"is {value!r}; {nearest(str(value), list(ACT2FN))}", key)
        return read

    @field_validator("method", mode="plain")
    @classmethod
    def _check_method(cls, method: Any) -> Any:
        if method is None:
            return None
        if not isinstance(method, str | dict | list):
            raise ValueError(
                f"is {method!r}; it must be a method's name, keys and values with a name, or a list of these"
            )
        try:
            load_methods(method)
        except ValueError as error:
            raise ValueError(f": {error}") from None
        return method

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        missing = [key for key in NEEDED if key not in self.shape]
        if self.start is None and self.size is None and missing:
            raise Misplaced(
                f"is missing; write one of {', '.join(SIZES)}, or all of {', '.join(NEEDED)} in model.shape", "size"
            )
        if self.start is not None and (self.size or self.shape or self.method):
            raise Misplaced("trains a model as it is; leave model.size, model.shape and model.method out", "start")
        return self


class DomainPart(Part):
    """Text of a kind, which has a share of the mixture and a validation loss of its own."""

    name: str
    """How results call it; without `source` the name of an embedded domain, as docs/TEXT.md lists them."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the tokens, beside the other domains' weights."""
    source: str | None = None
    """A file, a folder, a pattern such as `texts/*.jsonl.gz`, or the name of a dataset; paths start where you are."""
    config: str | None = None
    """Configuration of a dataset."""
    split: str = "train"
    """Split of a dataset."""
    column: str = "text"
    """Where a table or a dataset has its text."""
    validation: str | None = Field(default=None, min_length=1)
    """Held-out text, named as in `source`; of a dataset, its split `validation` is read. Null: every 20th document, of
    long ones every 20th piece."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(f"is {name!r}; it must be at most 64 letters, digits, _, - and ., a letter or digit first")
        return name

    @model_validator(mode="after")
    def _check_embedded(self) -> Self:
        if self.source is not None:
            return self
        if self.name not in EMBEDDED:
            raise Misplaced(f"is {self.name!r}, no embedded domain; {nearest(self.name, list(EMBEDDED))}", "name")
        for option in ("config", "split", "column"):
            if vars(self)[option] != DomainPart.model_fields[option].default:
                raise Misplaced("does nothing without source, for the embedded corpus; leave it out", option)
        return self

    def training_source(self) -> TextSource:
        """Return where the text to train on comes from."""
        return TextSource(self.source, self.config, self.split, self.column)

    def validation_source(self) -> TextSource | None:
        """Return where the held-out text comes from; None: it is held out of the text to train on."""
        return None if self.validation is None else TextSource(self.validation, self.config, "validation", self.column)


class DataPart(Part):
    """What is read."""

    length: int = Field(default=512, ge=2, lt=2**31)
    """Tokens of a sequence."""
    domains: list[DomainPart] = Field(default=[DomainPart(name=name) for name in EMBEDDED], min_length=1)
    """The mixture, domain by domain; the embedded ones by default."""

    @field_validator("domains")
    @classmethod
    def _check_domains(cls, domains: list[DomainPart]) -> list[DomainPart]:
        names = [domain.name for domain in domains]
        for place, domain in enumerate(domains):
            if domain.name in names[:place]:
                raise Misplaced(f"is {domain.name!r} a second time; names of domains must differ", place, "name")
        return domains


class OptimizerPart(Part):
    """Which optimizer, beside what `train` says of it."""

    name: Literal["muon"] | None = None
    """`muon`: torch's Muon for the matrices of linear maps but the head, AdamW for all else, at one learning rate.
    Null: `train.optim`, by default AdamW."""
    rates: dict[str, float] = {}
    """Learning rates by regular expressions over names of parameters, as multiples of `train.learning_rate`; the first
    that is found in a name decides: `{embed_tokens: 3, "layers[.][0-3][.]": 0.5}`."""

    @field_validator("rates")
    @classmethod
    def _check_rates(cls, rates: dict[str, float]) -> dict[str, float]:
        for pattern, factor in rates.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise Misplaced(f"is no regular expression: {error}", pattern) from None
            if not factor > 0:
                raise Misplaced(f"is {factor:g}; it must be above 0", pattern)
        return rates


class SchedulePart(Part):
    """How long, and the learning rate on the way: a linear warmup, then down by `kind`."""

    tokens: Count | None = None
    """Tokens to train on, rounded up to whole steps."""
    steps: Count | None = None
    """Or the number of steps of the optimizer."""
    warmup: float = Field(default=0, ge=0)
    """Steps of warmup, or below 1 their share of all steps."""
    kind: Literal["cosine", "linear", "wsd"] = "cosine"
    """How the learning rate falls after the warmup: along a cosine; in a line; `wsd` (warmup, stable, decay): in a line
    over the last `decay` steps."""
    decay: float = Field(default=0.2, gt=0)
    """Of `wsd`: steps of the decay, or below 1 their share of all steps."""
    minimum: float = Field(default=0.1, ge=0, le=1)
    """Where the learning rate ends, as a share of `train.learning_rate`; 1 keeps it constant after the warmup."""

    @field_validator("warmup", "decay")
    @classmethod
    def _check_whole(cls, steps: float) -> float:
        if steps >= 1 and steps != int(steps):
            raise ValueError(f"is {steps}; it must be a whole number of steps, or a share below 1")
        return steps

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.steps is None and self.tokens is None:
            raise Misplaced("is missing; write schedule.steps or schedule.tokens", "steps")
        if self.steps is not None and self.tokens is not None:
            raise Misplaced(f"is {self.tokens} beside steps = {self.steps}; write null for one of the two", "tokens")
        if self.kind != "wsd" and self.decay != SchedulePart.model_fields["decay"].default:
            raise Misplaced(f"does nothing for kind: {self.kind}; leave it out, or write kind: wsd", "decay")
        if self.steps is not None and self.warmup >= max(1, self.steps):
            raise Misplaced(f"is {self.warmup:g} steps of {self.steps}; it must be fewer", "warmup")
        return self

    def total_steps(self, step_tokens: int) -> int:
        """Return the number of steps, of which each reads `step_tokens` over all ranks."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // step_tokens)

    def warmup_steps(self, steps: int) -> int:
        """Return how many of all steps are warmup.

        Raises:
            ValueError: they are as many as all.

        """
        warmup = int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        if warmup >= steps:
            raise ValueError(f"schedule.warmup is {self.warmup:g} steps of {steps}; it must be fewer")
        return warmup

    def decay_steps(self, steps: int) -> int:
        """Return over how many of all steps the learning rate falls.

        Raises:
            ValueError: warmup and decay are more than all.

        """
        falling = steps - self.warmup_steps(steps)
        if self.kind != "wsd":
            return falling
        decay = max(1, int(self.decay * steps)) if self.decay < 1 else int(self.decay)
        if decay > falling:
            raise ValueError(f"schedule.decay is {decay} steps, and {falling} follow the warmup; it must be fewer")
        return decay

    def course(self, steps: int, evaluate: int = 0) -> Schedule:
        """Return steps and learning rate of a run of so many steps; errors as `decay_steps`."""
        return Schedule(
            steps, self.warmup_steps(steps), self.minimum, evaluate, self.decay_steps(steps), self.kind == "cosine"
        )


class EvalPart(Part):
    """When the validation loss is measured, domain by domain; at the end it always is."""

    every: int = Field(default=0, ge=0)
    """Steps between; 0 measures at the end alone."""
    windows: Count = 32
    """Held-out sequences of each domain, or as many as it has."""
    looks: int = Field(default=0, ge=0, lt=2**31)
    """Held-out sequences over which sinks and norms of every layer are measured each time; 0: none."""
    depth_norms: bool = False
    """Whether `log.jsonl` has the norm of each layer's gradient too, before it is clipped."""
