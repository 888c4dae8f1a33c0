"""The bytes that a cache holds, of any class."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crosslayer.cache.columns import Columns
from crosslayer.cache.kv_cache import SmallerKVCache
from crosslayer.wiring.kv_bits import in_16_bits

KNOWN = ("transformers", "crosslayer")  # packages whose caches are known: their states lie in layers
DEEPEST = 8  # objects within objects, in which a cache's tensors are counted


class Bytes(NamedTuple):
    """Bytes as allocated, and with numbers of more than 16 bits counted as 16, as a share of the 16-bit cache is."""

    allocated: int
    sixteen: int


def held_bytes(cache: Any) -> Bytes:
    """Return the bytes of all states that a cache holds; a storage that several tensors share counts once.

    Tensors of modules, such as a codec's weights, are not counted: they are there once, whatever the number of tokens.
    """
    known = type(cache).__module__.partition(".")[0] in KNOWN
    sizes: dict[int, Bytes] = {}
    for tensor in _states(cache) if known else _tensors(cache, set()):
        storage, count = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
        small = in_16_bits(count, tensor.element_size()) if tensor.is_floating_point() else count
        sizes[storage.data_ptr()] = Bytes(count, small)
    overhead = cache.overhead_bytes() if isinstance(cache, SmallerKVCache) else 0
    held = [size for pointer, size in sizes.items() if pointer]
    return Bytes(sum(size.allocated for size in held) + overhead, sum(size.sixteen for size in held) + overhead)


def _states(cache: Any) -> Iterator[Tensor]:
    """Yield the states of a known cache: numbers and codes, not counters."""
    for layer in cache.layers:
        for value in vars(layer).values():
            for part in value if isinstance(value, list | tuple) else [value]:
                for one in part.tensors() if isinstance(part, Columns) else [part]:
                    if isinstance(one, Tensor) and (one.is_floating_point() or one.dtype == torch.uint8):
                        yield one


def _tensors(value: Any, seen: set[int], depth: int = 0) -> Iterator[Tensor]:
    """Yield all tensors in an object, except those of modules."""
    if isinstance(value, Tensor):
        yield value
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
            yield from _tensors(one, seen, depth + 1)
