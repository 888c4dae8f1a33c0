"""The pages on recipes have every key, size and example."""

# ruff: noqa: E501  messages, each in its line

import itertools
import json
import re
import shutil
import typing
from pathlib import Path

from pydantic import BaseModel

from crosslayer.training.model_part import SIZES
from crosslayer.training.recipe import Recipe, load_recipe
from tests.verbs.train.test_recipe import parameters

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "crosslayer" / "recipes").glob("*.yaml") if not path.stem.startswith("heal-"))


def parts(part: type[BaseModel], prefix: str = "") -> list[list[str]]:
    """Return a row of the page for each key: its name, its default and its description."""
    rows = []
    for name, field in part.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner or inner[0] is not field.annotation:
            plain = field.default is None or isinstance(field.default, str | int | float | dict)
            default = f"`{json.dumps(field.default)}`" if plain else ""
            rows.append([f"`{prefix}{name}`", default, " ".join((field.description or "").split())])
        listed = "[]" if typing.get_origin(field.annotation) is list else ""
        for kind in inner:
            rows += parts(kind, f"{prefix}{name}{listed}.")
    return rows


def table(head: str) -> list[list[str]]:
    """The rows of a table of the page, by the first words of its head."""
    lines = iter((ROOT / "docs" / "reference" / "recipes.md").read_text().splitlines())
    next(line for line in lines if line.startswith(head))
    next(lines)
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_has_every_key_and_no_other():
    rows = parts(Recipe)
    assert all(description for _, _, description in rows)
    assert table("| key |") == rows, "run make tables"


def test_the_page_has_every_size():
    rows = []
    for name, shape in SIZES.items():
        layers, heads, hidden, mlp = list(shape.values())[:4]
        whole = parameters(name)
        inner = whole - 2 * 50_277 * hidden
        sizes = [f"{size:,}" for size in (layers, heads, hidden, mlp)]
        rows.append([f"`{name}`", *sizes, f"{inner / 1e6:.2f}M", f"{whole / 1e6:.2f}M"])
    assert table("| `model.size` | layers") == rows, "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_example_of_the_page_is_a_recipe(tmp_path):
    page = (ROOT / "docs" / "guides" / "train.md").read_text()
    (example,) = re.findall(r"```yaml\n(.+?)```", page, re.S)
    for path in RECIPES:
        shutil.copy(path, tmp_path)
    (tmp_path / "example.yaml").write_text(example)
    recipe = load_recipe(tmp_path / "example.yaml")
    assert recipe.train["learning_rate"] == 1e-3 and recipe.train["weight_decay"] == 0.1
    assert recipe.schedule.tokens == 2_000_000_000 and recipe.tokenizer == "EleutherAI/gpt-neox-20b"
