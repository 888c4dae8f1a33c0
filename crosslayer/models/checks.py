"""Checks of configs, without any import that takes time."""

from typing import Any

MOST_LAYERS = 4096


def check_layers(count: Any) -> None:
    """Refuse a number of layers that no model has; None, which says nothing, is let through."""
    if count is not None and not (isinstance(count, int) and 1 <= count <= MOST_LAYERS):
        raise ValueError(f"num_hidden_layers is {count}; it must be a whole number from 1 to {MOST_LAYERS}")
