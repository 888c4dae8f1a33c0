"""Which layers share or go: named by the user, the paper's superblocks, by map similarity, or searched by damage.

The search is greedy over layers and methods: at each step it takes the move with the least measured KL to the original
for what it saves of the cache at a stated context (a layer with a sliding window has less to save than others). Every
move is ranked once (of deep models every n-th layer's, for its neighbours); a move is measured again before it is
taken, for as long as another looks better then (lazy greedy).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from crosslayer.diagnosis.groups import Groups, paper_groups
from crosslayer.method import Method
from crosslayer.methods import merge_plans
from crosslayer.methods.cla import CLA
from crosslayer.methods.drop import Drop
from crosslayer.methods.svformer import SVFormer
from crosslayer.methods.uniattn import UniAttn
from crosslayer.plan import DepthPlan
from crosslayer.probe.shapes import LayerShape, may_share

PASSES = 300  # over the search text, at most
RANKED = 200  # passes for the first ranking, at most
AGAIN = 6  # moves that are measured again for one pick, at most
SAVES = {"uniattn": ("keys",), "cla": ("keys", "values"), "drop": ("keys", "values")}  # states that a move saves
CONTEXT = 2048  # tokens at which the cache is counted, unless a window is larger
OWN = "own"


def entries(
    method: str, groups: Groups, layers: int, compensation: str | None, drop: str = "attention"
) -> list[Method]:
    """Return a method on groups of layers; for "drop" every named layer loses its `drop`: attention, mlp or layer.

    Raises:
        ValueError: the groups do nothing, or the method knows no such compensation.

    """
    frozen = tuple(tuple(group) for group in groups)
    followers = [layer for group in groups for layer in group[1:]]
    if method == "drop":
        named = tuple(layer for group in groups for layer in group)
        option = {"attention": "attention", "mlp": "mlp", "layer": "layers"}[drop]
        if compensation is not None and drop != "attention":
            raise ValueError(f"--compensation makes up for dropped attention, not for a dropped {drop}; use none")
        return [Drop(**{option: named}, compensation=compensation)]
    alone = [group[0] for group in groups if len(group) < 2]
    if alone or not followers:
        raise ValueError(
            f"{method}: groups {alone} have no second layer, so nothing would be shared there; write for example 18-21"
        )
    if method == "uniattn":
        return [UniAttn(frozen, compensation)]
    if method == "cla":
        return [CLA(groups=frozen, compensation=compensation)]
    return [SVFormer(tuple(i for i in range(layers) if i not in followers), compensation=compensation)]


@dataclass(frozen=True)
class Wires:
    """What each layer's attention does: "own", "uniattn" (borrows the map), "cla" (borrows K and V) or "drop"."""

    kinds: tuple[str, ...]

    def leader(self, layer: int) -> int | None:
        """Return the layer that a borrower reads: the next own layer below, past borrowers of its kind and drops."""
        below = layer - 1
        while below >= 0 and self.kinds[below] in (self.kinds[layer], "drop"):
            below -= 1
        return below if below >= 0 and self.kinds[below] == OWN else None

    def valid(self, shapes: Sequence[LayerShape | None]) -> bool:
        """Return whether every borrower has a leader of its shape, and some attention stays."""
        borrowers = [i for i, kind in enumerate(self.kinds) if kind in ("uniattn", "cla")]
        found = [(i, self.leader(i)) for i in borrowers]
        fits = all(j is not None and may_share(shapes[i], shapes[j]) for i, j in found)
        return fits and any(kind == OWN and shape for kind, shape in zip(self.kinds, shapes, strict=True))

    def take(self, kind: str, layer: int) -> "Wires":
        """Return the wires with one layer changed."""
        return Wires((*self.kinds[:layer], kind, *self.kinds[layer + 1 :]))

    def methods(self, compensation: str | None = None) -> list[Method]:
        """Return the methods that make these wires."""
        made: list[Method] = []
        blocks = {kind: self._groups(kind) for kind in ("uniattn", "cla")}
        if blocks["uniattn"]:
            made.append(UniAttn(blocks["uniattn"], compensation))
        if blocks["cla"]:
            made.append(CLA(groups=blocks["cla"], compensation=compensation))  # W_c writes where the caller says
        dropped = tuple(i for i, kind in enumerate(self.kinds) if kind == "drop")
        if dropped:
            made.append(Drop(attention=dropped, compensation=compensation and "attention"))  # nowhere else is possible
        return made

    def _groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        last = {self.leader(i): i for i, found in enumerate(self.kinds) if found == kind}
        return tuple(tuple(range(leader, layer + 1)) for leader, layer in last.items() if leader is not None)

    @property
    def plan(self) -> DepthPlan:
        """The wiring."""
        return merge_plans(self.methods(), len(self.kinds))


