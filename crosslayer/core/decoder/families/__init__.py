"""The families: a file each, which holds a `FAMILY` and is named as in a config; no other file names one."""

import functools
import importlib
import pkgutil

from crosslayer.core.decoder.family import Family, ModelType


@functools.cache
def family_names() -> tuple[str, ...]:
    """Return the families, by their files."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def load_family(name: str) -> Family:
    """Return a family.

    Raises:
        ValueError: there is none of this name.

    """
    if name not in family_names():
        raise ValueError(f"family is {name!r}; it must be one of {', '.join(map(repr, family_names()))}")
    return importlib.import_module(f"{__name__}.{name}").FAMILY


def model_types() -> dict[str, tuple[str, ModelType]]:
    """Return Hugging Face's model types that convert, by name, each with its family's name."""
    families = {name: load_family(name).model_types for name in family_names()}
    return {kind: (name, model_type) for name, types in families.items() for kind, model_type in types.items()}
