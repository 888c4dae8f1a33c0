"""Values of a config's fields."""

from typing import Any


def field(config: Any, *names: str, default: Any = None) -> Any:
    """Return the value of the first of the fields `names` that is set in a config, otherwise `default`."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def int_field(config: Any, layer: int, *names: str, least: int = 1, default: Any = None) -> Any:
    """Return the first of the fields `names` that is set in a layer's config, as a whole number.

    Raises:
        ValueError: the value is not a whole number, or is below `least`.
    """
    name = next((name for name in names if field(config, name) is not None), None)
    if name is None:
        return default
    value = field(config, name)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"layer {layer}: {name} must be a whole number of at least {least}, got {value}")
    return value
