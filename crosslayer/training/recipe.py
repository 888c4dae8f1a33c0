"""A recipe with its checks; docs/reference/recipes.md lists the keys.

A recipe with a `schedule` trains its model, with `crosslayer train`. One with `stages` trains retrofits of an original,
with `crosslayer heal`, and a judge measures them after each stage. The folder of a run begins with `recipe.yaml`, which
has every default; only the same recipe resumes in it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from crosslayer.corpus.domains import EMBEDDED
from crosslayer.output.folder import write_whole
from crosslayer.output.record import Seed
from crosslayer.training.arguments import BATCH, Arguments
from crosslayer.training.checkpoints import checkpoints
from crosslayer.training.model_part import ModelPart
from crosslayer.training.recipe_file import EXAMPLES, Part, WrongKey, error_message, read_values
from crosslayer.training.recipe_parts import (
    DataPart,
    EvalPart,
    JudgePart,
    SchedulePart,
    StagePart,
    left_out,
)
from crosslayer.training.tokenizers import pair_tokens

RECIPE = "recipe.yaml"  # in the folder of a run
MAX_STAGES = 8
WITH_STAGES = {  # keys that a recipe with stages cannot set, and why
    "model": "with stages: the retrofits are trained",
    "tokenizer": "with stages: it is the original's",
    "schedule": "with stages: each has its own",
    "eval": "with stages: its keys are judge.windows and judge.held_out",
}
WITHOUT_STAGES = dict.fromkeys(("judge", "baseline"), "without stages, in which `crosslayer heal` trains")


class Recipe(Part):
    """A training run: model, data, objective, schedule or stages, arguments and evaluation."""

    name: str = Field(default="", max_length=100)
    """Name of the run in results; by default the file's name."""
    seed: Seed = 0
    """Seed of weights, data order, dropout and adapters."""
    model: ModelPart | None = left_out()
    """The model; with `stages` the retrofits are trained instead."""
    tokenizer: str | None = Field(
        default_factory=lambda data: data["model"] and (data["model"].start or "bytes"),
        min_length=1,
        exclude_if=lambda name: name is None,
    )
    """`bytes`; `bpe:8192`, byte pairs with that many tokens, trained on the recipe's training text; or a model whose
    tokenizer to use. Default: `bytes`, or with `model.start` or `stages` the tokenizer of the model."""
    data: DataPart = DataPart()
    """The training data."""
    objective: Literal["next-token", "response", "distill"] = left_out("next-token")
    """`next-token`: the loss of all tokens. `response`: the loss of responses to instructions, with their end tokens.
    `distill`, with `stages`: the KL between the original's predictions and the retrofit's, at all tokens."""
    schedule: SchedulePart | None = left_out()
    """The length of training, and the learning rate."""
    stages: list[StagePart] = Field(default=[], max_length=MAX_STAGES, exclude_if=lambda stages: not stages)
    """Instead of `model` and `schedule`: stages, in order, in which `crosslayer heal` trains retrofits."""
    train: Arguments = {}
    """Keys of transformers' `TrainingArguments`, such as `learning_rate` or `per_device_train_batch_size`."""
    eval: EvalPart = EvalPart()
    """When the validation loss is measured."""
    baseline: bool = left_out(True)
    """With `stages`: whether to train the original too, with the last stage's settings and data, without early stop."""
    judge: JudgePart = left_out(JudgePart())
    """With `stages`: what is measured before training and after each stage."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError(f"must be one line of printable characters, got {name!r}")
        return name

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, tokenizer: str | None) -> str | None:
        if tokenizer is not None and tokenizer.partition(":")[0] == "bpe":
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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse keys that contradict others, or have no effect with or without stages, and name missing ones."""
        if self.objective == "distill" and not self.stages:
            raise WrongKey("objective", "distill needs stages, in which `crosslayer heal` trains towards the original")
        for domain in self.data.domains:
            if self.objective == "response" and domain.columns is None:
                raise WrongKey("objective", f"response needs columns, but domain {domain.name!r} has none")

        # a key without effect is refused: whoever sets it believes in a run that does not take place
        if self.model is None and self.schedule is None and not self.stages:
            raise ValueError("must have a model and a schedule (crosslayer train), or stages (crosslayer heal)")
        for key in () if self.stages else ("model", "schedule"):
            if vars(self)[key] is None:
                raise WrongKey(key, f"missing; for example {key}: {EXAMPLES[key]}")
        for key, reason in (WITH_STAGES if self.stages else WITHOUT_STAGES).items():
            if vars(self)[key] not in (None, Recipe.model_fields[key].default):
                raise WrongKey(key, f"has no effect {reason}; remove it")

        # the judge would report a domain that was trained on under the name of one that was not
        judged = EMBEDDED if self.judge.domains is None else self.judge.domains
        for domain in self.data.domains if self.stages else ():
            if domain.name in judged and domain.source is not None:
                raise ValueError(
                    f"domain {domain.name!r} (source {domain.source!r}) has the name of an embedded evaluation domain; "
                    "rename it"
                )
        return self

    @property
    def parts(self) -> tuple[StagePart, ...]:
        """The stages; of a recipe without, a single one that trains all parameters."""
        if self.schedule is None:
            return tuple(self.stages)
        return (StagePart(parameters="all", schedule=self.schedule),)

    @property
    def trains_original(self) -> bool:
        """Whether the original is trained as a reference; it cannot be if only W_c trains, or by distillation."""
        last = self.stages[-1].parameters
        return self.baseline and self.objective != "distill" and last != "compensation"


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check it, including that its model can be built; no data file is opened.

    `path` is a file or the name of a shipped recipe, such as "smoke", as is the value of the key `extends`. Mappings
    merge key by key, and the extending file wins; lists, methods and other values are replaced. `settings`, such as
    "train.learning_rate=3e-4", override single keys. A name is not inherited; the default is the file's stem.

    Raises:
        ValueError: the recipe is wrong; one line "key: must be X, got Y (file)".
    """
    values = read_values(path, settings)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{error_message(error, values)} ({path})") from None


def given_recipe(recipe: Recipe | str | Path, settings: Sequence[str], stages: bool) -> Recipe:
    """Return the recipe of a verb, loaded or by its file, which must have stages, or must not."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, settings)
    elif settings:
        raise ValueError("`settings` needs a recipe file, got a loaded recipe; pass the settings to load_recipe")
    if bool(recipe.stages) != stages:
        problem = "missing; train the recipe" if stages else "must be empty; train in stages"
        raise ValueError(f"stages: {problem} with `crosslayer {'train' if stages else 'heal'}`")
    return recipe


