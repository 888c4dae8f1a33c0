"""The keys of a training recipe with their checks; docs/reference/recipes.md lists them.

Sizes 2M to 468M are those of arXiv 2410.17897, Table 4, named by their parameters with its vocabulary of 50,277:
Llama layers, untied embeddings and head, rotary base 10,000. The others suit a CPU.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from transformers import LlamaConfig
from transformers.activations import ACT2FN

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.methods import load_methods
from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import EMBEDDED
from crosslayer.output.record import Seed
from crosslayer.training.arguments import Arguments
from crosslayer.training.attention import Attention
from crosslayer.training.recipe_file import WrongKey, nearest, one_of, only_keys, read_recipe, typed_keys
from crosslayer.training.tokenizers import pair_tokens

Count = Annotated[int, Field(ge=1, lt=2**63)]
NEEDED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
)  # keys of a shape that are required without a size
ELSEWHERE = {  # keys of a config that a shape cannot set, and what to do instead
    "cross_layer": "set model.method instead",
    "vocab_size": "the tokenizer sets it",
    "bos_token_id": "the tokenizer sets it",
    "eos_token_id": "the tokenizer sets it",
    "pad_token_id": "the tokenizer sets it",
    "use_cache": "training uses no cache",
    "pretraining_tp": "it has no effect",
}
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # of a domain, and so of a folder and a metric
POSITIVE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
LOWEST = 1e-4  # share of the peak rate at which linear schedules start and end if the minimum is 0
DEEPEST = 4096  # layers; a typo must not build a model for hours
CONFIG = {**LlamaConfig.__annotations__, **CrossLayerConfig.__annotations__, "rope_parameters": dict[str, Any] | None}
SHAPE: dict[str, Any] = {
    **{key: kind for key, kind in CONFIG.items() if key not in ELSEWHERE},
    **{key: Annotated[CONFIG[key], Field(ge=1)] for key in POSITIVE},
    "num_hidden_layers": Annotated[int, Field(ge=1, le=DEEPEST)],
    "hidden_act": Annotated[str, one_of(ACT2FN)],
}
Shape = Annotated[dict[str, Any], typed_keys(SHAPE), BeforeValidator(only_keys(SHAPE, ELSEWHERE))]
SIZES: dict[str, dict[str, Any]] = {  # keys of a config, which `model.shape` can override
    name: {
        **dict(zip(NEEDED, numbers, strict=True)),
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    for name, numbers in {
        "tiny": (4, 4, 64, 176),
        "mini": (8, 4, 128, 352),
        "small": (8, 4, 256, 704),
        "2M": (4, 2, 16, 56),
        "82M": (8, 8, 512, 1792),
        "180M": (12, 12, 768, 2688),
        "468M": (24, 16, 1024, 3584),
    }.items()
}


class Part(BaseModel):
    """A section of a recipe: frozen, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        return only_keys(cls.model_fields, {})(values)


class ModelPart(Part):
    """The model: a size, a shape or both, with a method; or an existing model to continue from."""

    size: Annotated[str, one_of(SIZES)] | None = None
    """A named shape; `shape` overrides keys of it."""
    shape: Shape = {}
    """Keys of a Llama config or of `CrossLayerConfig`, such as `num_key_value_heads`; without `size` at least
    `num_hidden_layers`, `num_attention_heads`, `hidden_size` and `intermediate_size`."""
    method: str | dict[str, Any] | list[Any] | None = None
    """A method's name, `{name: NAME, option: VALUE}`, or a list of these; null is a plain Transformer."""
    start: str | None = Field(default=None, min_length=1)
    """Instead of the above: an existing model to continue training, as a folder, a hub name or an embedded model."""
    attention: Attention | None = None
    """`sdpa`, one document at a time; `flex`, with block masks on a GPU; `flash`, FlashAttention-2. Null: `sdpa`, or
    `eager` with a dense mask for models that cap attention scores."""

    @field_validator("method", mode="plain")
    @classmethod
    def _check_method(cls, method: Any) -> Any:
        if method is None:
            return None
        if not isinstance(method, str | dict | list):
            raise ValueError(
                f"must be a method's name, {{name: NAME, option: VALUE}} or a list of these, got {method!r}"
            )
        load_methods(method)
        return method

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        """Check that the model can be built, first without the method, so that the error names the right key."""
        missing = [key for key in NEEDED if key not in self.shape]
        if self.start is not None:
            if self.size or self.shape or self.method:
                raise WrongKey("start", "cannot be combined with size, shape or method; remove these")
            return self
        if self.size is None and missing:
            raise WrongKey("size", f"missing; set one of {', '.join(SIZES)}, or in shape {', '.join(NEEDED)}")
        for key, model in {"shape": self.model_copy(update={"method": None}), "method": self}.items():
            try:
                with torch.device("meta"):
                    CrossLayerForCausalLM(model.config(length=512, vocab_size=512))
            except Exception as error:  # torch and transformers raise many types
                message = f"unknown {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
                raise WrongKey(key, message[:300]) from None
        return self

    def config(self, length: int, vocab_size: int, **special: int | None) -> CrossLayerConfig:
        """Return the config of a new model for sequences of `length` tokens, or more if the shape says so.

        `special` are the tokenizer's `bos_token_id`, `eos_token_id` and `pad_token_id`.
        """
        assert self.start is None, "an existing model has its own config"
        settings: dict[str, Any] = {"max_position_embeddings": length, **SIZES.get(self.size or "", {}), **self.shape}
        settings |= {"bos_token_id": None, "eos_token_id": None, **special}
        return CrossLayerConfig(**settings, cross_layer=self.method, vocab_size=vocab_size)


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

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"must be 1 to 64 letters, digits, _, - and ., starting with a letter or digit, got {name!r}"
            )
        return name

    @model_validator(mode="after")
    def _check_embedded(self) -> Self:
        if self.source is not None:
            return self
        if self.name not in EMBEDDED:
            raise WrongKey(
                "name", f"must be an embedded domain, got {self.name!r}; {nearest(self.name, list(EMBEDDED))}"
            )
        for option in ("config", "split", "column", "where"):
            if vars(self)[option] != DomainPart.model_fields[option].default:
                raise WrongKey(option, "has no effect without source; remove it")
        return self

    def training_source(self) -> TextSource:
        """Return the source of the training text."""
        return TextSource(self.source, self.config, self.split, self.column, where=self.where)

    def validation_source(self) -> TextSource | None:
        """Return the source of the held-out text; None: it is held out of the training text."""
        source = replace(self.training_source(), name=self.validation, split="validation")
        return None if self.validation is None else source


