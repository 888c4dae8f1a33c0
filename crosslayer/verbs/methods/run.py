"""List the cross-layer methods, or describe one of them."""

from crosslayer.core.methods import method_class
from crosslayer.verbs.methods.catalogue import describe, method_table
from crosslayer.verbs.methods.result import Catalogue


def methods(name: str | None = None, *, layers: int | None = None) -> Catalogue:
    """List the cross-layer methods, or describe one: what flows between layers, and how much KV cache remains.

    Args:
        name: the method to describe, with options, diagram and cache; default a table of all.
        layers: number of layers in the example, 2 to 10,000; default 32 for the table, 8 for one method.

    Raises:
        ValueError: the method does not exist, or `layers` is out of range.
    """
    if layers is not None and not 2 <= layers <= 10_000:
        raise ValueError(f"`layers` must be 2 to 10,000, got {layers}")
    if name is None:
        return Catalogue(method_table(layers or 32), layers or 32)
    cls = method_class(name)
    share = f"{cls.example(layers or 8).plan(layers or 8).cached_fraction():.2%}"
    return Catalogue([{"method": cls.name(), "cache": share}], layers or 8, describe(cls, layers or 8))
