"""The bytes that a cache holds, of any class."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crosslayer.core.decoder.caches import cache_bytes
from crosslayer.core.sixteen_bits import in_16_bits
from crosslayer.eviction.cache import EvictionCache

KNOWN = ("transformers", "crosslayer")  # packages whose caches are known
DEEPEST = 8  # objects within objects, in which a cache's tensors are counted


class Bytes(NamedTuple):
    """Bytes as allocated, and with numbers of more than 16 bits counted as 16."""

    allocated: int
    sixteen: int


def held_bytes(cache: Any) -> Bytes:
    """Return the bytes of all tensors that a cache holds; a storage that several share counts once.

    A share of the 16-bit cache is then the same in every dtype. Tensors of modules, such as a codec's weights, are not
    counted: they are there once, whatever the number of tokens.
    """
    if type(cache).__module__.partition(".")[0] in KNOWN:  # their states lie in layers
        overhead = cache.overhead_bytes() if isinstance(cache, EvictionCache) else 0
        return Bytes(cache_bytes(cache) + overhead, cache_bytes(cache, sixteen=True) + overhead)
    sizes: dict[int, Bytes] = {}
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            storage, count = value.untyped_storage(), value.untyped_storage().nbytes()
            small = in_16_bits(count, value.element_size()) if value.is_floating_point() else count
            sizes[storage.data_ptr()] = Bytes(count, small)
        elif depth < DEEPEST and not isinstance(value, torch.nn.Module) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner = list(value.values())
            elif isinstance(value, list | tuple | set):
                inner = list(value)
            else:
                inner = list(getattr(value, "__dict__", {}).values())
                inner += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
            for one in inner:
                visit(one, depth + 1)

    visit(cache, 0)
    held = [size for pointer, size in sizes.items() if pointer]
    return Bytes(sum(size.allocated for size in held), sum(size.sixteen for size in held))
