"""A recipe, what a training run is, part by part, and what each part refuses; docs/reference/recipes.md lists the keys.

Sizes 2M to 468M are those of arXiv 2410.17897, Table 4, named by their parameters with its vocabulary of 50,277:
Llama's layers, embeddings and head untied, rotary base 10,000. The others suit a CPU.
"""

import re
from collections.abc import Sequence
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
from crosslayer.verbs.train.arguments import Arguments
from crosslayer.verbs.train.attention import Attention
from crosslayer.verbs.train.recipe_file import nearest, one_of, only_keys, read_recipe, typed_keys
from crosslayer.verbs.train.tokenizers import pair_tokens

Count = Annotated[int, Field(ge=1, lt=2**63)]
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")  # of a shape without a size
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
POSITIVE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
LOWEST = 1e-4  # of the highest rate, from which a warmup rises and to which a line falls, if the minimum is 0
DEEPEST = 4096  # layers; a slip of the pen shall not build them for hours
CONFIG = {**LlamaConfig.__annotations__, **CrossLayerConfig.__annotations__, "rope_parameters": dict[str, Any] | None}
SHAPE: dict[str, Any] = {
    **{key: kind for key, kind in CONFIG.items() if key not in ELSEWHERE},
    **{key: Annotated[CONFIG[key], Field(ge=1)] for key in POSITIVE},
    "num_hidden_layers": Annotated[int, Field(ge=1, le=DEEPEST)],
    "hidden_act": Annotated[str, one_of(ACT2FN)],
}
Shape = Annotated[dict[str, Any], typed_keys(SHAPE), BeforeValidator(only_keys(SHAPE, ELSEWHERE))]
SIZES: dict[str, dict[str, Any]] = {  # keys of a config, which `model.shape` may override
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
    """A part of a recipe: it does not change, and refuses keys that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        return only_keys(cls.model_fields, {})(values)


class ModelPart(Part):
    """Which model: a size, a shape or both, with a method; or one to train on."""

    size: Annotated[str, one_of(SIZES)] | None = None
    """A shape by name; `shape` may change parts of it."""
    shape: Shape = {}
    """Keys of a Llama config or of `CrossLayerConfig`, such as `num_key_value_heads`; without `size` at least
    `num_hidden_layers`, `num_attention_heads`, `hidden_size` and `intermediate_size`."""
    method: str | dict[str, Any] | list[Any] | None = None
    """A method's name, `{name: …, option: …}`, or a list of these; null is a plain Transformer."""
    start: str | None = Field(default=None, min_length=1)
    """Instead: a model to train on with its own weights and wiring, a folder, a hub name or an embedded model."""
    attention: Attention | None = None
    """`sdpa`, document by document; `flex`, by block masks, on a GPU; `flash`, FlashAttention-2. Null: `sdpa`, or where
    scores are capped `eager`, whose mask is dense."""

    @field_validator("method", mode="plain")
    @classmethod
    def _check_method(cls, method: Any) -> Any:
        if method is None:
            return None
        if not isinstance(method, str | dict | list):
            raise ValueError(f"{method!r} is no method's name, no keys and values with a name, and no list of these")
        load_methods(method)
        return method

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        """Refuse what no model can be built of: first without the method, so that the message names the right key."""
        missing = [key for key in NEEDED if key not in self.shape]
        if self.start is not None:
            if self.size or self.shape or self.method:
                raise ValueError("start trains a model as it is; leave size, shape and method out")
            return self
        if self.size is None and missing:
            raise ValueError(f"size is missing; write one of {', '.join(SIZES)}, or in shape {', '.join(NEEDED)}")
        for key, part in {"shape": self.model_copy(update={"method": None}), "method": self}.items():
            try:
                with torch.device("meta"):
                    CrossLayerForCausalLM(part.config(length=512, vocab_size=512))
            except Exception as error:  # torch and transformers raise many kinds
                words = f"{error} is not known" if isinstance(error, KeyError) else " ".join(str(error).split())
                raise ValueError(f"{key}: {words[:300]}") from None
        return self

    def config(self, length: int, vocab_size: int, **special: int | None) -> CrossLayerConfig:
        """Return the config of a new model, whose positions reach as far as `length`, unless the shape says further.

        `special` are the tokenizer's `bos_token_id`, `eos_token_id` and `pad_token_id`.
        """
        assert self.start is None, "a model to train on brings its own config"
        settings: dict[str, Any] = {"max_position_embeddings": length, **SIZES.get(self.size or "", {}), **self.shape}
        settings |= {"bos_token_id": None, "eos_token_id": None, **special}
        return CrossLayerConfig(**settings, cross_layer=self.method, vocab_size=vocab_size)


class DomainPart(Part):
    """Text of a kind, which has a share of the mixture and a validation loss of its own."""

    name: str
    """How results call it; without `source` the name of an embedded domain, as docs/reference/text.md lists them."""
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
            raise ValueError(f"{name!r} is not at most 64 letters, digits, _, - and ., a letter or digit first")
        return name

    @model_validator(mode="after")
    def _check_embedded(self) -> Self:
        if self.source is not None:
            return self
        if self.name not in EMBEDDED:
            raise ValueError(f"name is {self.name!r}, no embedded domain; {nearest(self.name, list(EMBEDDED))}")
        for option in ("config", "split", "column"):
            if vars(self)[option] != DomainPart.model_fields[option].default:
                raise ValueError(f"{option} does nothing without source, for the embedded corpus; leave it out")
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
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} stands twice; names of domains must differ")
        return domains


