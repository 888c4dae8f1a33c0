"""Which layer's queries, keys and values each layer reads: the static half of a cross-layer method.

A plan consists of index vectors. `keys[i]` is the layer whose keys layer i reads, its *source*: i itself (it computes
its own), an earlier layer, or None (the layer has no attention). A tuple of layers in rising order means that layer i
reads the cached keys of all of them and combines them. Two layers share a softmax map exactly where both their queries
and their keys have the same source.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

STATES = ("queries", "keys", "values")
CACHED = ("keys", "values")
PASSED = (*STATES, "choices")  # what a layer may pass on to later ones
# of a share times a number of tokens, which is rounded up: 0.07 · 100 is 7.000000000000001 in float64, and not 8 tokens
ROUNDING = 1e-9
Source = int | tuple[int, ...] | None  # what a layer reads of a state: its own, another layer's, several, or nothing
Vector = tuple[Source, ...]


@dataclass(frozen=True)
class TokenCount:
    """How many tokens are chosen: `tokens` below 1 is a share, rounded up, from 1 a number; at least `least`."""

    tokens: float
    least: int = 0

    def of(self, total: int) -> int:
        """Return how many of `total` tokens are chosen."""
        count = self.tokens if self.tokens >= 1 else math.ceil(self.tokens * total - ROUNDING)
        return min(total, max(int(count), self.least))

    def share(self, total: int) -> float:
        """Return which share of `total` tokens is chosen."""
        return self.of(total) / total


@dataclass(frozen=True)
class DepthPlan:
    """Sources of queries, keys and values, and which MLPs exist (`mlps[i]` is i or None); each of length L.

    `choices[i]` is the layer that chooses the tokens to which layer i attends: i itself or a layer below, None if layer
    i attends to all tokens. Empty means None for every layer. `chosen` is how many of the tokens so far are chosen.
    """

    queries: Vector
    keys: Vector
    values: Vector
    mlps: Vector
    choices: tuple[int | None, ...] = ()
    chosen: TokenCount | None = None

    @staticmethod
    def identity(layers: int) -> "DepthPlan":
        """Return the plan of a plain Transformer: every layer computes all of its states."""
        own = tuple(range(layers))
        return DepthPlan(own, own, own, own)

    def __post_init__(self):
        # lists become tuples, so that equal plans compare and hash as equal
        for name in (*STATES, "mlps"):
            entries = (tuple(entry) if isinstance(entry, list) else entry for entry in self.sources(name))
            object.__setattr__(self, name, tuple(entries))
        object.__setattr__(self, "choices", tuple(self.choices) or (None,) * self.layers)
        if len({len(self.queries), len(self.keys), len(self.values), len(self.mlps)}) != 1:
            raise ValueError("queries, keys, values and mlps must have an entry for each layer")
        for state in STATES:
            _check_vector(state, self.sources(state))
        for layer, source in enumerate(self.mlps):
            if source is not None and (type(source) is not int or source != layer):
                raise ValueError(f"layer {layer}: mlps must be the layer itself or None (dropped), got {source}")
        for layer in range(self.layers):
            sources = [self.sources(state)[layer] for state in STATES]
            if None in sources and sources != [None] * 3:
                raise ValueError(f"layer {layer}: queries, keys and values must be all None or all set, got {sources}")

        if len(self.choices) != self.layers:
            raise ValueError("choices must have an entry for each layer, or be empty")
        if self.reads_less != (self.chosen is not None) or not (self.chosen is None or self.chosen.tokens > 0):
            raise ValueError(f"chosen must be above 0 where layers choose tokens, and only there, got {self.chosen}")
        for layer, chooser in enumerate(self.choices):
            if chooser is None:
                continue
            where = f"layer {layer}: choices"
            if type(chooser) is not int or not 0 <= chooser <= layer:
                raise ValueError(f"{where} must name the layer itself, a layer below or None, got {chooser!r}")
            if not self.attends(layer) or not self.attends(chooser):
                raise ValueError(f"{where} need attention in layers {chooser} and {layer}")
            # a layer has one choice: the one that it makes for others would replace the one that it reads
            if self.choices[chooser] not in (None, chooser):
                raise ValueError(f"{where} name layer {chooser}, which attends to the choice of another layer")

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return len(self.keys)

    def sources(self, state: str) -> Vector:
        """Return the vector of "queries", "keys", "values", "mlps" or "choices"."""
        vectors = {"queries": self.queries, "keys": self.keys, "values": self.values}
        return {**vectors, "mlps": self.mlps, "choices": self.choices}[state]

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        return self.keys[layer] is not None

    def reads(self, state: str, layer: int) -> tuple[int, ...]:
        """Return the layers whose `state` a layer reads; empty if it has no attention."""
        return _layers_of(self.sources(state)[layer])

    def own_layers(self, state: str) -> list[int]:
        """Return the layers that compute this state themselves."""
        return [layer for layer, source in enumerate(self.sources(state)) if layer in _layers_of(source)]

    def stored(self, layer: int) -> tuple[str, ...]:
        """Return what the cache holds for a layer: its own keys and values, if any (queries are never cached)."""
        return tuple(state for state in CACHED if layer in self.reads(state, layer))

    def stored_states(self) -> int:
        """Return how many layers' keys or values the cache holds; a plain Transformer holds 2·L."""
        return sum(len(self.stored(layer)) for layer in range(self.layers))

    @property
    def reads_less(self) -> bool:
        """Whether a decoding step reads less than is stored: some layer attends to chosen tokens only."""
        return any(chooser is not None for chooser in self.choices)

    @property
    def beyond_sharing(self) -> str | None:
        """What layers do other than read the keys and values of all tokens, as a clause, or None."""
        return "layers attend to chosen tokens only" if self.reads_less else None

    def involves_choice(self, layer: int) -> bool:
        """Return whether a layer chooses tokens or attends to chosen ones."""
        return layer in self.choices or self.choices[layer] is not None

    def read_count(self, state: str, layer: int, context: int | None = None) -> float:
        """Return how many layers' full keys, or values, a layer reads from the cache in a decoding step.

        With `context`, the number of tokens in the cache, chosen tokens count as what they are of all. A layer that
        attends to its own choice reads all of its keys for it.
        """
        count = len(self.reads(state, layer))
        reads_all = self.choices[layer] is None or (state == "keys" and self.choices[layer] == layer)
        if reads_all or context is None or self.chosen is None:
            return count
        return count * self.chosen.share(context)

    def read_states(self, context: int | None = None) -> float:
        """Return how many layers' full keys or values a decoding step reads from the cache, with repetition."""
        return sum(self.read_count(state, layer, context) for state in CACHED for layer in range(self.layers))

    def cached_fraction(self) -> float:
        """Return the size of the cache relative to a plain Transformer's, with keys and values of equal size."""
        return self.stored_states() / (2 * self.layers)

    def bytes_per_token(self, state_bytes: int) -> tuple[int, int]:
        """Return KV bytes per token stored and read in a decoding step.

        `state_bytes` is the size of a layer's keys, or values, of a single token. Sharing reduces what is stored, not
        what is read: a reader reads its source's states again.
        """
        return self.stored_states() * state_bytes, round(self.read_states() * state_bytes)

    def slots(self, state: str) -> tuple[int | None, ...]:
        """Return a slot number for each layer whose `state` later layers read, None for the other layers.

        A slot is reused after its last reader, so that groups of equal form use equal slots.
        """
        last = {source: reader for reader in range(self.layers) for source in self.reads(state, reader)}
        busy: dict[int, int] = {}  # slot -> last reader
        result: list[int | None] = [None] * self.layers
        for layer in range(self.layers):
            if last.get(layer, layer) > layer:
                slot = next(s for s in range(self.layers) if busy.get(s, -1) < layer)
                busy[slot] = last[layer]
                result[layer] = slot
        return tuple(result)

    def merge(self, other: "DepthPlan", names: tuple[str, str]) -> "DepthPlan":
        """Combine two plans entry by entry.

        Dropping takes precedence over reading another layer; any other two changes of an entry conflict.

        Raises:
            ValueError: the plans conflict, or one drops a source of the other; both methods are named.
        """
        if self.layers != other.layers:
            raise ValueError(f"{names[0]} has {self.layers} layers and {names[1]} {other.layers}")
        vectors: dict[str, Vector] = {}
        for state in (*STATES, "mlps"):
            merged: list[Source] = []
            for layer, (first, second) in enumerate(zip(self.sources(state), other.sources(state), strict=True)):
                if second in (first, layer):
                    merged.append(first)
                elif first == layer:
                    merged.append(second)
                elif first is None or second is None:
                    merged.append(None)
                else:
                    both = f"{names[0]} reads {state} of {_named(first)} and {names[1]} of {_named(second)}"
                    raise ValueError(f"layer {layer}: {both}; only one method may change them")
            vectors[state] = tuple(merged)

        pair = f"{names[0]} with {names[1]}"
        for state in STATES:
            for reader, source in enumerate(vectors[state]):
                for layer in _layers_of(source):
                    if layer not in _layers_of(vectors[state][layer]):
                        raise ValueError(
                            f"{pair}: layer {reader} reads {state} of layer {layer}, which has no {state} of its own"
                        )

        if self.reads_less and other.reads_less:
            raise ValueError(f"{names[0]} and {names[1]} both choose the tokens that layers attend to; only one may")
        plan = self if self.reads_less else other
        # a layer whose attention is dropped needs no choice
        keys = vectors["keys"]
        choices = tuple(None if key is None else chooser for chooser, key in zip(plan.choices, keys, strict=True))
        for layer, chooser in enumerate(choices):
            if chooser is not None and keys[chooser] is None:
                raise ValueError(f"{pair}: layer {layer} attends to the choice of layer {chooser}, which is dropped")
        chosen = None if choices == (None,) * self.layers else plan.chosen
        return DepthPlan(**vectors, choices=choices, chosen=chosen)

    def diagram(self) -> str:
        """Return a table of what each layer reads, has and stores, a line per layer."""
        states = PASSED if self.reads_less else STATES
        lines = [f"layer  {''.join(f'{state:<9}' for state in states)}mlp   cache"]
        for layer in range(self.layers):
            cells = "".join(f"{self.source_label(state, layer):<9}" for state in states)
            mlp = "own" if self.mlps[layer] is not None else "–"
            lines.append(f"{layer:>5}  {cells}{mlp:<6}{'+'.join(self.stored(layer)) or '–'}")
        return "\n".join([*lines, f"KV cache: {self.cached_fraction():.2%} of a full one"])

    def source_label(self, state: str, layer: int) -> str:
        """Return a label of the layers whose `state` a layer reads: "own", "← 3", "← 0+own", "–" for none.

        A layer that attends to all tokens reads no choice: "all".
        """
        sources = self.reads(state, layer)
        if not sources:
            return "all" if state == "choices" and self.attends(layer) else "–"
        if sources == (layer,):
            return "own"
        return "← " + "+".join("own" if source == layer else str(source) for source in sources)


def _layers_of(source: Source) -> tuple[int, ...]:
    if source is None:
        return ()
    return source if isinstance(source, tuple) else (source,)


def _named(source: Source) -> str:
    layers = _layers_of(source)
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {' and '.join(map(str, layers))}"


def _check_vector(state: str, vector: Sequence[Source]) -> None:
    for reader, source in enumerate(vector):
        where = f"layer {reader}: {state}"
        if isinstance(source, tuple) and state == "queries":
            raise ValueError(f"{where} must have a single source, got {source}; only keys and values may have several")
        if isinstance(source, tuple) and (len(source) < 2 or any(a >= b for a, b in pairwise(source))):
            raise ValueError(f"{where}: a tuple of sources must be at least two layers in rising order, got {source}")
        for layer in _layers_of(source):
            # True is an int, and would be layer 1
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(vector):
                raise ValueError(f"{where}: a source must be a layer from 0 to {len(vector) - 1}, got {layer!r}")
            if layer > reader:
                raise ValueError(f"{where}: a source must not be above its reader, got layer {layer}")
            if layer not in _layers_of(vector[layer]):
                raise ValueError(f"{where}: a source must have {state} of its own, got layer {layer}, which has none")
