"""The command line's own part of `retrofit`: it writes a shim, and can go on to heal the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def saver(out: str, force: bool, sweep: list[str] | None, *, remote_code_shim: bool = False) -> Callable[[Any], Path]:
    """Return a function that saves the model and its report.

    Args:
        out: the folder.
        force: replace it if it exists.
        sweep: as in the call.
        remote_code_shim: add an auto_map file, for programs that load models with `trust_remote_code`.
    """
    from crosslayer.output.progress import say

    if sweep and remote_code_shim:
        raise ValueError("`remote_code_shim` has no effect with `sweep`, which saves no model; remove one of them")

    def save(report: Any) -> Path:
        if remote_code_shim and not report.takes_shim:
            say(f"no shim is written: a stock {report.architecture.retrofit_class} loads without crosslayer")
        return report.save(out, force, remote_code_shim and report.takes_shim)

    return save


def then(model: str, out: str, json: bool, sweep: Any, *, heal: str | None = None) -> Callable[[Any], None] | None:
    """Return a function that heals the retrofit, or None without `heal`; the recipe is checked at once.

    Args:
        model: the original model.
        out: the folder of the retrofit.
        json: whether only JSON is printed.
        sweep: as in the call.
        heal: a recipe to then train the model with, as `crosslayer heal` does; saved in OUT-healed.
    """
    from crosslayer.cli import command, declared
    from crosslayer.training.recipe import given_recipe

    if heal is None:
        return None
    if sweep:
        raise ValueError("`heal` has no effect with `sweep`, which saves no model; remove one of them")
    given_recipe(heal, (), stages=True)
    healed = Path(out).with_name(f"{Path(out).name}-healed")
    if healed.exists():
        raise ValueError(f"the folder {healed.name!r}, for the healed model, exists; remove it or choose another `out`")
    verb = declared.read_verb("heal")
    typed = {option.name: option.default for option in verb.options}
    typed |= {"retrofits": [out], "recipe": heal, "out": str(healed), "original": model, "json": json}
    return lambda report: command.run(verb, typed)
