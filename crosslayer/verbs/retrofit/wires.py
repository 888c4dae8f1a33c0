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
        below = layer - 1
        while below >= 0 and (not self._may_share(below, layer) or self._is_passed(below, layer)):
            below -= 1
        return below if below >= 0 and self.kinds[below] is None else None

    def _may_share(self, layer: int, other: int) -> bool:
        return self.shapes is None or may_share(self.shapes[layer], self.shapes[other])

    def _is_passed(self, below: int, layer: int) -> bool:
        kind = self.kinds[below]
        return kind is not None and (kind is self.kinds[layer] or not kind.grouped)

    @property
    def valid(self) -> bool:
        """Whether every borrower has a leader, and some layer keeps its attention."""
        keeps_attention = False
        for layer, kind in enumerate(self.kinds):
            if kind is not None and kind.grouped and self.leader(layer) is None:
                return False
            if kind is None and (self.shapes is None or self.shapes[layer] is not None):
                keeps_attention = True
        return keeps_attention

    def take(self, kind: Kind, layer: int) -> "Wires":
        """Return the wires with a method on a further layer."""
        return Wires((*self.kinds[:layer], kind, *self.kinds[layer + 1 :]), self.shapes)

    def count(self, kind: Kind) -> int:
        """Return on how many layers a method acts."""
        return sum(other is kind for other in self.kinds)

    def names(self) -> list[str]:
        """Return the method of each layer by name."""
        return [OWN if kind is None else kind.name() for kind in self.kinds]

    def methods(self) -> list[Method]:
        """Return the methods that make these wires, by name, without W_c."""
        kinds = {kind for kind in self.kinds if kind is not None}
        methods = []
        for kind in sorted(kinds, key=lambda kind: kind.name()):
            groups = self._groups(kind) if kind.grouped else self._single_layers(kind)
            methods.append(kind.from_groups(groups, len(self.kinds)))
        return methods

    def _single_layers(self, kind: Kind) -> list[list[int]]:
        return [[layer] for layer, other in enumerate(self.kinds) if other is kind]

    def _groups(self, kind: Kind) -> list[list[int]]:
        """Return each leader with all layers up to its last borrower that may share with it."""
        last: dict[int, int] = {}
        for layer, other in enumerate(self.kinds):
            leader = self.leader(layer) if other is kind else None
            if leader is not None:
                last[leader] = layer
        groups = []
        for leader, borrower in last.items():
            groups.append([layer for layer in range(leader, borrower + 1) if self._may_share(layer, leader)])
        return groups

    @property
    def plan(self) -> DepthPlan:
        """The wiring."""
        return merge_plans(self.methods(), len(self.kinds))
