"""What was found, as a page: twelve sentences, each with a figure and the command behind it, out of committed results.

    python benchmarks/findings.py            # docs/results/findings.md and docs/figures/*.svg
    python benchmarks/findings.py --measure  # benchmarks/results/map_similarity.json, with smollm2; a minute

Every number on the page is computed here from `benchmarks/results` and `docs/evidence`.
"""

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from four_models import on_four_models
from front_page import draw_front_page

import crosslayer
from crosslayer import CrossLayerConfig
from crosslayer.environment import environment
from crosslayer.judge.damage import Losses
from crosslayer.judge.rows import kl, perplexity
from crosslayer.output.chart import save_svg
from crosslayer.output.panel import Dots, Heat, Line, Panel
from crosslayer.stats.estimate import band
from crosslayer.wiring.kv_bits import KINDS

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
EVIDENCE = ROOT / "docs" / "evidence"
MAPS = RESULTS / "map_similarity.json"
PAGE = ROOT / "docs" / "results" / "findings.md"
SHAPE = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}  # SmolLM2's
UNSEEN = ("science", "speeches", "code")  # domains that nothing was fitted on
LABELS = {"all tokens": "all", "without the first token": "without_first"}
CACHES: dict[str, tuple[str, list[Any]]] = {  # of results/kv_bits.json: title and methods
    "smollm2": ("", []),
    "drop5": ("5 dropped", [{"name": "drop", "attention": [6, 7, 17, 22, 25]}]),
    "drop9": ("9 dropped", [{"name": "drop", "attention": [5, 6, 7, 17, 24, 25, 27, 28, 29]}]),
    "uniattn": (
        "UniAttn",
        [{"name": "uniattn", "superblocks": [[18, 19, 20, 21], [22, 23, 24, 25], [26, 27, 28, 29]]}],
    ),
}
HEAD = """# Findings

Each finding has a paragraph, a figure and a command. The model is SmolLM2-135M on a CPU unless another is named.
Intervals are 95%, over text windows, items, sequences or pairs of runs; only the losses of finding 11 are compared
over training seeds. The last section, [On four models](#on-four-models), repeats seven findings on Gemma 3 and
Qwen2.5-Coder. Two of these do not hold everywhere: 5 and 9. For details and negative results, see the pages of the
papers ([ResFormer](../papers/resformer.md), [Attention Residuals](../papers/attention-residuals.md),
[the waiver](../papers/waiver.md), [UniAttn](../papers/uniattn.md)), the
[tables of retrofits](../evidence/README.md#what-retrofits-cost-smollm2-135m), and [the log](../LOG.md).
`python benchmarks/findings.py` writes this page from committed results.
"""


@dataclass(frozen=True)
class Finding:
    """A finding: its heading, what the numbers say, the figure's file name and the command that measured it."""

    title: str
    text: str
    figure: str
    command: str


