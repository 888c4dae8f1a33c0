"""What the measures say, in words and in numbers: sinks, redundant layers, candidate superblocks and their cache.

Everything here is a candidate that rests on a named measure; only a retrofit shows what it costs.
"""

from typing import Any

import numpy as np

from crosslayer.diagnosis.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.probe.shapes import LayerShape

SINK_SHARE = 0.3  # of all attention, from which a layer is said to sink
PEAK = 100.0  # hidden norm of token 0 over the median, from which it is a massive activation
DRAIN = 0.5  # value norm of token 0 over the median, below which it is a drain
GAP = 0.05  # between the two similarities, from which the first column is said to matter


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
