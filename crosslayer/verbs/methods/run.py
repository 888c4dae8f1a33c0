"""The cross-layer methods, all or one of them."""

from crosslayer.core.methods import method_class
from crosslayer.verbs.methods.catalogue import describe, method_table
from crosslayer.verbs.methods.result import Catalogue


def methods(name: str | None = None, *, layers: int | None = None) -> Catalogue:
    """List the cross-layer methods, or describe a method: what flows between layers and what the KV cache keeps.

    Args:
        name: a method, to see its options, diagram and cache; default all.
        layers: layers for which the cache is counted, 2 to 10,000; default 32, of a diagram 8.

    Raises:
        ValueError: there is no such method, or too few or many layers.

    """
    if layers is not None and not 2 <= layers <= 10_000:
        raise ValueError(f"`layers` is {layers}; it must be 2 to 10,000")
    if name is None:
        return Catalogue(method_table(layers or 32), layers or 32)
    cls = method_class(name)
    share = f"{cls.example(layers or 8).plan(layers or 8).cached_fraction():.2%}"
    return Catalogue([{"method": cls.name(), "cache": share}], layers or 8, describe(cls, layers or 8))
