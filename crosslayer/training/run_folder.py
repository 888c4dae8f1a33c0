"""The folder of a run begins with `recipe.yaml`, which has every default; only the same recipe resumes in it."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from crosslayer.output.folder import write_whole
from crosslayer.training.arguments import BATCH
from crosslayer.training.checkpoints import checkpoints
from crosslayer.training.recipe import Recipe, load_recipe

RECIPE = "recipe.yaml"


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
    if not (_is_of(folder / RECIPE, recipe) and all(same)):
        what = "another recipe" if others is None else "another recipe, or other retrofits"
        raise ValueError(f"the folder {folder.name!r} belongs to {what}; `resume` needs the same")


def begin_run(folder: Path, recipe: Recipe, others: Mapping[str, str] | None = None) -> None:
    """Write the recipe and `others` into a folder; a recipe that is there with its checkpoints does not change."""
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(others or {})
    if not checkpoints(folder):
        files[RECIPE] = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    for name, text in files.items():
        write_whole(folder / name, text)


def _is_of(written: Path, recipe: Recipe) -> bool:
    try:
        existing = load_recipe(written)
    except ValueError:
        return False
    if not recipe.stages:
        batch = {key: existing.train[key] for key in BATCH if key in existing.train}
        others = {key: value for key, value in recipe.train.items() if key not in BATCH}
        recipe = recipe.model_copy(update={"train": {**others, **batch}})
    return existing == recipe
