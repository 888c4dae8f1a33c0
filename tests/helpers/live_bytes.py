"""The most bytes of tensors that are alive at once inside a block, exactly, on any device."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make inside the block, until they are freed.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.peak = self.now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size
