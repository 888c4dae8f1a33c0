"""What the measures say, in words and in numbers: sinks, redundant layers, candidate superblocks and their cache.

Everything here is a candidate that rests on a named measure; only a retrofit shows what it costs.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from crosslayer.probe.maps import is_causal
from crosslayer.probe.visit import AttentionCall, stored_states

SINK_SHARE = 0.3  # of all attention, from which a layer is said to sink
PEAK = 100.0  # hidden norm of token 0 over the median, from which it is a massive activation
DRAIN = 0.5  # value norm of token 0 over the median, below which it is a drain
GAP = 0.05  # between the two similarities, from which the first column is said to matter
PAPER_SIZE = 4  # UniAttn's superblock

Groups = list[list[int]]


@dataclass(frozen=True)
class LayerShape:
    """Heads, mask and score function of one attention layer; layers may share only where all of it agrees.

    `stored` says which of keys and values the layer keeps in the cache; it does not count in the comparison.
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
    stored: tuple[str, ...] = field(default=("keys", "values"), compare=False)

    @staticmethod
    def of(call: AttentionCall, causal: bool, kind: str | None, stored: tuple[str, ...]) -> "LayerShape":
        """Read the shape off a visited call."""
        return LayerShape(
            heads=call.query.shape[1],
            kv_heads=call.key.shape[1],
            key_size=call.key.shape[3],
            value_size=call.value.shape[3],
            causal=causal,
            kind=kind,
            window=call.window,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks is not None,
            stored=stored,
        )

    @staticmethod
    def read(calls: list[AttentionCall], config: PreTrainedConfig, layers: int) -> list["LayerShape | None"]:
        """Return the shape of each layer of a stack, None for one that was not visited."""
        causal = {id(call.mask): is_causal(call) for call in {id(c.mask): c for c in calls}.values()}
        kinds: list[str | None] = list(getattr(config, "layer_types", None) or [None] * layers)
        for layer, rotated in enumerate(getattr(config, "no_rope_layers", None) or []):  # 1: rotary, 0: none
            kinds[layer] = kinds[layer] if rotated else f"{kinds[layer] or 'attention'} without rope"
        found: list[LayerShape | None] = [None] * layers
        for call in calls:
            one = call.causal if call.mask is None else causal[id(call.mask)]
            found[call.layer] = LayerShape.of(call, one, kinds[call.layer], stored_states(config, call.layer))
        return found

    @property
    def mask(self) -> str:
        """The mask in words."""
        words = "causal" if self.causal else "bidirectional"
        if self.window is not None:
            return f"{words}, window {self.window}"
        return words if self.kind in (None, "full_attention") else f"{words}, {self.kind}"

    def cached(self, length: int) -> tuple[int, int]:
        """Return the elements of keys and of values that one sequence of `length` tokens leaves in the cache.

        A sliding layer keeps what the next token can see beside itself: window − 1 tokens, as in transformers.
        """
        tokens = length if self.window is None else min(length, self.window - 1)
        sizes = {"keys": self.key_size, "values": self.value_size}
        keys, values = (self.kv_heads * size * tokens if s in self.stored else 0 for s, size in sizes.items())
        return keys, values

    def even_share(self, length: int) -> float:
        """Return a'_0 if every row spread its attention evenly over what it may see."""
        if not self.causal:
            return 1 / length
        rows = length if self.window is None else min(length, self.window)
        return sum(1 / seen for seen in range(1, rows + 1)) / length