def results(name: str) -> Any:
    """Return a committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def losses(cells: Iterable[dict[str, Any]]) -> Losses:
    """Return the losses on several domains as one sample; documents of different domains stay apart."""
    cells = list(cells)
    means = {key: np.concatenate([cell[key] for cell in cells]) for key in ("before", "after", "kl")}
    documents = [1000 * number + document for number, cell in enumerate(cells) for document in cell["documents"]]
    return Losses(means, tuple(documents))


def spread(low: float, high: float, digits: int = 2) -> str:
    """Return an interval as it stands in a sentence."""
    return f"{low:.{digits}f}-{high:.{digits}f}"


def retrieval() -> Finding:
    """Perplexity beside retrieval, of the distilled retrofits."""
    names = {
        "uniattn, distilled": "UniAttn",
        "uniattn-none, distilled": "no W_c",
        "drop, distilled": "9 dropped",
        "drop-5, distilled": "5 dropped",
        "smollm2": "the original",
    }
    rows = {row["name"]: row for row in results("quality-recovered")["rows"]}
    values, shown = [], {}
    for name, title in names.items():
        ratio = rows[name]["perplexity_ratio"][0]
        retrieved = sum(round(cell["share"] * cell["n"]) for cell in rows[name]["needles"])
        values.append((ratio, retrieved))
        shown[f"{title} (×{ratio:.2f})"] = (float(retrieved), None, None)
    panel = dots(
        "retrieval",
        "Perplexity does not show lost retrieval",
        "hidden numbers retrieved, of 40 (after the name: perplexity)",
        shown,
    )
    save_svg(panel, FIGURES)
    ratios = ", ".join(f"×{ratio:.2f}" for ratio, _ in values[:3])
    counts = ", ".join(str(count) for _, count in values[:3])
    return Finding(
        "Perplexity does not show lost retrieval",
        f"After forty steps of distillation, UniAttn, UniAttn without W_c, and a model with nine attention layers "
        f"dropped have nearly the same perplexity ({ratios}). They retrieve {counts} of 40 numbers hidden in their "
        "context; the original retrieves all 40. Before distillation, the last one retrieved 9.",
        panel.key,
        "python benchmarks/quality.py smollm2 uniattn drop --tasks TASKS --limit 150 --needles 2 --lengths "
        "256,512,1024,2048 "
        "--json FILE",
    )


def cache_bytes(name: str, kv_bits: str | None) -> int:
    """Return the bytes of a cache in `CACHES`, quantized or in bfloat16, at 2,048 tokens."""
    config = CrossLayerConfig(**SHAPE, cross_layer=CACHES[name][1])
    kind = None if kv_bits is None else KINDS[kv_bits]
    return crosslayer.plan(config, length=2048, dtype="bfloat16", kv_dtype=kind).stored_bytes


def bits() -> Finding:
    """Quantized caches against fewer layers."""
    rows, shown = {(row["name"], row["kv_bits"]): row for row in results("kv_bits")["rows"]}, {}
    shares = {key: cache_bytes(*key) / cache_bytes("smollm2", None) for key in rows}
    for (name, kv_bits), row in rows.items():
        kind = "fp8" if kv_bits == "fp8" else kv_bits and f"{kv_bits} bits"
        title = ", ".join(filter(None, (CACHES[name][0], kind)))
        if title:
            shown[f"{title} ({shares[name, kv_bits]:.0%})"] = tuple(row["kl"])
    panel = dots("kv_bits", "Fewer bits against fewer layers", "KL, nats per token (after the name: the cache)", shown)
    save_svg(panel, FIGURES)
    four, drop, both = (rows[row] for row in (("smollm2", "4"), ("drop5", None), ("drop5", "4")))
    found = [" and ".join(f"{round(cell['share'] * cell['n'])}" for cell in row["needles"]) for row in (four, drop)]
    return Finding(
        "Fewer bits cost less than fewer layers",
        f"On six unseen domains, a 4-bit cache has {shares['smollm2', '4']:.0%} of the bytes of the 16-bit cache and a "
        f"KL of {four['kl'][0]:.4f} ({spread(*four['kl'][1:], 4)}) nats per token. Dropping attention in five searched "
        f"layers keeps {shares['drop5', None]:.0%} at a KL of {drop['kl'][0]:.2f} ({spread(*drop['kl'][1:])}); both "
        f"together keep {shares['drop5', '4']:.0%} at {both['kl'][0]:.2f}. Of twenty hidden numbers each at 512 and at "
        f"2,048 tokens, the 4-bit cache retrieves {found[0]}, and the model without attention in five layers "
        f"{found[1]}. Quantize first. "
        "Change layers when reads or compute matter, or when the model was trained that way.",
        panel.key,
        "crosslayer needles smollm2 --baseline smollm2 --lengths 512 --keys 1 --kv-bits 4",
    )


def dropping() -> Finding:
    """Searched dropping against sharing in fixed blocks."""
    points = {(point["way"], round(point["share"], 2)): point for point in draw_front_page()}
    drop, cla = points["attention dropped, searched", 0.7], points["CLA: keys, values shared", 0.7]
    return Finding(
        "Dropping searched attention layers costs less than sharing fixed blocks",
        "At 70% of the KV cache, on 16 windows of unseen C code and before any training, dropping attention in nine "
        f"searched layers multiplies perplexity by {drop['ratio']:.2f} ({spread(drop['low'], drop['high'])}). Sharing "
        f"keys and values in three fixed blocks of four layers multiplies it by {cla['ratio']:.2f} "
        f"({spread(cla['low'], cla['high'])}).",
        "cache_and_perplexity",
        "python benchmarks/front_page.py",
    )


def distillation() -> Finding:
    """Recovery by distillation."""
    rows = results("recovery")
    short, long = "distillation, embedded text:200704", "distillation:1601536"
    start, middle, end = (kl(losses([rows[name]])).value for name in ("fit:18432", short, long))
    return Finding(
        "A quarter of an hour of distillation brings most of the gain of a longer run",
        f"At 70% of the cache, KL to the original on unseen text falls from {start:.2f} to {middle:.2f} nats per token "
        f"with 0.2 million tokens of embedded text (16 minutes on two cores), and to {end:.2f} with 1.6 million tokens "
        "(77 minutes). Fitting the linear maps to sixteen times as much text, without training, gains almost nothing.",
        "recovery",
        "crosslayer retrofit smollm2 --kv-budget 0.7 --calibration 72 --length 256 --out small --heal heal-distill",
    )


def corpus() -> Finding:
    """W_c by the text that it is fitted on."""
    cells = results("transfer")["uniattn-4"]["cells"]
    fits, domains = ["none", "books", "web", "docs", "mixture"], ["books", "web", "docs", "code"]
    ratios = {fit: {domain: perplexity(losses([cells[domain][fit]])).change for domain in domains} for fit in fits}
    values: list[list[float | None]] = [
        [100 * (ratios[fit][domain].value - 1) for domain in domains] for fit in reversed(fits)
    ]
    labels = {float(row): fit for row, fit in enumerate(reversed(fits))}
    panel = Panel(
        "compensation_by_text", "Rise in perplexity (%) by the text that W_c is fitted on", "",
        "evaluated on", "W_c fitted on", heat=Heat(range(4), range(5), values, "%", (0, 220), written=True),
        x_ticks={float(column): domain for column, domain in enumerate(domains)}, y_ticks=labels,
    )  # fmt: skip
    save_svg(panel, FIGURES)
    books, code = ratios["books"]["books"], ratios["books"]["code"]
    mixed = ratios["mixture"]["code"]
    return Finding(
        "Linear compensation learns its calibration text",
        "With UniAttn at 85% of the cache and W_c, the linear compensation, fitted on books, perplexity is "
        f"×{books.text(2)} on books and ×{code.text(2)} on code. With W_c fitted on a mixture of three "
        f"domains, it is ×{mixed.text(2)} on code. A report on calibration text is therefore too optimistic. "
        "Gemma 3 270M shows the same; on Qwen2.5-Coder-0.5B no difference is seen.",
        panel.key,
        "python benchmarks/transfer.py --only uniattn-4",
    )


def refit() -> Finding:
    """W_o refitted together with W_c."""
    cells = results("transfer")["cla-pairs"]["cells"]
    fits = {
        "no fit": "none", "W_c alone": "mixture", "W_o alone": "mixture, refit-o", "W_o and W_c": "mixture, refit",
    }  # fmt: skip
    costs = {name: kl(losses(cells[domain][fit] for domain in UNSEEN)).change for name, fit in fits.items()}
    panel = dots("refit", "What is fitted after CLA pairs in layers 24-29", "KL to the original (nats per token)", {
        name: (cost.value, *cost.interval) for name, cost in costs.items()
    })  # fmt: skip
    save_svg(panel, FIGURES)
    text = "; ".join(f"{name} {cost.text()}" for name, cost in costs.items())
    return Finding(
        "If layers share keys and values, refit the output projection too",
        f"KL to the original on unseen text: {text}. If a layer reads another layer's values, its W_o was trained for "
        "different values. Fitting W_o and W_c together, in closed form on 18,432 tokens, removes most of the damage.",
        panel.key,
        "python benchmarks/transfer.py --only cla-pairs --judge science speeches code",
    )


def search() -> Finding:
    """A search that repairs each candidate before it judges it, against one that does not."""
    cells, lines, gaps = results("transfer"), [], {}
    for name, shown in (("bare", "candidates as they are"), ("repaired", "candidates repaired first")):
        shares, costs = [], []
        for percent in (83, 70, 50):
            entry = cells[f"{name}-{percent}"]
            shares.append(CrossLayerConfig(**SHAPE, cross_layer=entry["methods"]).plan.cached_fraction())
            costs.append(kl(losses(entry["cells"][domain]["mixture"] for domain in UNSEEN)).change)
        lines.append(Line(shown, shares, *band(costs)))
    for percent in (83, 70, 50):
        sides = (
            losses(cells[f"{name}-{percent}"]["cells"][d]["mixture"] for d in UNSEEN) for name in ("repaired", "bare")
        )
        gaps[percent] = kl(*sides).change
    panel = Panel(
        "search", "Which layers to drop: two searches", "", "share of the KV cache that is kept",
        "KL to the original (nats per token)", lines, x_ticks={0.5: "50%", 0.7: "70%", 0.8333: "83%"},
    )  # fmt: skip
    save_svg(panel, FIGURES)
    return Finding(
        "A search must repair candidates before it ranks them",
        "A layer that is expensive to drop may be cheap to drop once a linear map replaces it. Ranking repaired "
        f"candidates instead of bare ones lowers KL on unseen text, in nats per token: {gaps[70].text()} at 70% of the "
        f"cache, {gaps[50].text()} at 50%, and {gaps[83].text()} at 83%.",
        panel.key,
        "python benchmarks/transfer.py --only repaired-70 bare-70 --judge science speeches code",
    )


def similarity() -> Finding:
    """How alike neighboring maps are, with and without the first token."""
    measured = json.loads(MAPS.read_text())
    layers = [float(layer) for layer in measured["layers"]]
    panel = Panel(
        "map_similarity", "Attention maps of neighboring layers", "", "layer (compared with the one below)", "cosine",
        [Line(name, layers, measured[key]) for name, key in LABELS.items()],
        y_range=(0, 1),
    )  # fmt: skip
    save_svg(panel, FIGURES)
    half = [number for number, layer in enumerate(measured["layers"]) if layer > measured["num_layers"] // 2]
    low = [number for number in range(len(layers)) if number not in half]
    (whole, below), (rest, rest_below) = (
        [np.mean([measured[key][number] for number in part]) for part in (half, low)] for key in LABELS.values()
    )
    others, gain = [], None
    for model in ("qwen", "gemma3"):
        neighbors = crosslayer.load_result(EVIDENCE / "outputs" / model).verdict.neighbors
        others.append(neighbors.statistics_without_first.top_less_bottom)
    for row in crosslayer.load_result(EVIDENCE / "uniattn" / "layers").rows:
        if (row.candidate, row.quantity, row.scope, row.against) == ("--layers auto", "KL", "all", "the first"):
            gain = row.change
    return Finding(
        "Much of the similarity between attention maps comes from the common sink",
        f"In the upper half of the model, neighboring maps have a mean cosine of {whole:.2f}. Without the first token, "
        f"to which all of them attend, it is {rest:.2f}. In UniAttn's Table 11, the maps of upper layers are "
        f"more alike than those of lower layers. In SmolLM2, upper minus lower mean cosine is {whole - below:+.2f} "
        f"with the first token and −{rest_below - rest:.2f} without it. In Qwen2.5-Coder-0.5B it is −{-others[0]:.2f} "
        f"without it, in Gemma 3 270M still {others[1]:+.2f}. Layers of SmolLM2 that are chosen without it cost "
        f"UniAttn {-gain.value:.3f} nats per token less than the upper half ({-gain.high:.3f} to {-gain.low:.3f}, "
        "before training).",
        panel.key,
        "crosslayer diagnose smollm2 --sequences 8 --length 512",
    )


def shared_maps() -> Finding:
    """Time to read a prompt where layers reuse a softmax map, by attention implementation."""
    measured = results("shared_maps")
    medians, ratios = measured["medians"], measured["ratios"]
    plain = medians["plain, eager"]
    names = {
        "plain, eager": "plain, eager",
        "UniAttn, eager, computed again": "recomputed, eager",
        "UniAttn, eager": "handed on, eager",
        "plain, sdpa": "plain, SDPA",
        "UniAttn, sdpa": "recomputed, SDPA",
    }
    shares = {
        title: (medians[name] / plain, *(end / plain for end in measured["quartiles"][name]))
        for name, title in names.items()
    }
    panel = dots(
        "shared_maps",
        "Time to read a prompt: plain, and UniAttn with maps passed on or recomputed",
        "share of plain eager attention",
        shares,
    )
    save_svg(panel, FIGURES)
    handed, sdpa, fused = (ratios[key] for key in ("eager, map handed on", "sdpa", "plain: sdpa over eager"))
    return Finding(
        "UniAttn's speed-up is seen over eager attention, hardly over SDPA",
        "In a random model of eight layers, three of them readers as in the paper, eager attention can hand the "
        f"softmax map of a source to its readers. A prompt of 1,024 tokens then takes ×{handed['median']:.2f} "
        f"({spread(*handed['interval'])}) of the plain model's time; the paper reports ×0.64. Fused attention (SDPA) "
        f"never forms a map. It takes {fused['median']:.2f} times as long as eager attention, and with it UniAttn "
        f"takes {sdpa['median']:.2f} ({spread(*sdpa['interval'])}) times as long as the plain model. "
        "On an H100 at 8B shape it takes 0.96 (0.92-0.98) of SDPA's time for a prompt of 8,192 tokens. The paper does "
        "not name its attention implementation. Bars are quartiles.",
        panel.key,
        "python benchmarks/shared_maps.py",
    )


def isolation() -> Finding:
    """A token that may only attend to itself becomes a sink."""
    measured = results("intervene")["smollm2"]["special"]
    averages = measured["averages"]
    before, after = averages["position_before"], averages["position_after"]
    over_documents = results("waiver")["smollm2"]["special"]["changes"]["position 255"]
    share = over_documents["averages"]["position_after"]
    loss = over_documents["loss_behind"]["difference"]
    return Finding(
        "A token that attends only to itself becomes an attention sink",
        f"When position 255 is isolated, its share of later tokens' attention in layers 12-28 rises from "
        f"{before['mean']:.2%} to {after['mean']:.1%} ({after['ci95'][0]:.1%} to {after['ci95'][1]:.1%}). The first "
        f"token keeps {averages['first_after']['mean']:.1%}. The loss on later tokens rises by "
        f"{measured['loss_behind']['difference']['mean']:.3f} nats per token. These intervals take windows as "
        f"independent; over documents they are {share['mean']:.1%} ({share['ci95'][0]:.1%} to {share['ci95'][1]:.1%}) "
        f"and {loss['mean']:+.3f} ({loss['ci95'][0]:+.3f} to {loss['ci95'][1]:+.3f}). Qwen2.5-Coder-0.5B behaves "
        "alike, and the 1.5B model in ten of twelve windows; in Gemma 3 270M no sink appears.".replace("(-0", "(−0"),
        "waiver_smollm2",
        "python benchmarks/intervene.py --sequences 32",
    )


def eviction() -> Finding:
    """H2O on tasks and on retrieval."""
    rows = {row["evict"]: row for row in results("quality-eviction")["rows"] if row["name"] == "smollm2"}
    shares = {0.0: rows[None], 0.2: rows["h2o:0.2"], 0.4: rows["h2o:0.4"], 0.6: rows["h2o:0.6"]}
    accuracy, retrieved = [], []
    for row in shares.values():
        accuracy.append(100 * float(np.mean([task["candidate"]["value"] for task in row["tasks"]])))
        retrieved.append(100 * float(np.mean([cell["share"] for cell in row["needles"]])))
    lines = [Line("ARC-Easy and PIQA", [*shares], accuracy), Line("hidden numbers", [*shares], retrieved)]
    panel = Panel(
        "eviction", "H2O: tasks against retrieval", "", "share of the cached tokens that is evicted",
        "correct (%)", lines, y_range=(0, 100), x_ticks={share: f"{share:.0%}" for share in shares},
    )  # fmt: skip
    save_svg(panel, FIGURES)
    return Finding(
        "Short tasks do not show the damage of eviction",
        f"With 40% of the cached tokens evicted by H2O, accuracy on ARC-Easy and PIQA goes from {accuracy[0]:.1f}% to "
        f"{accuracy[2]:.1f}% (150 items each), but the model retrieves {0.6 * retrieved[2]:.0f} of 60 hidden numbers "
        f"instead of {0.6 * retrieved[0]:.0f}.",
        panel.key,
        "python benchmarks/quality.py smollm2 smollm2@h2o:0.4 --tasks TASKS --limit 150 --needles 6 --json FILE",
    )


def from_scratch() -> Finding:
    """Tasks and losses of models that were trained from scratch."""
    rows = sorted(results("methods-tasks")["rows"], key=lambda row: -row["difference"]["points"])
    rows = [row for row in rows if row["variant"] != "vanilla"]
    panel = dots("tasks_from_scratch", "Mean of six tasks minus vanilla's", "points", {
        row["variant"]: (row["difference"]["points"], *row["difference"]["interval"]) for row in rows
    })  # fmt: skip
    save_svg(panel, FIGURES)
    clear = sum(row["difference"]["interval"][0] > 0 or row["difference"]["interval"][1] < 0 for row in rows)
    compared = crosslayer.load_result(EVIDENCE / "methods")
    lower = sum(outcome.verdict == "lower" for outcome in compared.outcomes)
    others = crosslayer.load_result(EVIDENCE / "depth_connections" / "64").outcomes
    alone = sum(outcome.verdict == "lower" for outcome in others)
    return Finding(
        "After a million tokens, losses differ between methods; task scores do not",
        f"Of {len(rows)} methods trained from scratch at 0.46 million parameters, on one text that is not public and "
        f"at one learning rate, {lower} reach a lower loss than the plain Transformer (three or four seeds, "
        f"Holm-corrected). On embedded text, each at its own rate, {alone} of {len(others)} are lower "
        "([depth connections](depth.md)). Two seeds of each were also "
        f"scored on six tasks with 5,500 items in total: {clear} of {len(rows)} differ from it. Models of this size "
        "cannot be ranked by accuracy; a table of accuracies alone would rank noise.",
        panel.key,
        "python benchmarks/methods_tasks.py",
    )


def dots(key: str, title: str, axis: str, rows: dict[str, tuple[float, float | None, float | None]]) -> Panel:
    """Return a figure of values with intervals, a row for each name."""
    means, lows, highs = (list(column) for column in zip(*rows.values(), strict=True))
    return Panel(key, title, "", axis, "", dots=Dots([*rows], means, lows, highs, [()] * len(rows)))


FINDINGS = (
    retrieval, bits, dropping, distillation, corpus, refit, search, similarity, isolation, eviction, from_scratch,
    shared_maps,
)  # fmt: skip


def page(findings: Sequence[Finding], last: str) -> str:
    """Return the page in Markdown, with its last section."""
    sections = []
    for number, finding in enumerate(findings, 1):
        text, figure = textwrap.fill(finding.text, 120), f"![{finding.title}](../figures/{finding.figure}.svg)"
        sections.append(f"## {number}. {finding.title}\n\n{text}\n\n{figure}\n\n`{finding.command}`\n")
    return "\n".join([HEAD, *sections, last])


def measure() -> None:
    """Write how alike neighboring maps of SmolLM2 are, by layer."""
    diagnosis = crosslayer.diagnose("smollm2", sequences=8, length=512)
    maps = {"all": diagnosis.map_similarity, "without_first": diagnosis.map_similarity_without_first}  # (L, L) each
    count = len(diagnosis.map_similarity)
    entry: dict[str, Any] = {"num_layers": count, "layers": [*range(1, count)]}
    entry |= {name: [round(float(matrix[i, i - 1]), 4) for i in range(1, count)] for name, matrix in maps.items()}
    MAPS.write_text(json.dumps({**entry, "environment": environment().model_dump()}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    PAGE.write_text(page([finding() for finding in FINDINGS], on_four_models(results("models")["models"])))
