"""The picture of the README: share of the KV cache that is kept against perplexity on text that nothing was fitted to.

    python benchmarks/front_page.py            # docs/figures/cache_and_perplexity.svg, from results that are committed
    python benchmarks/front_page.py --measure  # quantized caches on the same windows again: results/front_page.json

SmolLM2-135M, 16 windows of 256 tokens of C code; perplexity over the original's with a paired 95 % bootstrap interval.
The wirings and their fits are those of `benchmarks/transfer.py`, the distilled ones of `benchmarks/recovery.py`. A
quantized cache's share is that of the bfloat16 cache at 2,048 tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vl_convert
from torch.nn import functional

from crosslayer import CrossLayerConfig, load_model, plan
from crosslayer.cache.running import smaller_cache
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.environment import environment
from crosslayer.output.chart import VERSION
from crosslayer.output.panel import COLORS
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.estimate import Estimate
from crosslayer.wiring.kv_bits import KINDS

HERE = Path(__file__).parent
SHAPE = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}  # SmolLM2's
WIRINGS = {  # a line each: the wirings of benchmarks/transfer.py, and how they were fitted
    "UniAttn: maps shared": (("uniattn-pairs", "uniattn-fours"), "mixture, refit"),
    "CLA: keys, values shared": (("cla-pairs", "cla-fours"), "mixture, refit"),
    "attention dropped, searched": (("repaired-83", "repaired-70", "repaired-50"), "mixture"),
}
DISTILLED = {
    "dropped, distilled 16 minutes": "distillation, embedded text:200704",
    "distilled 77 minutes": "distillation:1601536",
}
QUANTISED, BITS = "no layer changed: 4 bits, fp8", ("fp8", "4")
WAYS = (*WIRINGS, *DISTILLED, QUANTISED)

SIDES = {  # where the name of a way stands beside its smallest cache: alignment, and pixels to the right and down
    "UniAttn: maps shared": ("left", 12, 0),
    "attention dropped, searched": ("left", 10, -8),
    "distilled 77 minutes": ("left", 6, 14),
    QUANTISED: ("left", 8, -12),
}


def estimate(before: list[float], after: list[float], documents: list[int]) -> Estimate:
    """Return the ratio of perplexities over windows (N,), paired."""
    return Bootstrap(tuple(documents)).ratio(np.array(after) - np.array(before))


@torch.no_grad()
def measure() -> None:
    """Write the loss of each window with quantized caches, and the shares of the cache."""
    model, tokenizer = load_model("smollm2", dtype="float32")
    windows = split_domains(embedded_domains(), tokenizer, parts={"judged": {"code": 16}}, length=256)["judged"]

    def losses() -> list[float]:
        logits = [model(ids[None], use_cache=False).logits[0, :-1] for ids in windows.ids]
        return [float(functional.cross_entropy(one, ids[1:])) for one, ids in zip(logits, windows.ids, strict=True)]

    result: dict[str, Any] = {"before": losses(), "documents": list(windows.documents), "environment": {}}
    whole = plan(model, length=2048, dtype="bfloat16").stored_bytes
    for bits in BITS:
        stored = plan(model, length=2048, dtype="bfloat16", kv_dtype=KINDS[bits]).stored_bytes
        with smaller_cache(model, bits=bits):
            result[bits] = {"share": stored / whole, "after": losses()}
    result["environment"] = environment().model_dump()
    (HERE / "results" / "front_page.json").write_text(json.dumps(result, indent=1) + "\n")


def rows(name: str, points: dict[float, Estimate]) -> list[dict[str, Any]]:
    """Return what is drawn of a way to a smaller cache, by share of the cache; the last point has its name."""
    return [
        {"way": name, "share": share, "ratio": point.value, "low": point.low, "high": point.high}
        | {"label": name if share == min(points) else ""}
        for share, point in points.items()
    ]


def measured() -> list[dict[str, Any]]:
    """Return all points."""
    transfer = json.loads((HERE / "results" / "transfer.json").read_text())
    recovery = json.loads((HERE / "results" / "recovery.json").read_text())
    result = []
    for name, (wirings, fit) in WIRINGS.items():
        points = {}
        for wiring in wirings:
            cell = transfer[wiring]["cells"]["code"][fit]
            share = CrossLayerConfig(**SHAPE, cross_layer=transfer[wiring]["methods"]).plan.cached_fraction()
            points[share] = estimate(cell["before"], cell["after"], cell["documents"])
        result += rows(name, points)
    for name, key in DISTILLED.items():
        row = recovery[key]
        code = [window for window, domain in enumerate(row["domains"]) if domain == "code"]
        before, after, documents = ([row[part][window] for window in code] for part in ("before", "after", "documents"))
        result += rows(name, {0.7: estimate(before, after, documents)})
    quantized = json.loads((HERE / "results" / "front_page.json").read_text())
    points = {
        quantized[bits]["share"]: estimate(quantized["before"], quantized[bits]["after"], quantized["documents"])
        for bits in BITS
    }
    result += rows(QUANTISED, points)
    return result


def chart(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the picture as a Vega-Lite chart; every way has its name beside its smallest cache."""
    x = {"field": "share", "type": "quantitative", "title": "share of the KV cache that is kept"}
    x |= {
        "scale": {"domain": [0.25, 1]},
        "axis": {"format": ".0%", "grid": False, "values": [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]},
    }
    y = {"field": "ratio", "type": "quantitative", "title": "perplexity × the original's (log scale, 95% interval)"}
    y |= {
        "scale": {"type": "log", "domain": [1, 5]},
        "axis": {"values": [1, 1.2, 1.5, 2, 3, 4, 5], "format": "~r", "titlePadding": 14},
    }
    color = {"field": "way", "legend": None, "scale": {"domain": WAYS, "range": COLORS}}
    ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    title = {"text": "SmolLM2-135M: what a smaller KV cache costs on code", "anchor": "start", "fontSize": 15}
    title |= {
        "subtitle": [
            "C source code, unseen in fitting and training; not distilled unless it says so",
            "CLA and UniAttn share in fixed blocks of two (right) or four layers (left)",
        ]
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": title,
        "width": 640,
        "height": 340,
        "background": "white",
        "padding": 16,
        "data": {"values": points},
        "encoding": {"x": x, "y": y, "color": color},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.5, "strokeDash": [4, 4]}},
            {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": ends},
            {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1}},
            *(name_beside(way, *SIDES.get(way, ("right", -10, 0))) for way in WAYS),
        ],
        "config": {"font": "system-ui, sans-serif", "view": {"stroke": None}, "axis": {"gridColor": "#e6e8ee"}},
    }


def name_beside(way: str, align: str, dx: int, dy: int) -> dict[str, Any]:
    """Return the name of a way beside its last point."""
    mark = {"type": "text", "align": align, "dx": dx, "dy": dy, "fontSize": 12, "fontWeight": "bold"}
    return {
        "transform": [{"filter": {"field": "label", "equal": way}}],
        "mark": mark,
        "encoding": {"text": {"field": "label"}},
    }


def draw_front_page() -> list[dict[str, Any]]:
    """Draw it, and return what was drawn."""
    points = measured()
    svg = vl_convert.vegalite_to_svg(chart(points), vl_version=VERSION)
    (HERE.parent / "docs" / "figures" / "cache_and_perplexity.svg").write_text(svg)
    return points


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    for point in draw_front_page():
        print("{way}: {share:.1%}, {ratio:.3f} ({low:.3f} to {high:.3f})".format(**point))
