"""Shell output of `generate`."""

from collections.abc import Callable
from functools import partial


def write() -> Callable[[str], None]:
    """Return a function that prints each piece of text at once."""
    return partial(print, end="", flush=True)