def verdict(measures: dict[str, Any], shapes: list[LayerShape | None], length: int) -> dict[str, Any]:
    """Return the verdict with its sentences under "words"."""
    sink = _sink(measures, shapes, length)
    redundancy = {
        "attention": _ranked(measures["attention_io_similarity"]["mean"])
        if "attention_io_similarity" in measures
        else [],
        "layers": _ranked(measures["layer_io_similarity"]["mean"]),
    }
    result: dict[str, Any] = {"sink": sink, "redundant": redundancy, "superblocks": None, "kv_share": None}
    if all(shape is None or shape.causal for shape in shapes):
        paper = paper_groups(shapes)
        followers = len(shapes) // 2 // PAPER_SIZE * (PAPER_SIZE - 1)  # the paper's number, whatever the masks allow
        similarity = np.array(measures["map_similarity_without_first"]["mean"], dtype=float)
        similar = similar_groups(similarity, shapes, followers)
        result["superblocks"] = {
            "paper": paper,
            "similar": similar,
            "resting_on": "map_similarity_without_first",
        }
        dropped = [entry["layer"] for entry in redundancy["attention"]][:followers]
        result["kv_share"] = _shares(shapes, length, {"paper": paper, "similar": similar}, dropped)
    keys = ("map_similarity", "map_similarity_without_first")
    result["neighbours"] = {key: neighbours(measures[key]["mean"]) for key in keys}
    result["words"] = _words(result)
    return result


def paper_groups(shapes: list[LayerShape | None], size: int = PAPER_SIZE) -> Groups:
    """Return UniAttn's superblocks: `size` layers each, from the last layer down within the top half, leftovers alone.

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


def similar_groups(similarity: np.ndarray, shapes: list[LayerShape | None], followers: int) -> Groups:
    """Return contiguous groups with `followers` followers in all, joined greedily by the lowest similarity inside.

    Joining two neighbouring groups makes one follower more; at each step the union whose least similar pair is most
    similar is made (complete linkage). `similarity` is (L, L), without the first column.
    """
    groups: Groups = [[i] for i, shape in enumerate(shapes) if shape is not None]
    for _ in range(followers):
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


def may_share(one: LayerShape | None, other: LayerShape | None) -> bool:
    """Return whether two layers may share maps or keys: same heads, sizes, mask and soft-cap."""
    return one is not None and one == other


def _shares(shapes: list[LayerShape | None], length: int, groupings: dict[str, Groups], dropped: list[int]) -> dict:
    """Return the share of cached elements that stays, for each method on each grouping."""
    cells = [(0, 0) if shape is None else shape.cached(length) for shape in shapes]
    total = sum(k + v for k, v in cells)
    result: dict[str, Any] = {"length": length, "elements": total}
    for name, groups in groupings.items():
        followers = [layer for group in groups for layer in group[1:]]
        keys, both = sum(cells[i][0] for i in followers), sum(sum(cells[i]) for i in followers)
        result[name] = {"uniattn": 1 - keys / total, "cla": 1 - both / total, "followers": len(followers)}
    lost = sum(sum(cells[i]) for i in dropped)
    result["llmdrop"] = {"layers": sorted(dropped), "kv": 1 - lost / total}
    return result


def _sink(measures: dict[str, Any], shapes: list[LayerShape | None], length: int) -> dict[str, Any]:
    share = np.array(measures["first_token_share"]["mean"], dtype=float)
    hidden = np.array(measures["hidden_norm_ratio"]["mean"], dtype=float)
    value = np.array(measures["value_norm_ratio"]["mean"], dtype=float)
    even = np.array([np.nan if shape is None else shape.even_share(length) for shape in shapes])
    layers = [int(i) for i in np.flatnonzero((share > SINK_SHARE) & (share > 2 * even))]  # even: much in short texts
    peaks = [int(i) for i in np.flatnonzero(hidden > PEAK)]
    strongest = int(np.nanargmax(share))
    return {
        "layers": layers,
        "begins": layers[0] if layers else None,
        "strongest": strongest,
        "strongest_share": float(share[strongest]),
        "over_even": float(share[strongest] / even[strongest]),
        "peaks": peaks,
        "drains": [int(i) for i in np.flatnonzero(value < DRAIN)],
    }


def _ranked(mean: list[float | None]) -> list[dict[str, Any]]:
    known = [(i, value) for i, value in enumerate(mean) if value is not None]
    return [{"layer": i, "similarity": value} for i, value in sorted(known, key=lambda pair: -pair[1])]


def ranges(layers: list[int]) -> str:
    """Write sorted layers as ranges: [1, 2, 3, 7] → "1-3, 7"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _words(result: dict[str, Any]) -> list[str]:
    sink = result["sink"]
    words = [_sink_words(sink)]
    if sink["peaks"]:
        first = sink["peaks"][0]
        origin = f"layer {first - 1} writes it" if first else "it is there from the embedding"
        words.append(
            f"Its hidden state towers over the others (norm above {PEAK:.0f} × their median) in the input of layers "
            f"{ranges(sink['peaks'])}; {origin}."
        )
    if sink["drains"]:
        words.append(f"Its value states are drained (norm below half the median) in layers {ranges(sink['drains'])}.")
    attention = result["redundant"]["attention"][:4]
    if attention:
        named = ", ".join(f"{entry['layer']} ({entry['similarity']:.3f})" for entry in attention)
        words.append(
            f"Attention changes its input least, by cos(x, x + Attn(x)), in layers {named}: candidates for LLMDrop."
        )
    if result["superblocks"] is None:
        words.append("The model is bidirectional and keeps no KV cache, so no cache can be saved.")
        return words
    words += _sharing_words(result)
    return words


