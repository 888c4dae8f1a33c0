"""What only a shell does for `generate`."""

from collections.abc import Callable
from functools import partial


def write() -> Callable[[str], None]:
    """Return what prints each piece of text as it comes."""
    return partial(print, end="", flush=True)