def check_run(folder: Path, recipe: Recipe, resume: bool, others: Mapping[str, str] | None = None) -> None:
    """Refuse a folder with files, unless it is resumed and holds this recipe, and `others` (text by file name).

    The batch size of a recipe with a schedule may differ: it is compared with that of the checkpoint.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`out` must be a folder, got the file {folder.name!r}")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not resume:
        raise ValueError(f"the folder {folder.name!r} exists; use another name, or `resume` to continue its run")
    same = [
        (folder / name).is_file() and (folder / name).read_text(encoding="utf-8") == text
        for name, text in (others or {}).items()
    ]
    try:
        written = load_recipe(folder / RECIPE)
    except ValueError:
        written = None
    if written is not None and not recipe.stages:
        # another number of processes needs another batch for the same rows, which `Resumed.read` checks
        batch = {key: written.train[key] for key in BATCH if key in written.train}
        rest = {key: value for key, value in recipe.train.items() if key not in BATCH}
        recipe = recipe.model_copy(update={"train": {**rest, **batch}})
    if written != recipe or not all(same):
        what = "another recipe" if others is None else "another recipe, or other retrofits"
        raise ValueError(f"the folder {folder.name!r} belongs to {what}; `resume` needs the same")


def begin_run(folder: Path, recipe: Recipe, others: Mapping[str, str] | None = None) -> None:
    """Write the recipe and `others` into a folder; a recipe that is there with its checkpoints does not change."""
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(others or {})
    # with checkpoints, the recipe says how they were trained; that of a resumed run may have another batch size
    if not checkpoints(folder):
        files[RECIPE] = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    for name, text in files.items():
        write_whole(folder / name, text)
