"""A transformers cache that quantizes tokens, evicts them, or both; and the bytes that a cache of any class holds."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from crosslayer.cache.columns import ColumnLayer, Columns
from crosslayer.cache.eviction import Eviction
from crosslayer.cache.offsets import KeyOffset
from crosslayer.cache.policies import policy
from crosslayer.cache.quantized import Quantized, Reading
from crosslayer.cache.state import GroupState
from crosslayer.wiring.kv_bits import in_16_bits

KNOWN = ("transformers", "crosslayer")  # packages whose caches are known: their states lie in layers
DEEPEST = 8  # objects within objects, in which a cache's tensors are counted


class SmallerKVCache(Cache):
    """The cache of a model that runs under `smaller_cache`, or by itself that of `quantized_cache`.

    Args:
        config: of the model.
        kinds: the types of its layers' keys and values; None: as they are.
        recent: how many of the latest tokens stay exact below 8 bits.
        offsets: of the layers' keys.
        eviction: which tokens are evicted; None: none are.
        groups: the layers that share keys or values, which evict the same tokens.
        way: what says how the cache is smaller; a use of `smaller_cache` takes caches of its own way alone. None: keys
            and values come back without rotation, as an ordinary model reads them.

    Raises:
        ValueError: a layer to be quantized caches other states than keys and values of all tokens.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        kinds: Sequence[str | None],
        recent: int,
        offsets: Mapping[int, KeyOffset],
        eviction: Eviction | None = None,
        groups: Sequence[Sequence[int]] = (),
        way: tuple | None = None,
    ):
        self.reading = Reading(recent, kept=recent - 1)
        self.way = way
        self.eviction = eviction
        self.groups: list[GroupState] = []  # what is known of the cached tokens
        layers = DynamicCache(config=config).layers
        for index, layer in enumerate(layers):
            kind = kinds[index]
            if kind is not None and type(layer) is not DynamicLayer:
                raise ValueError(f"layer {index} caches more than keys and values, which cannot be quantized")
            if kind is not None:
                values = partial(Quantized, kind, self.reading, way is not None)
                layers[index] = ColumnLayer(partial(values, offsets.get(index)), values)
            elif eviction is not None and type(layer) is DynamicLayer:
                layers[index] = ColumnLayer()
        if eviction is not None:
            self.groups = [GroupState(policy(eviction.policy), eviction.at(group[0])) for group in groups]
        super().__init__(layers=layers)

    def reset(self) -> None:
        """Empty the cache."""
        super().reset()
        for group in self.groups:
            group.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows of the batch, for beam search."""
        super().reorder_cache(beam_idx)
        for group in self.groups:
            group.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows of the batch, in this order; a row may occur several times."""
        super().batch_select_indices(indices)
        for group in self.groups:
            group.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        super().batch_repeat_interleave(repeats)
        for group in self.groups:
            group.select(torch.arange(len(group.seen)).repeat_interleave(repeats))

    def quantized_tokens(self) -> int:
        """Return how many columns are quantized, in the layer with most; below 8 bits, short texts have none."""
        parts = [part for layer in self.layers if isinstance(layer, ColumnLayer) for part in layer.columns]
        coded = [part for part in parts if isinstance(part, Quantized)]
        # a first token that is exact has a code, which is not read
        return max((max(0, part.used - int(part.keeps_recent)) for part in coded), default=0)

    def overhead_bytes(self) -> int:
        """Return the bytes of positions and attention sums, stored in addition to keys and values."""
        tensors = [tensor for group in self.groups for tensor in (group.positions, group.attention)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Bytes(NamedTuple):
    """Bytes as allocated, and with numbers of more than 16 bits counted as 16, as a share of the 16-bit cache is."""

    allocated: int
    sixteen: int


def held_bytes(cache: Any) -> Bytes:
    """Return the bytes of all states that a cache holds; a storage that several tensors share counts once.

    Tensors of modules, such as a codec's weights, are not counted: they are there once, whatever the number of tokens.
    """
    if type(cache).__module__.partition(".")[0] in KNOWN:
        # states lie in layers: numbers and codes, not counters
        values = [value for layer in cache.layers for value in vars(layer).values()]
        parts = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
        members = [member for part in parts for member in (part.tensors() if isinstance(part, Columns) else [part])]
        states = [member for member in members if isinstance(member, Tensor)]
        tensors = [state for state in states if state.is_floating_point() or state.dtype == torch.uint8]
    else:
        tensors = [*_tensors(cache, set())]

    sizes: dict[int, Bytes] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        small = in_16_bits(storage.nbytes(), tensor.element_size()) if tensor.is_floating_point() else storage.nbytes()
        sizes[storage.data_ptr()] = Bytes(storage.nbytes(), small)
    overhead = cache.overhead_bytes() if isinstance(cache, SmallerKVCache) else 0
    held = [size for pointer, size in sizes.items() if pointer]  # tensors without numbers have the address 0
    return Bytes(sum(size.allocated for size in held) + overhead, sum(size.sixteen for size in held) + overhead)


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
        for member in inner:
            yield from _tensors(member, seen, depth + 1)
