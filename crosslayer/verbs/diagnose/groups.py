"""Candidate groups of layers that may share: by depth alone, or by the similarity of their maps.

By depth is the rule of arXiv 2502.00439, whose groups are called superblocks.
"""

import numpy as np

from crosslayer.probe.shapes import LayerShape, may_share

PAPER_SIZE = 4  # layers of the paper's superblocks
Groups = list[list[int]]


def paper_groups(shapes: list[LayerShape | None], size: int = PAPER_SIZE) -> Groups:
    """Return the paper's superblocks: `size` layers each from the top down, within the top half, leftovers alone.

    A block that would mix layers that may not share is left out.
    """
    groups = []
    stop = len(shapes)
    while stop - size >= len(shapes) // 2:
        group = list(range(stop - size, stop))
        if all(may_share(shapes[group[0]], shapes[layer]) for layer in group):
            groups.insert(0, group)
        stop -= size
    return groups


def similar_groups(similarity: np.ndarray, shapes: list[LayerShape | None], readers: int) -> Groups:
    """Return contiguous groups with `readers` readers in all, joined greedily by the lowest similarity inside.

    Joining two neighbouring groups adds a reader; each step takes the union whose least similar pair is most
    similar (complete linkage). `similarity` is (L, L), without the first column.
    """
    groups: Groups = [[i] for i, shape in enumerate(shapes) if shape is not None]
    for _ in range(readers):
        best, where = -np.inf, None
        for i in range(len(groups) - 1):
            union = groups[i] + groups[i + 1]
            if union != list(range(union[0], union[-1] + 1)):
                continue
            if not all(may_share(shapes[union[0]], shapes[layer]) for layer in union):
                continue
            inside = similarity[np.ix_(union, union)].min()
            if inside > best:
                best, where = inside, i
        if where is None:
            break
        groups[where : where + 2] = [groups[where] + groups[where + 1]]
    return [group for group in groups if len(group) > 1]
