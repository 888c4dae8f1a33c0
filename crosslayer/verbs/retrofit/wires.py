"""What the search may do to the layers of a model: each keeps its attention, or a method acts on it."""

from dataclasses import dataclass

from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans, method_class, method_names
from crosslayer.core.plan import DepthPlan
from crosslayer.probe.shapes import LayerShape, may_share

Kind = type[Method]
OWN = "own"  # how a record calls a layer that no method acts on


def searched_methods() -> list[Kind]:
    """Return the methods that say what a layer under them saves, by name: those that a search tries."""
    kinds = [method_class(name) for name in method_names()]
    return [kind for kind in kinds if kind.saves]


@dataclass(frozen=True)
class Wires:
    """The method that acts on each layer, None where the layer keeps its own attention.

    A layer under a grouped method borrows from its leader; under any other it is changed by itself. `shapes` says which
    layers may share; None: all of them.
    """

    kinds: tuple[Kind | None, ...]
    shapes: tuple[LayerShape | None, ...] | None = None

    def leader(self, layer: int) -> int | None:
        """Return the layer that a borrower reads: the next own layer below of those that may share with it.

        Layers between them may borrow by the same method, be changed by themselves, or be of another shape.
        """
        for below in range(layer - 1, -1, -1):
            kind = self.kinds[below]
            if self._may_share(below, layer) and (kind is None or (kind.grouped and kind is not self.kinds[layer])):
                return below if kind is None else None
        return None

    def _may_share(self, layer: int, other: int) -> bool:
        return self.shapes is None or may_share(self.shapes[layer], self.shapes[other])

    @property
    def valid(self) -> bool:
        """Whether every borrower has a leader, and some layer keeps its attention."""
        keeps_attention = False
        for layer, kind in enumerate(self.kinds):
            if kind is not None and kind.grouped and self.leader(layer) is None:
                return False
            keeps_attention |= kind is None and (self.shapes is None or self.shapes[layer] is not None)
        return keeps_attention

    def take(self, kind: Kind, layer: int) -> "Wires":
        """Return the wires with a method on a further layer."""
        return Wires((*self.kinds[:layer], kind, *self.kinds[layer + 1 :]), self.shapes)

    def names(self) -> list[str]:
        """Return the method of each layer by name."""
        return [OWN if kind is None else kind.name() for kind in self.kinds]

    def methods(self) -> list[Method]:
        """Return the methods that make these wires, by name, without W_c."""
        kinds = sorted({kind for kind in self.kinds if kind is not None}, key=lambda kind: kind.name())
        return [kind.from_groups(self._groups(kind), len(self.kinds)) for kind in kinds]

    def _groups(self, kind: Kind) -> list[list[int]]:
        """Return each leader with all layers up to its last borrower that may share with it, or just the layers."""
        layers = [layer for layer, other in enumerate(self.kinds) if other is kind]
        if not kind.grouped:
            return [[layer] for layer in layers]
        last = {leader: layer for layer in layers if (leader := self.leader(layer)) is not None}
        return [
            [layer for layer in range(leader, borrower + 1) if self._may_share(layer, leader)]
            for leader, borrower in last.items()
        ]

    @property
    def plan(self) -> DepthPlan:
        """The wiring."""
        return merge_plans(self.methods(), len(self.kinds))
