"""The families: one file each, which defines `FAMILY`; its name is the config's `family`, and no other file has it."""

import functools
import importlib
import pkgutil

from crosslayer.core.decoder.family import Family, ModelType


@functools.cache
def family_names() -> tuple[str, ...]:
    """Return the names of the families, which are those of their files."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def load_family(name: str) -> Family:
    """Return a family by its name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in family_names():
        raise ValueError(f"family must be one of {', '.join(map(repr, family_names()))}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").FAMILY


def model_types() -> dict[str, tuple[str, ModelType]]:
    """Return the Hugging Face model types that can be converted, each with its family's name."""
    families = {name: load_family(name).model_types for name in family_names()}
    return {key: (name, model_type) for name, types in families.items() for key, model_type in types.items()}