class CacheShare:
    """What a plan keeps of the whole model's cache, in elements at `context` tokens."""

    def __init__(self, shapes: Sequence[LayerShape | None], context: int | None = None):
        windows = [shape.window for shape in shapes if shape is not None and shape.window is not None]
        self.context = context or max([CONTEXT, *(2 * window for window in windows)])
        empty = {"keys": 0, "values": 0}
        self.sizes = [
            empty if shape is None else dict(zip(empty, _allocated(shape, self.context), strict=True))
            for shape in shapes
        ]
        self.total = sum(sum(size.values()) for size in self.sizes)

    def of(self, plan: DepthPlan) -> float:
        """Return the share that a plan keeps."""
        kept = (size[state] for i, size in enumerate(self.sizes) for state in plan.stored(i))
        return sum(kept) / self.total

    def saved(self, move: tuple[str, int]) -> float:
        """Return what a move saves, in states of a layer of mean size."""
        kind, layer = move
        return sum(self.sizes[layer][state] for state in SAVES[kind]) * 2 * len(self.sizes) / self.total

    @property
    def least(self) -> float:
        """The smallest share that any plan can keep: that of one layer."""
        return min(sum(size.values()) for size in self.sizes if sum(size.values())) / self.total


def _allocated(shape: LayerShape, context: int) -> tuple[int, int]:
    """Return the elements of keys and values that a cache allocates: a whole window, of which one token is not kept."""
    tokens = context if shape.window is None else min(context, shape.window)
    return replace(shape, window=None).cached(tokens)


@dataclass
class Search:
    """A greedy search; `curve` holds, from the whole model on, the wires after each pick and their search damage."""

    measure: Callable[[DepthPlan], float]  # KL to the original on the search text
    shapes: Sequence[LayerShape | None]
    kinds: tuple[str, ...] = ("uniattn", "cla", "drop")
    context: int | None = None  # tokens at which the cache is counted
    passes: int = 0
    curve: list[tuple[Wires, float]] = field(default_factory=list)

    def __post_init__(self):
        self.cache = CacheShare(self.shapes, self.context)

    def run(self, share: float | None = None, kl: float | None = None) -> Wires:
        """Pick moves until the cached share is at most `share`, or as long as the damage stays within `kl`.

        Raises:
            ValueError: the share cannot be reached; the message names the nearest.

        """
        count = len(self.shapes)
        if (share is None) == (kl is None):
            raise ValueError("give either a share of the cache or a damage, not both")
        if share is not None and not self.cache.least <= share < 1:
            raise ValueError(
                f"a KV budget of {share:g} cannot be met; with {count} layers it lies from {self.cache.least:.4f} to 1"
            )
        wires, damage = Wires((OWN,) * count), 0.0
        self.curve = [(wires, damage)]
        moves = self._moves(wires)
        step = -(-len(moves) // RANKED)
        stale = {move: self._cost(wires, move, 0.0) for move in moves if move[1] % step == 0}
        refused: set[tuple[str, int]] = set()
        while share is None or self.cache.of(wires.plan) > share + 1e-9:
            move = self._best(wires, damage, stale, refused)
            if move is None:
                break
            after = damage + stale.pop(move) * self.cache.saved(move)
            if kl is not None and after > kl:
                refused.add(move)
                continue
            wires, damage = wires.take(*move), after
            self.curve.append((wires, damage))
        chosen = self.curve[-1][0]
        if share is not None and self.cache.of(chosen.plan) > share + 1e-9:
            raise ValueError(
                f"a KV budget of {share:g} cannot be met within {PASSES} passes; the nearest found is "
                f"{self.cache.of(chosen.plan):.4f}"
            )
        return chosen

    def _moves(self, wires: Wires) -> list[tuple[str, int]]:
        free = [i for i, kind in enumerate(wires.kinds) if kind == OWN and self.shapes[i] is not None]
        moves = [(kind, i) for i in free for kind in self.kinds if self.cache.saved((kind, i))]
        return [move for move in moves if wires.take(*move).valid(self.shapes)]

    def _cost(self, wires: Wires, move: tuple[str, int], damage: float) -> float:
        """Return the damage that a move adds, for each state of mean size that it saves."""
        self.passes += 1
        return (self.measure(wires.take(*move).plan) - damage) / self.cache.saved(move)

    def _best(
        self, wires: Wires, damage: float, stale: dict[tuple[str, int], float], refused: set[tuple[str, int]]
    ) -> tuple[str, int] | None:
        """Measure the most promising moves again until the best of them stands; its cost in `stale` is then fresh."""
        moves = [move for move in self._moves(wires) if move not in refused]
        for kind, layer in moves:
            if (kind, layer) not in stale:  # not ranked, or not possible before: as its nearest neighbour, if any
                known = [other for other in stale if other[0] == kind]
                near = min(known, key=lambda other: abs(other[1] - layer), default=None)
                stale[kind, layer] = -math.inf if near is None else stale[near]
        fresh: set[tuple[str, int]] = set()
        while moves and self.passes < PASSES:
            best = min(moves, key=stale.__getitem__)
            if best in fresh or len(fresh) >= AGAIN:
                return min(fresh, key=stale.__getitem__)
            stale[best] = self._cost(wires, best, damage)
            fresh.add(best)
        return None


def fixed_superblocks(shapes: list[LayerShape | None], share: float, cache: CacheShare) -> tuple[Groups, float] | None:
    """Return the paper's superblocks in the top half, of the size whose cached share is nearest to `share`, if any."""
    tried = []
    for size in range(2, max(3, len(shapes) // 2 + 1)):
        groups = paper_groups(shapes, size)
        if groups:
            plan = UniAttn(tuple(map(tuple, groups))).plan(len(shapes))
            kept = cache.of(plan)
            tried.append((abs(kept - share), size != 4, groups, kept))
    if not tried:
        return None
    _, _, groups, found = min(tried)
    return groups, found
