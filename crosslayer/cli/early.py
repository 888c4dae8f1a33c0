"""Checks of typed values that need neither torch nor transformers, whose import takes seconds."""

from collections.abc import Callable, Mapping
from typing import Any

from crosslayer.models.embedded import check_known
from crosslayer.wiring.engines import parse_bytes


def check_typed(typed: Mapping[str, Any]) -> None:
    """Refuse wrong values of options by name; their verbs check all values again.

    Raises:
        ValueError: a size, a depth, or a misspelt name of an embedded model.
    """
    for name, check in CHECKS.items():
        value = typed.get(name)
        # an option that is left out is None
        if isinstance(value, str):
            check(value, "a model" if name == "model" else f"`{name}`")


def _check_depths(text: str, option: str) -> None:
    # what is no whole number is left to the verb, which names all that it takes
    for depth in text.split(","):
        if depth.strip().lstrip("-").isdigit() and not 0 <= int(depth) <= 100:
            raise ValueError(f"{option} must be 0-100, got {depth.strip()}")


CHECKS: dict[str, Callable[[str, str], Any]] = {
    "model": check_known,
    "baseline": check_known,
    "memory": parse_bytes,
    "limit": parse_bytes,
    "prompt_limit": parse_bytes,
    "depths": _check_depths,
}
