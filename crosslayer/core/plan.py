"""Who owns which attention state, and who reads it: the static half of a cross-layer method.

A plan is index vectors. `keys[i]` is the layer whose keys layer i reads: i itself (it owns them), an earlier layer, or
None (the sublayer does not exist). A tuple of layers, in rising order, says that layer i reads the cached keys of all
of them and combines them. A softmax map is shared exactly where query and key sources agree.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

STATES = ("queries", "keys", "values")
CACHED = ("keys", "values")
Entry = int | tuple[int, ...] | None
Vector = tuple[Entry, ...]


@dataclass(frozen=True)
class DepthPlan:
    """Sources of queries, keys and values, and which MLPs exist (`mlps[i]` is i or None); all of length L.

    `value_shares[i]` is the share of the value heads that layer i has for itself where it owns values; the rest come
    from the other layers that it reads. Empty means all of them, in every layer.
    """

    queries: Vector
    keys: Vector
    values: Vector
    mlps: Vector
    value_shares: tuple[float, ...] = ()

    @staticmethod
    def identity(layers: int) -> "DepthPlan":
        """Return the plan of a plain Transformer: every layer owns everything."""
        own = tuple(range(layers))
        return DepthPlan(own, own, own, own)

    def __post_init__(self):
        for name in (*STATES, "mlps"):  # lists too, but a plan must compare and hash as what it says
            entries = (tuple(entry) if isinstance(entry, list) else entry for entry in self.sources(name))
            object.__setattr__(self, name, tuple(entries))
        object.__setattr__(self, "value_shares", tuple(self.value_shares) or (1.0,) * self.layers)
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
        self._check_shares()

    def _check_shares(self) -> None:
        if len(self.value_shares) != self.layers:
            raise ValueError("value_shares must have an entry for each layer, or none at all")
        for layer, share in enumerate(self.value_shares):
            if not 0 < share <= 1:
                raise ValueError(f"layer {layer}: the share of value heads is {share}; it must be above 0, at most 1")
            partner = isinstance(self.values[layer], tuple) and self.owns("values", layer)
            if share < 1 and not partner:
                raise ValueError(
                    f"layer {layer}: it has {share:.0%} of the value heads for itself and reads no other layer's"
                )
            if share < 1 and self.lends("values", layer):
                raise ValueError(
                    f"layer {layer}: it has {share:.0%} of the value heads for itself and cannot lend all of them"
                )

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

    def reads(self, state: str, layer: int) -> tuple[int, ...]:
        """Return the layers whose `state` a layer reads; none where it has no attention."""
        return _layers_of(self.sources(state)[layer])

    def owns(self, state: str, layer: int) -> bool:
        """Return whether a layer makes this state for itself, or a share of it."""
        return layer in self.reads(state, layer)

    def own_layers(self, state: str) -> list[int]:
        """Return the layers that make this state for themselves, or a share of it."""
        return [layer for layer in range(self.layers) if self.owns(state, layer)]

    def lends(self, state: str, layer: int) -> bool:
        """Return whether a later layer reads this layer's `state`."""
        return any(layer in self.reads(state, reader) for reader in range(layer + 1, self.layers))

    def stored(self, layer: int) -> tuple[str, ...]:
        """Return what the cache holds at a layer: owned keys and owned values (queries are never cached)."""
        return tuple(state for state in CACHED if self.owns(state, layer))

    def stored_share(self, state: str, layer: int) -> float:
        """Return the share of a layer's full keys, or values, that the cache holds: 0 where they are borrowed."""
        if not self.owns(state, layer):
            return 0.0
        return self.value_shares[layer] if state == "values" else 1.0

    def stored_states(self) -> float:
        """Return how many full states the cache holds; a plain Transformer holds 2·L."""
        return sum(self.stored_share(state, layer) for state in CACHED for layer in range(self.layers))

    def read_count(self, state: str, layer: int) -> int:
        """Return how many layers' full keys, or values, a layer reads from the cache in a decoding step."""
        if state == "values" and self.value_shares[layer] < 1:
            return 1  # the other layers give just the heads that are missing
        return len(self.reads(state, layer))

    def read_states(self) -> int:
        """Return how many full states a decoding step reads from the cache."""
        return sum(self.read_count(state, layer) for state in CACHED for layer in range(self.layers))

    def cached_fraction(self) -> float:
        """Return the stored share of a full cache, with keys and values of equal size."""
        return self.stored_states() / (2 * self.layers)

    def bytes_per_token(self, state_bytes: int) -> tuple[int, int]:
        """Return KV bytes per token stored and read in a decoding step.

        `state_bytes` is the size of a layer's keys, or values, of a single token. Storing less is not reading less: a
        reader reads its source's states again.
        """
        return round(self.stored_states() * state_bytes), round(self.read_states() * state_bytes)

    def slots(self, state: str) -> tuple[int | None, ...]:
        """Return, for each source layer that lends `state`, a slot number that no other living loan uses.

        Slots are reused once the last reader is past, so that equal groups carry equal names.
        """
        last = {source: reader for reader in range(self.layers) for source in self.reads(state, reader)}
        busy: dict[int, int] = {}  # slot -> last reader
        result: list[int | None] = [None] * self.layers
        for layer in range(self.layers):
            if last.get(layer, layer) > layer:
                slot = next(s for s in range(self.layers) if busy.get(s, -1) < layer)
                busy[slot], result[layer] = last[layer], slot
        return tuple(result)

    def merge(self, other: "DepthPlan", names: tuple[str, str]) -> "DepthPlan":
        """Combine two plans entry by entry.

        Two different changes of an entry collide, but taking away beats borrowing.

        Raises:
            ValueError: a collision, or a source that is gone; both methods are named.

        """
        vectors = {s: self._merge_vector(other, s, names) for s in (*STATES, "mlps")}
        for state in STATES:
            for reader, entry in enumerate(vectors[state]):
                for source in _layers_of(entry):
                    if source not in _layers_of(vectors[state][source]):
                        pair = f"{names[0]} with {names[1]}"
                        raise ValueError(f"{pair}: layer {reader} reads {state} of layer {source}, which owns none")
        shares = []
        for layer, (share, others) in enumerate(zip(self.value_shares, other.value_shares, strict=True)):
            shares.append(1.0 if vectors["values"][layer] is None else min(share, others))
        return DepthPlan(**vectors, value_shares=tuple(shares))

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
                both = f"{names[0]} takes {state} from {_named(source)} and {names[1]} from {_named(others)}"
                raise ValueError(f"layer {layer}: {both}; only one of them may change an entry")
        return tuple(result)

    def diagram(self) -> str:
        """Draw who reads from whom, a line for each layer."""
        lines = ["layer  queries  keys     values   mlp   cache"]
        for layer in range(self.layers):
            cells = [self.words(state, layer) for state in STATES]
            mlp = "own" if self.mlps[layer] is not None else "–"
            lines.append(f"{layer:>5}  {''.join(f'{c:<9}' for c in cells)}{mlp:<6}{self._cache_cell(layer)}")
        return "\n".join([*lines, f"cached share: {self.cached_fraction():.2%} of a full KV cache"])

    def words(self, state: str, layer: int) -> str:
        """Return in a word whose `state` a layer reads: "own", "← 3", "← 0+own", "–" for none."""
        sources = self.reads(state, layer)
        if not sources:
            return "–"
        if sources == (layer,):
            return "own"
        return "← " + "+".join("own" if source == layer else str(source) for source in sources)

    def _cache_cell(self, layer: int) -> str:
        parts = []
        for state in self.stored(layer):
            share = self.stored_share(state, layer)
            parts.append(state if share == 1 else f"{share:.0%} of {state}")
        return "+".join(parts) or "–"


