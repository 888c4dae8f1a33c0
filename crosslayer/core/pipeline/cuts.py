"""Which tensors cross the cuts between pipeline stages, for any method: found by one pass of a decoder without data.

The stream and the tensors of the carry can cross a cut. Layers pass on unchanged tensors as they are, or as full views,
so that a tensor is recognized at every cut that it crosses; tensors that no later operator reads are dropped.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.initialization import no_init_weights

from crosslayer.core.decoder.attention import CrossLayerAttention
from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.method import Carry
from crosslayer.core.options import check_choice
from crosslayer.core.sources import BY_LAYER, SharedStates, Sources

KEPT = ("nothing", "received", "all")  # tensors that a rank keeps for its own later stages


@dataclass(frozen=True)
class Cut:
    """The tensors between a stage and the next.

    Attributes:
        leaf_numbers: for each leaf of the flattened (stream, carry) the number of its tensor, None if nothing later
            reads it; a tensor has the same number at all cuts.
        structure: the tree structure of (stream, carry).
    """

    leaf_numbers: tuple[int | None, ...]
    structure: pytree.TreeSpec

    @property
    def stream(self) -> int:
        """The number of the stream."""
        assert self.leaf_numbers[0] is not None
        return self.leaf_numbers[0]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The tensors that later stages read, the stream first."""
        return tuple(dict.fromkeys(number for number in self.leaf_numbers if number is not None))

    def take(self, stream: Tensor, carry: Carry) -> dict[int, Tensor]:
        """Return the tensors that later stages read, by their numbers."""
        leaves, structure = _flatten(stream, carry)
        assert structure == self.structure, "the carry at a cut differs from that of the pass without data"
        return {number: leaf for number, leaf in zip(self.leaf_numbers, leaves, strict=True) if number is not None}

    def rebuild(self, tensors: Mapping[int, Tensor]) -> tuple[Tensor, Carry]:
        """Return stream and carry, with None for tensors that nothing reads."""
        leaves = [None if number is None else tensors[number] for number in self.leaf_numbers]
        stream, carry = pytree.tree_unflatten(leaves, self.structure)
        for name, value in carry.items():
            if isinstance(value, _Opened):
                content = value.content
                carry[name] = SharedStates(content) if isinstance(content, dict) else Sources(content)
        return stream, carry


@dataclass(frozen=True)
class Traffic:
    """Which tensors (by number) a stage receives, reuses from its rank, and keeps there.

    Attributes:
        sent: (stages,), tensors from the previous stage, the stream first; empty for the first stage.
        reused: (stages,), tensors that an earlier stage of the same rank has kept.
        kept: (stages,), tensors that the stage keeps for later stages of its rank.
    """

    sent: tuple[tuple[int, ...], ...]
    reused: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]


def find_traffic(cuts: Sequence[Cut], ranks: int, keep: str) -> Traffic:
    """Return the traffic if stage c runs on rank c % ranks.

    Args:
        cuts: one for each stage but the first.
        ranks: number of ranks.
        keep: tensors that a rank keeps: "nothing"; those it has "received" (cross-stage caching as published, arXiv
            2603.15031); or "all", also outputs that its own stages have computed.
    """
    check_choice("pipeline", "keep", keep, KEPT)
    stages = len(cuts) + 1
    sent: list[tuple[int, ...]] = [() for _ in range(stages)]
    reused: list[tuple[int, ...]] = [() for _ in range(stages)]
    kept: list[dict[int, None]] = [{} for _ in range(stages)]
    keepers: list[dict[int, int]] = [{} for _ in range(ranks)]  # of each rank: the stage that keeps a tensor
    for stage in range(stages):
        here = keepers[stage % ranks]
        if stage > 0:
            # the stream is always sent: its gradient runs the backward passes that store those of kept tensors
            cut = cuts[stage - 1]
            reused[stage] = tuple(number for number in cut.numbers if number in here and number != cut.stream)
            sent[stage] = tuple(number for number in cut.numbers if number not in reused[stage])
        for number in reused[stage]:
            kept[here[number]][number] = None
        received = sent[stage] if keep != "nothing" else ()
        computed = cuts[stage].numbers if keep == "all" and stage + 1 < stages else ()
        for number in (*received, *computed):
            here.setdefault(number, stage)
    return Traffic(tuple(sent), tuple(reused), tuple(tuple(numbers) for numbers in kept))


