"""What must agree where layers share (heads, mask, score function), and candidate groups of layers.

Groups are found by depth alone, which are the superblocks of arXiv 2502.00439, or by the similarity of attention maps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedConfig

from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.probe.intercept import AttentionCall
from crosslayer.probe.maps import is_causal
from crosslayer.probe.model import stored_states

ENTRIES = "with further keys"  # in the words for a mask
Groups = list[list[int]]
# Tokens at which the cache is counted by default. Twice the largest window if that is more: within the window a sliding
# layer stores as much as a full one.
CONTEXT = 2048
PAPER_SIZE = 4  # layers in one of the paper's superblocks


@dataclass(frozen=True)
class LayerShape:
    """Heads, mask and score function of a layer's attention; layers may share only where all of it agrees.

    `stored` says which share of keys and of values the layer keeps in the cache; it does not count in the comparison.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    causal: bool
    kind: str | None = None  # the config's layer type
    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    sinks: bool = False
    entries: bool = False  # whether it also attends to entries that stand for several tokens
    stored: tuple[str, ...] = field(default=CACHED, compare=False)

    @staticmethod
    def read(calls: list[AttentionCall], config: PreTrainedConfig, layers: int) -> list["LayerShape | None"]:
        """Return the shape of each layer of a stack, None where no call was seen."""
        distinct = {id(call.mask): call for call in calls}  # a mask is looked at once, however many layers have it
        causal = {key: is_causal(call) for key, call in distinct.items()}
        kinds: list[str | None] = list(getattr(config, "layer_types", None) or [None] * layers)
        # Keys with and without rotary embedding cannot replace one another. 1: rotary, 0: none (SmolLM3).
        for layer, rotated in enumerate(getattr(config, "no_rope_layers", None) or []):
            kinds[layer] = kinds[layer] if rotated else f"{kinds[layer] or 'attention'} without rope"
        shapes: list[LayerShape | None] = [None] * layers
        for call in calls:
            shapes[call.layer] = LayerShape(
                heads=call.query.shape[1],
                kv_heads=call.key.shape[1],
                key_size=call.key.shape[3],
                value_size=call.value.shape[3],
                causal=call.causal if call.mask is None else causal[id(call.mask)],
                kind=kinds[call.layer],
                window=call.window,
                scaling=call.scaling,
                softcap=call.softcap,
                sinks=call.sinks is not None,
                entries=bool(call.options.get("entries")),
                stored=stored_states(config, call.layer),
            )
        return shapes

    @property
    def mask(self) -> str:
        """The mask in words."""
        words = "causal" if self.causal else "bidirectional"
        if self.entries:
            words = f"{words} {ENTRIES}"
        if self.window is not None:
            return f"{words}, window {self.window}"
        return words if self.kind in (None, "full_attention") else f"{words}, {self.kind}"

    def cached(self, length: int) -> tuple[int, int]:
        """Return the elements of keys and of values that a sequence of `length` tokens leaves in the cache.

        A sliding layer keeps what the next token can see, without itself: window − 1 tokens, as in transformers.
        """
        tokens = length if self.window is None else min(length, self.window - 1)
        width = self.kv_heads * tokens
        sizes = {"keys": width * self.key_size, "values": width * self.value_size}
        keys, values = (sizes[state] if state in self.stored else 0 for state in CACHED)
        return keys, values

    def even_share(self, length: int) -> float:
        """Return a'_0 if every row spread its attention evenly over what it may see."""
        if not self.causal:
            return 1 / length
        # under a causal mask row i sees i + 1 tokens, so that token 0 gets H_T/T, above 0.3 for short texts
        rows = length if self.window is None else min(length, self.window)
        return sum(1 / seen for seen in range(1, rows + 1)) / length


class CacheShare:
    """The share of a model's cache that a plan keeps, in elements at `context` tokens; without one, at the default.

    `sizes` are those of each layer's keys and values. With `allocated` a sliding layer counts a whole window, for
    which a cache has memory, without it what the layer keeps: a token less.
    """

    def __init__(self, shapes: Sequence[LayerShape | None], context: int | None = None, allocated: bool = True):
        windows = [shape.window for shape in shapes if shape is not None and shape.window is not None]
        self.context = context or max([CONTEXT, *(2 * window for window in windows)])
        self.sizes: list[dict[str, int]] = []  # by layer
        for shape in shapes:
            keys = values = 0
            if shape is not None and allocated:
                tokens = self.context if shape.window is None else min(self.context, shape.window)
                keys, values = replace(shape, window=None).cached(tokens)
            elif shape is not None:
                keys, values = shape.cached(self.context)
            self.sizes.append({"keys": keys, "values": values})
        self.total = sum(sum(size.values()) for size in self.sizes)

    def of(self, plan: DepthPlan) -> float:
        """Return the share of the cache that a plan keeps."""
        return sum(size[state] for layer, size in enumerate(self.sizes) for state in plan.stored(layer)) / self.total

    def without(self, layers: Sequence[int], states: Sequence[str] = CACHED) -> float:
        """Return the share that is kept if some layers store none of these states."""
        return 1 - sum(self.sizes[layer][state] for layer in layers for state in states) / self.total

    def saved(self, states: Sequence[str], layer: int) -> float:
        """Return the saving if a layer no longer stores these states, in units of a mean layer's keys or values."""
        return sum(self.sizes[layer][state] for state in states) * 2 * len(self.sizes) / self.total

    @property
    def least(self) -> float:
        """The smallest possible share: that of a single layer."""
        return min(sum(size.values()) for size in self.sizes if sum(size.values())) / self.total


def may_share(reader: LayerShape | None, source: LayerShape | None) -> bool:
    """Return whether two layers may share maps or keys: same heads, sizes, mask and soft-cap."""
    return reader is not None and reader == source


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
            # a layer without attention lies between
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
