"""What the carry holds as one object: moved as a whole, never changed, and not taken apart by pytrees."""

import torch
from torch.utils import _pytree as pytree

from crosslayer.core.sources import SharedStates, Sources


def test_accelerate_moves_what_they_hold():
    from accelerate.utils import send_to_device

    states = SharedStates({"keys.0": torch.ones(2), "values.0": None})
    moved = send_to_device({"sources": Sources([torch.ones(2), torch.ones(3)]), "states": states}, torch.device("meta"))
    assert [tensor.device.type for tensor in moved["sources"]] == ["meta", "meta"]
    assert moved["states"]["keys.0"].device.type == "meta" and moved["states"]["values.0"] is None


def test_they_are_leaves_and_do_not_change():
    sources, states = Sources([torch.ones(2)]), SharedStates({"keys.0": torch.ones(2)})
    assert pytree.tree_leaves({"a": sources, "b": states}) == [sources, states]
    more, others = sources.with_newest(torch.zeros(2)), states.updated({"keys.1": torch.zeros(2)})
    assert (len(sources), len(more)) == (1, 2) and "keys.1" not in states.opened and others["keys.1"].sum() == 0