def _layers_of(entry: Entry) -> tuple[int, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _named(entry: Entry) -> str:
    sources = _layers_of(entry)
    return f"layer {sources[0]}" if len(sources) == 1 else f"layers {' and '.join(map(str, sources))}"


def _check_vector(state: str, vector: Sequence[Entry]) -> None:
    for layer, entry in enumerate(vector):
        where = f"layer {layer}: {state} come from"
        if isinstance(entry, tuple) and state == "queries":
            raise ValueError(f"{where} {entry}; only keys and values may come from several layers")
        if isinstance(entry, tuple) and (len(entry) < 2 or any(a >= b for a, b in pairwise(entry))):
            raise ValueError(f"{where} {entry}; several sources are at least two layers in rising order")
        for source in _layers_of(entry):
            if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < len(vector):
                raise ValueError(f"{where} {source!r}; a source is a layer from 0 to {len(vector) - 1}")
            if source > layer:
                raise ValueError(f"{where} layer {source} above it; a source is never above its reader")
            if source not in _layers_of(vector[source]):
                raise ValueError(f"{where} layer {source}, which owns none; a source owns what it lends")


def parse_layers(text: str, layers: int) -> list[list[int]]:
    """Read "18-21,22-25" or "18+20,19+21": commas separate groups of 0-based layers, a dash is a range, a plus adds.

    Raises:
        ValueError: the text is not such a list, or names a layer that does not exist or twice.

    """
    groups = [[i for part in group.split("+") for i in _parse_range(text, part, layers)] for group in text.split(",")]
    named = [layer for group in groups for layer in group]
    if len(set(named)) != len(named):
        raise ValueError(f"layers {text!r}: a layer is named twice")
    return groups


def _parse_range(text: str, part: str, layers: int) -> range:
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
    if match is None:
        raise ValueError(f"layers {text!r}: {part!r} is neither a layer nor a range; write for example 18-21,22-25")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if not first <= last < layers:
        raise ValueError(f"layers {text!r}: {part!r} is out of range; layers go from 0 to {layers - 1}")
    return range(first, last + 1)
