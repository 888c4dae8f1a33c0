"""Blocks of equal size in the top half, as arXiv 2502.00439 lays its superblocks: the search's yardstick."""

from collections.abc import Sequence
from dataclasses import dataclass

from crosslayer.core.plan import DepthPlan
from crosslayer.probe.shapes import LayerShape
from crosslayer.verbs.diagnose.groups import PAPER_SIZE, Groups, paper_groups
from crosslayer.verbs.retrofit.cache import CacheShare
from crosslayer.verbs.retrofit.wires import Kind


@dataclass(frozen=True)
class Blocks:
    """A method on blocks of layers, and the share of the cache that it keeps."""

    kind: Kind
    groups: Groups
    plan: DepthPlan
    share: float


def fixed_blocks(kind: Kind, shapes: Sequence[LayerShape | None], share: float, cache: CacheShare) -> Blocks | None:
    """Return the blocks of the size whose cached share is nearest to `share`; None where no two layers may share.

    Of two sizes that are equally near the paper's is taken.
    """
    candidates = []
    for size in range(2, max(3, len(shapes) // 2 + 1)):
        groups = paper_groups(list(shapes), size)
        if groups:
            plan = kind.from_groups(groups, len(shapes)).plan(len(shapes))
            candidates.append((size, Blocks(kind, groups, plan, cache.of(plan))))
    if not candidates:
        return None
    _, nearest = min(candidates, key=lambda pair: (abs(pair[1].share - share), pair[0] != PAPER_SIZE, pair[1].groups))
    return nearest