class DataPart(Part):
    """The training data."""

    length: int = Field(default=512, ge=2, lt=2**31)
    """Tokens per sequence."""
    domains: list[DomainPart] = Field(default=[DomainPart(name=name) for name in EMBEDDED], min_length=1)
    """The domains of the mixture; by default the embedded ones."""

    @field_validator("domains")
    @classmethod
    def _check_domains(cls, domains: list[DomainPart]) -> list[DomainPart]:
        names = [domain.name for domain in domains]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"must have different names, got {name!r} twice")
        return domains


def _expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {pattern!r}: {error}") from None
    return pattern


class OptimizerPart(Part):
    """The optimizer, if not that of `train`."""

    name: Literal["muon"] | None = None
    """`muon`: torch's Muon for the matrices of linear layers except the head, AdamW for all other parameters, with the
    same learning rate. Null: `train.optim`, by default AdamW."""
    rates: dict[Annotated[str, AfterValidator(_expression)], Annotated[float, Field(gt=0)]] = {}
    """Factors of `train.learning_rate` by regular expression over parameter names; the first match counts:
    `{embed_tokens: 3, "layers[.][0-3][.]": 0.5}`."""


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
        if self.steps is not None:
            self.course(self.steps)
        return self

    def total_steps(self, step_tokens: int) -> int:
        """Return the number of steps, each of which reads `step_tokens` over all ranks."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // step_tokens)

    def course(self, steps: int, evaluate: int = 0) -> dict[str, Any]:
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
        kind, settings = "cosine_warmup_with_min_lr", {"min_lr_rate": self.minimum}
        if self.kind != "cosine":
            kind, over = "warmup_stable_decay", decay if self.kind == "wsd" else falling
            settings = {"num_decay_steps": over, "decay_type": "linear", "min_lr_ratio": self.minimum or LOWEST}
        return {
            "max_steps": steps,
            "warmup_steps": warmup,
            "lr_scheduler_type": kind,
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


class Recipe(Part):
    """A training run: model, data, schedule, arguments and evaluation."""

    name: str = Field(default="", max_length=100)
    """Name of the run in results; by default the file's name."""
    seed: Seed = 0
    """Seed of weights, data order and dropout."""
    model: ModelPart
    """The model."""
    tokenizer: str = Field(default_factory=lambda data: data["model"].start or "bytes", min_length=1)
    """`bytes`; `bpe:8192`, byte pairs with that many tokens, trained on the recipe's training text; or a model whose
    tokenizer to use. Default: `bytes`, or with `model.start` that model's tokenizer."""
    data: DataPart = DataPart()
    """The training data."""
    schedule: SchedulePart
    """The length of training, and the learning rate."""
    optimizer: OptimizerPart = OptimizerPart()
    """The optimizer."""
    train: Arguments = {}
    """Keys of transformers' `TrainingArguments`, such as `learning_rate` or `per_device_train_batch_size`."""
    save_minutes: float = Field(default=0, ge=0)
    """Maximum minutes between checkpoints, in addition to `train.save_steps`; 0: no limit."""
    eval: EvalPart = EvalPart()
    """When the validation loss is measured."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError(f"must be one line of printable characters, got {name!r}")
        return name

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, tokenizer: str) -> str:
        if tokenizer.partition(":")[0] == "bpe":
            pair_tokens(tokenizer)
        return tokenizer

    @field_validator("data")
    @classmethod
    def _check_positions(cls, data: DataPart, info: ValidationInfo) -> DataPart:
        model = info.data.get("model")
        positions = model.shape.get("max_position_embeddings") if model is not None else None
        if positions is not None and positions < data.length:
            raise WrongKey(
                "length", f"must be at most model.shape.max_position_embeddings ({positions}), got {data.length}"
            )
        return data

    @field_validator("train")
    @classmethod
    def _check_optimizer(cls, train: Arguments, info: ValidationInfo) -> Arguments:
        optimizer = info.data.get("optimizer")
        if optimizer is not None and optimizer.name is not None and "optim" in train:
            raise WrongKey("optim", f"has no effect with optimizer.name: {optimizer.name}; remove one of the two")
        return train


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check it, including that its model can be built; arguments and errors as `read_recipe`."""
    return read_recipe(Recipe, path, settings)
