"""The command line's own part of `retrofit`: it can go on to heal the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def then(model: str, out: str, json: bool, sweep: Any, *, heal: str | None = None) -> Callable[[Any], None] | None:
    """Return a function that heals the retrofit, or None without `heal`; the recipe is checked at once.

    Args:
        model: the original model.
        out: the folder of the retrofit.
        json: whether only JSON is printed.
        sweep: as in the call.
        heal: a recipe to train the result with, as `crosslayer heal` does; saved in OUT-healed.
    """
    from crosslayer.cli import command, declared
    from crosslayer.training.recipe import given_recipe

    if heal is None:
        return None
    if sweep:
        raise ValueError("`heal` has no effect with `sweep`, which saves no model; remove one of them")
    # a wrong recipe, or a folder that exists, is told before the retrofit, which takes minutes
    given_recipe(heal, (), stages=True)
    healed = Path(out).with_name(f"{Path(out).name}-healed")
    if healed.exists():
        raise ValueError(f"the folder {healed.name!r}, for the healed model, exists; remove it or choose another `out`")
    verb = declared.read_verb("heal")
    typed = {option.name: option.default for option in verb.options}
    typed |= {"retrofits": [out], "recipe": heal, "out": str(healed), "original": model, "json": json}
    return lambda report: command.run(verb, typed)
