"""Candidate groups of layers for sharing: by depth alone, or by the similarity of their attention maps.

The groups by depth are the superblocks of arXiv 2502.00439.
"""

import numpy as np

from crosslayer.probe.shapes import LayerShape, may_share

PAPER_SIZE = 4  # layers in one of the paper's superblocks
Groups = list[list[int]]


def paper_groups(shapes: list[LayerShape | None], size: int = PAPER_SIZE, count: int | None = None) -> Groups:
    """Return the paper's superblocks: `size` layers each, from the last layer down, within the upper half.

    With `count`, return that many blocks and go below the middle if needed. A block whose layers may not share moves
    down by a layer. Layers left over stay single.
    """
    groups, stop, lowest = [], len(shapes), len(shapes) // 2 if count is None else 0
    while stop - size >= lowest and len(groups) != count:
        group = list(range(stop - size, stop))
        shared = all(may_share(shapes[group[0]], shapes[layer]) for layer in group)
        if shared:
            groups.insert(0, group)
        stop -= size if shared else 1
    return groups


def similar_groups(similarity: np.ndarray, shapes: list[LayerShape | None], readers: int) -> Groups:
    """Return contiguous groups with `readers` readers in total, merged greedily by complete linkage.

    Each step merges the two neighboring groups whose least similar pair of layers is most similar, which adds one
    reader. `similarity` is (L, L), of maps without the first token.
    """
    groups: Groups = [[i] for i, shape in enumerate(shapes) if shape is not None]
    for _ in range(readers):
        best, index = -np.inf, None
        for i in range(len(groups) - 1):
            union = groups[i] + groups[i + 1]
            if union != list(range(union[0], union[-1] + 1)):
                continue
            if not all(may_share(shapes[union[0]], shapes[layer]) for layer in union):
                continue
            least = similarity[np.ix_(union, union)].min()
            if least > best:
                best, index = least, i
        if index is None:
            break
        groups[index : index + 2] = [groups[index] + groups[index + 1]]
    return [group for group in groups if len(group) > 1]