def _expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


class OptimizerPart(Part):
    """Which optimizer, beside what `train` says of it."""

    name: Literal["muon"] | None = None
    """`muon`: torch's Muon for the matrices of linear maps but the head, AdamW for all else, at one learning rate.
    Null: `train.optim`, by default AdamW."""
    rates: dict[Annotated[str, AfterValidator(_expression)], Annotated[float, Field(gt=0)]] = {}
    """Learning rates by regular expressions over names of parameters, as multiples of `train.learning_rate`; the first
    that is found in a name decides: `{embed_tokens: 3, "layers[.][0-3][.]": 0.5}`."""


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
            raise ValueError(f"{steps} is neither a whole number of steps nor a share below 1")
        return steps

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("steps or tokens must be given, and the other of the two be null")
        if self.kind != "wsd" and self.decay != SchedulePart.model_fields["decay"].default:
            raise ValueError(f"decay does nothing for kind: {self.kind}; leave it out, or write kind: wsd")
        if self.steps is not None:
            self.course(self.steps)
        return self

    def total_steps(self, step_tokens: int) -> int:
        """Return the number of steps, of which each reads `step_tokens` over all ranks."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // step_tokens)

    def course(self, steps: int, evaluate: int = 0) -> dict[str, Any]:
        """Return Trainer's arguments for so many steps, with an evaluation every `evaluate`; 0: only at the end.

        The first step of a warmup is not at zero: its rate is that of one step up, or the minimum, if it falls in a
        line.
        """
        warmup = int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        if warmup >= steps:
            raise ValueError(f"the schedule's warmup is {self.warmup:g} steps of {steps}; it must be fewer")
        falling = steps - warmup
        decay = max(1, int(self.decay * steps)) if self.decay < 1 else int(self.decay)
        if self.kind == "wsd" and decay > falling:
            raise ValueError(
                f"the schedule's decay is {decay} steps, and {falling} follow the warmup; it must be fewer"
            )
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
    """When the validation loss is measured, domain by domain; at the end it always is."""

    every: int = Field(default=0, ge=0)
    """Steps between; 0 measures at the end alone."""
    windows: Count = 32
    """Held-out sequences of each domain, or as many as it has."""
    snapshots: int = Field(default=0, ge=0, lt=2**31)
    """Held-out sequences over which sinks and norms of every layer are measured each time; 0: none."""
    depth_norms: bool = False
    """Whether `log.jsonl` has the norm of each layer's gradient too, before it is clipped."""


class Recipe(Part):
    """A training run: model, data, schedule, arguments and evaluation."""

    name: str = Field(default="", max_length=100)
    """How results call the run; by default the file's name."""
    seed: Seed = 0
    """Of weights, order of data, and dropout."""
    model: ModelPart
    """Which model."""
    tokenizer: str = Field(default_factory=lambda data: data["model"].start or "bytes", min_length=1)
    """`bytes`; `bpe:8192`, of so many tokens, trained on the recipe's own training text; or a model whose tokenizer is
    taken. Default: `bytes`, with `model.start` that model's."""
    data: DataPart = DataPart()
    """What is read."""
    schedule: SchedulePart
    """How long, and the learning rate on the way."""
    optimizer: OptimizerPart = OptimizerPart()
    """Which optimizer."""
    train: Arguments = {}
    """Keys of transformers' `TrainingArguments`, such as `learning_rate` or `per_device_train_batch_size`."""
    save_minutes: float = Field(default=0, ge=0)
    """Minutes after the last checkpoint when another one is due, beside those by `train.save_steps`; 0: never."""
    eval: EvalPart = EvalPart()
    """When the validation loss is measured."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError(f"{name!r} is not one line of plain characters")
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
            raise ValueError(f"length is {data.length}, more than model.shape.max_position_embeddings = {positions}")
        return data

    @field_validator("train")
    @classmethod
    def _check_optimizer(cls, train: Arguments, info: ValidationInfo) -> Arguments:
        optimizer = info.data.get("optimizer")
        if optimizer is not None and optimizer.name is not None and "optim" in train:
            raise ValueError(f"optim does nothing beside optimizer.name: {optimizer.name}; leave one of the two out")
        return train


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check it, down to whether its model can be built; arguments and errors as `read_recipe`."""
    return read_recipe(Recipe, path, settings)