def neighbours(matrix: list[list[float | None]]) -> float | None:
    """Return the mean similarity of consecutive attention layers in the top half, None without such a pair."""
    layers = [i for i in range(len(matrix)) if matrix[i][i] is not None]
    pairs = [(a, b) for a, b in zip(layers, layers[1:], strict=False) if a >= len(matrix) // 2]
    known = [value for a, b in pairs if (value := matrix[b][a]) is not None]
    return sum(known) / len(known) if known else None


def _sink_words(sink: dict[str, Any]) -> str:
    if not sink["layers"]:
        return (
            f"No layer gives the first token more than {SINK_SHARE:.0%} of its attention; the most is "
            f"{sink['strongest_share']:.1%}, in layer {sink['strongest']} ({sink['over_even']:.1f} × even attention)."
        )
    return (
        f"The first token is a sink: it takes more than {SINK_SHARE:.0%} of all attention in layers "
        f"{ranges(sink['layers'])}, beginning at layer {sink['begins']}; the most is {sink['strongest_share']:.0%}, "
        f"in layer {sink['strongest']}."
    )


def _sharing_words(result: dict[str, Any]) -> list[str]:
    blocks, share = result["superblocks"], result["kv_share"]
    words = []
    whole, rest = result["neighbours"].values()
    if whole is not None and rest is not None:
        link = "but" if rest < whole - GAP else "and"
        words.append(
            f"Neighbouring maps in the top half have a cosine of {whole:.2f}, "
            f"{link} {rest:.2f} without the first column."
        )
    for name in ("paper", "similar"):
        if blocks[name]:
            words.append(_blocks_words(name, blocks, share))
    if not blocks["paper"] and not blocks["similar"]:
        words.append("No neighbouring layers may share maps: there are too few of them, or their masks differ.")
    if share["llmdrop"]["layers"]:
        words.append(
            f"Dropping the attention of layers {ranges(share['llmdrop']['layers'])} (LLMDrop's measure) would leave "
            f"{share['llmdrop']['kv']:.2%}."
        )
    return words


def _blocks_words(name: str, blocks: dict[str, Any], share: dict[str, Any]) -> str:
    """Say what a rule gives; the same saving of both is by construction, the same blocks are not."""
    groups = " ".join(f"[{ranges(group)}]" for group in blocks[name])
    kept = f"{share[name]['uniattn']:.2%} with UniAttn and {share[name]['cla']:.2%} with CLA"
    if name == "paper":
        rule = "UniAttn's rule (blocks of 4 in the top half) gives the candidate superblocks"
        return f"{rule} {groups}: the KV cache would shrink to {kept}."
    rule = "Map similarity without the first column"
    if any(abs(share["paper"][key] - share["similar"][key]) > 1e-9 for key in ("uniattn", "cla", "followers")):
        return f"{rule} gives the candidate superblocks {groups}: the KV cache would shrink to {kept}."
    asked = f"{rule}, asked for as many followers ({share['similar']['followers']}) and so for the same shares,"
    if blocks["paper"] == blocks["similar"]:
        return f"{asked} gives the same superblocks: what depth alone says, the maps say too."
    return f"{asked} gives the candidate superblocks {groups}."
