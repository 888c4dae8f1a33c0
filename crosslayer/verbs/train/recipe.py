"""A recipe: what a training run is, as a file says it."""

import re
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.output.record import Seed
from crosslayer.verbs.train.recipe_arguments import Misplaced, read_arguments
from crosslayer.verbs.train.recipe_file import Draft, Keys, dotted, read_draft
from crosslayer.verbs.train.recipe_parts import DataPart, EvalPart, ModelPart, OptimizerPart, Part, SchedulePart
from crosslayer.verbs.train.sizes import SIZES

SIZE, LEAST = re.compile("[0-9]{1,9}"), 259  # of a vocabulary: 256 bytes, two special tokens, and a pair
PHRASES = {  # pydantic's words → ours
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    r"a valid dictionary.*": "keys and values",
}


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
    train: dict[str, Any] = {}
    """Keys of transformers' `TrainingArguments`, such as `learning_rate` or `per_device_train_batch_size`."""
    save_minutes: float = Field(default=0, ge=0)
    """Minutes after the last checkpoint when another one is due, beside those by `train.save_steps`; 0: never."""
    eval: EvalPart = EvalPart()
    """When the validation loss is measured."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError(f"is {name!r}; it must be one line")
        return name

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, tokenizer: str) -> str:
        kind, colon, size = tokenizer.partition(":")
        if kind == "bpe" and not (colon and SIZE.fullmatch(size) and int(size) >= LEAST):
            raise ValueError(f"is {tokenizer!r}; it must be bpe: and a number of tokens from {LEAST} on: bpe:8192")
        return tokenizer

    @field_validator("data")
    @classmethod
    def _check_positions(cls, data: DataPart, info: ValidationInfo) -> DataPart:
        model = info.data.get("model")
        positions = model.shape.get("max_position_embeddings") if model is not None else None
        if positions is not None and positions < data.length:
            raise Misplaced(f"is {data.length}, more than model.shape.max_position_embeddings = {positions}", "length")
        return data

    @field_validator("train")
    @classmethod
    def _check_train(cls, train: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        optimizer = info.data.get("optimizer")
        if optimizer is not None and optimizer.name is not None and "optim" in train:
            raise Misplaced(f"does nothing beside optimizer.name: {optimizer.name}; leave one of the two out", "optim")
        return read_arguments(train)


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check it, down to whether its model can be built; no file of data is opened.

    Args:
        path: of a YAML file.
        settings: values that replace the file's, such as "train.learning_rate=3e-4".

    Raises:
        ValueError: in one line the file, the key, what is wrong with it, and what would be right.

    """
    draft = read_draft(Path(path), settings)
    values = {"name": Path(path).stem, "model": {}, "schedule": {}, **draft.values}
    return checked(Recipe, values, draft, _check_model)


AnyPart = TypeVar("AnyPart", bound=Part)


def checked(
    kind: type[AnyPart], values: dict[str, Any], draft: Draft, check: Callable[[AnyPart], None] | None = None
) -> AnyPart:
    """Build a recipe of a kind out of values that a draft holds.

    Args:
        kind: `Recipe`, or what another verb reads.
        values: the draft's, with what need not be written.
        draft: knows who wrote what.
        check: of the whole; it raises `Misplaced`.

    Raises:
        ValueError: in one line the file, the key, what is wrong with it, and what would be right.

    """
    try:
        recipe = kind.model_validate(values)
        if check is not None:
            check(recipe)
    except ValidationError as error:
        raise ValueError(_line(error, draft)) from None
    except Misplaced as error:
        raise ValueError(_placed(draft, error.keys, str(error))) from None
    return recipe


def config_of_recipe(
    recipe: Recipe,
    vocab_size: int,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> CrossLayerConfig:
    """Return the config of a recipe's new model, for a tokenizer of so many tokens with these special ones.

    Its positions reach as far as a sequence is long, unless the shape says further.
    """
    part = recipe.model
    assert part.start is None, "a model to train on brings its own config"
    return CrossLayerConfig(
        **{"max_position_embeddings": recipe.data.length, **SIZES.get(part.size or "", {}), **part.shape},
        cross_layer=part.method,
        vocab_size=vocab_size,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def _check_model(recipe: Recipe) -> None:
    """Refuse what no model can be built of: first without the method, so that the message names the right key."""
    if recipe.model.start is not None:
        return
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"method": None})})
    for key, tried in {"shape": plain, "method": recipe}.items():
        try:
            with torch.device("meta"):
                CrossLayerForCausalLM(config_of_recipe(tried, 512))
        except Exception as error:  # torch and transformers raise many kinds
            said = " ".join(str(error).split())
            reason = re.sub(r"^Validation error for field '(\w+)': \w+Error: ", r"\1: ", said)
            words = f"{reason} is not known" if isinstance(error, KeyError) else reason
            raise Misplaced(f": {words[:300]}", "model", key) from None


def _line(error: ValidationError, draft: Draft) -> str:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    keys = (*first["loc"], *(cause.keys if isinstance(cause, Misplaced) else ()))
    if isinstance(cause, ValueError):
        return _placed(draft, keys, str(cause))
    if first["type"] == "missing":
        return _placed(draft, keys, "is missing")
    words = re.sub(r"^\w+ should", "it must", first["msg"]).partition(" after validation")[0]
    for pattern, meaning in PHRASES.items():
        words = re.sub(pattern, meaning, words)
    value = "null" if first["input"] is None else reprlib.repr(first["input"])
    return _placed(draft, keys, f"is {value}; {words}")


def _placed(draft: Draft, keys: Keys, message: str) -> str:
    return f"{draft.origin(keys)}: {dotted(keys)}{'' if message.startswith(':') else ' '}{message}"