def find_cuts(config: CrossLayerConfig, starts: Sequence[int]) -> tuple[Cut, ...]:
    """Return the cuts before the layers `starts` (without the first stage's 0), from a pass without data.

    Raises:
        ValueError: the carry at a cut holds something that is not a tensor.
    """
    # other kernels may not support tensors without data
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    watch = _Watch(starts)
    with FakeTensorMode(), no_init_weights():
        model = CrossLayerForCausalLM(config)
        for module in model.modules():
            # eager attention would hand on a map (B, H, T, T): queries and keys cross a cut, which are smaller
            if isinstance(module, CrossLayerAttention):
                module.shares_map = False
        for start in starts:
            model.model.layers[start].register_forward_pre_hook(watch.arrive)
        ids = torch.zeros(1, 2, dtype=torch.long)
        with watch, torch.enable_grad():
            model(ids, attention_mask=dict.fromkeys(config.layer_types or ()), use_cache=False)

    cuts = []
    for stage, (leaves, structure) in enumerate(watch.flat, 1):
        numbers = [None if leaf is None else watch.numbers[_key(leaf)] for leaf in leaves]
        read_later = [None if number is None or watch.last.get(number, 0) < stage else number for number in numbers]
        # the stream is always sent, since its gradient comes back
        cuts.append(Cut((numbers[0], *read_later[1:]), structure))
    return tuple(cuts)


class _Watch(TorchDispatchMode):
    """Numbers the tensors at the cuts, and records the last stage whose operators read them."""

    def __init__(self, starts: Sequence[int]):
        super().__init__()
        self.starts = starts
        # by cut; it keeps the tensors alive, so that the keys of `numbers`, which are addresses, stay unique
        self.flat: list[tuple[list[Any], pytree.TreeSpec]] = []
        self.numbers: dict[Any, int] = {}  # by `_key`
        self.last: dict[int, int] = {}  # by number: the last stage that reads it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (key := _key(leaf)) in self.numbers:
                self.last[self.numbers[key]] = len(self.flat)
        return func(*args, **(kwargs or {}))

    def arrive(self, layer: Any, args: tuple[Any, ...]) -> None:
        """Record the inputs of the first layer of a stage."""
        leaves, structure = _flatten(*args[:2])
        for leaf in leaves:
            if leaf is None:
                continue
            if not isinstance(leaf, Tensor):
                raise ValueError(
                    f"the carry before layer {self.starts[len(self.flat)]} holds a {type(leaf).__name__}; "
                    "stages can pass on only tensors, in tuples, lists and dicts"
                )
            self.numbers.setdefault(_key(leaf), len(self.numbers))
        self.flat.append((leaves, structure))


class _Opened(NamedTuple):
    """Sources or shared states, whose tensors are seen one by one."""

    content: tuple[Tensor, ...] | dict[str, Tensor | None]


def _flatten(stream: Tensor, carry: Carry) -> tuple[list[Any], pytree.TreeSpec]:
    # each stage makes both itself; "read" is for probes, and no layer reads it
    carry = {name: value for name, value in carry.items() if name not in (BY_LAYER, "read")}
    opaque = (Sources, SharedStates)
    carry = {name: _Opened(value.opened) if isinstance(value, opaque) else value for name, value in carry.items()}
    return pytree.tree_flatten((stream, carry))


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that a tensor shares with full views of it, but not with detached copies."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
