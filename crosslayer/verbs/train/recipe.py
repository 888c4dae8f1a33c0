"""A recipe: what a training run is, as a file says it."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from crosslayer.output.record import Seed
from crosslayer.verbs.train.recipe_arguments import Arguments
from crosslayer.verbs.train.recipe_file import read_recipe
from crosslayer.verbs.train.recipe_parts import DataPart, EvalPart, ModelPart, OptimizerPart, Part, SchedulePart
from crosslayer.verbs.train.tokenizers import pair_tokens


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
