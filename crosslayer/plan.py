"""Who owns which attention state, and who reads it: the static half of a cross-layer method.

A plan is index vectors. `keys[i]` is the layer whose keys layer i reads: i itself (it owns them), an earlier layer, or
None (the sublayer does not exist). A softmax map is shared exactly where query and key sources agree.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

STATES = ("queries", "keys", "values")
Entry = int | None
Vector = tuple[Entry, ...]


@dataclass(frozen=True)
class DepthPlan:
    """Sources of queries, keys and values, and which MLPs exist (`mlps[i]` is i or None); all of length L."""

    queries: Vector
    keys: Vector
    values: Vector
    mlps: Vector

    @staticmethod
    def identity(layers: int) -> "DepthPlan":
        """Return the plan of a plain Transformer: every layer owns everything."""
        own = tuple(range(layers))
        return DepthPlan(own, own, own, own)

    def __post_init__(self):
        for name in (*STATES, "mlps"):  # lists too, but a plan must compare and hash as what it says
            object.__setattr__(self, name, tuple(self.sources(name)))
        if len({len(self.queries), len(self.keys), len(self.values), len(self.mlps)}) != 1:
            raise ValueError("queries, keys, values and mlps must have an entry for each layer")
        for state in STATES:
            _check_vector(state, self.sources(state))
        for layer, source in enumerate(self.mlps):
            if source is not None and (type(source) is not int or source != layer):
                raise ValueError(
                    f"layer {layer}: mlps is {source}; an MLP is its layer's own ({layer}) or dropped (None)"
                )
        for layer in range(self.layers):
            sources = [self.sources(state)[layer] for state in STATES]
            if None in sources and sources != [None] * 3:
                raise ValueError(
                    f"layer {layer}: queries, keys and values are {sources}; attention goes whole (all None) or stays"
                )
        if all(source is None for source in self.keys):
            raise ValueError("no layer has attention; some layer must keep it")

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return len(self.keys)

    def sources(self, state: str) -> Vector:
        """Return the vector of "queries", "keys", "values" or "mlps"."""
        return {"queries": self.queries, "keys": self.keys, "values": self.values, "mlps": self.mlps}[state]

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        return self.keys[layer] is not None

    def lends(self, state: str, layer: int) -> bool:
        """Return whether a later layer reads this layer's `state`."""
        vector = self.sources(state)
        return any(source == layer for reader, source in enumerate(vector) if reader != layer)

    def stored(self, layer: int) -> tuple[str, ...]:
        """Return what the cache holds at a layer: owned keys and owned values (queries are never cached)."""
        return tuple(state for state in ("keys", "values") if self.sources(state)[layer] == layer)

    def cached_fraction(self) -> float:
        """Return the stored share of a full cache, with keys and values of equal size."""
        return sum(len(self.stored(layer)) for layer in range(self.layers)) / (2 * self.layers)

    def bytes_per_token(self, state_bytes: int) -> tuple[int, int]:
        """Return KV bytes per token stored and read in a decoding step.

        `state_bytes` is the size of a layer's keys, or values, of a single token. Storing less is not reading less: a
        follower reads its lender's states again.
        """
        stored = sum(len(self.stored(layer)) for layer in range(self.layers))
        read = 2 * sum(self.attends(layer) for layer in range(self.layers))
        return stored * state_bytes, read * state_bytes

    def slots(self, state: str) -> tuple[Entry, ...]:
        """Return, for each source layer that lends `state`, a slot number that no other living loan uses.

        Slots are reused once the last reader is past, so that equal groups carry equal names.
        """
        vector = self.sources(state)
        last = {source: reader for reader, source in enumerate(vector) if source is not None}
        busy: dict[int, int] = {}  # slot -> last reader
        result: list[Entry] = [None] * self.layers
        for layer in range(self.layers):
            if last.get(layer, layer) > layer:
                slot = next(s for s in range(self.layers) if busy.get(s, -1) < layer)
                busy[slot], result[layer] = last[layer], slot
        return tuple(result)

    def merge(self, other: "DepthPlan", names: tuple[str, str]) -> "DepthPlan":
        """Combine two plans entry by entry.

        Two different changes of an entry collide, but taking away beats borrowing.

        Raises:
            ValueError: a collision, or a lender that is gone; both methods are named.

        """
        vectors = {s: self._merge_vector(other, s, names) for s in (*STATES, "mlps")}
        for state in STATES:
            for reader, source in enumerate(vectors[state]):
                if source is not None and vectors[state][source] != source:
                    raise ValueError(
                        f"{names[0]} with {names[1]}: layer {reader} reads {state} of layer {source}, which owns none"
                    )
        return DepthPlan(**vectors)

    def _merge_vector(self, other: "DepthPlan", state: str, names: tuple[str, str]) -> Vector:
        if self.layers != other.layers:
            raise ValueError(f"{names[0]} has {self.layers} layers and {names[1]} {other.layers}")
        result: list[Entry] = []
        for layer, (source, others) in enumerate(zip(self.sources(state), other.sources(state), strict=True)):
            if others in (source, layer):
                result.append(source)
            elif source == layer:
                result.append(others)
            elif source is None or others is None:
                result.append(None)
            else:
                raise ValueError(
                    f"layer {layer}: {names[0]} takes {state} from layer {source} and {names[1]} from layer {others}; "
                    "only one of them may change an entry"
                )
        return tuple(result)

    def diagram(self) -> str:
        """Draw who reads from whom, a line for each layer."""
        lines = ["layer  queries  keys     values   mlp   cache"]
        for layer in range(self.layers):
            cells = [_cell(self.sources(state)[layer], layer) for state in STATES]
            mlp = "own" if self.mlps[layer] is not None else "–"
            lines.append(
                f"{layer:>5}  {''.join(f'{c:<9}' for c in cells)}{mlp:<6}{'+'.join(self.stored(layer)) or '–'}"
            )
        return "\n".join([*lines, f"cached share: {self.cached_fraction():.2%} of a full KV cache"])


def _cell(source: Entry, layer: int) -> str:
    if source is None:
        return "–"
    return "own" if source == layer else f"← {source}"


def _check_vector(state: str, vector: Sequence[Entry]) -> None:
    for layer, source in enumerate(vector):
        if source is None:
            continue
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < len(vector):
            raise ValueError(
                f"layer {layer}: {state} come from {source!r}; a source is a layer from 0 to {len(vector) - 1}"
            )
        if source > layer:
            raise ValueError(
                f"layer {layer}: {state} come from layer {source} above it; a source is never above its reader"
            )
        if vector[source] != source:
            raise ValueError(
                f"layer {layer}: {state} come from layer {source}, which owns none; a lender owns what it lends"
            )


def parse_layers(text: str, layers: int) -> list[list[int]]:
    """Read "18-21,22-25": commas separate groups of 0-based layers, a dash is a range.

    Raises:
        ValueError: the text is not such a list, or names a layer that does not exist or twice.

    """
    groups = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f"layers {text!r}: {part!r} is neither a layer nor a range; write for example 18-21,22-25")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if not first <= last < layers:
            raise ValueError(f"layers {text!r}: {part!r} is out of range; layers go from 0 to {layers - 1}")
        groups.append(list(range(first, last + 1)))
    named = [layer for group in groups for layer in group]
    if len(set(named)) != len(named):
        raise ValueError(f"layers {text!r}: a layer is named twice")
    return groups
