"""The tables and the figure of docs/results/depth.md, from committed records.

    python benchmarks/depth_results.py     # prints the tables, writes docs/figures/depth_speedup.svg

One record for each width (docs/evidence/depth_connections/WIDTH), as `crosslayer compare --step-rounds` wrote it. If
WIDTH/other_rates has a record, its variants were trained at another learning rate than the one chosen by the rule; the
table shows them in rows of their own. The pairs of question 3 stand in docs/LOG.md; their differences are paired by
seed, with Holm's correction over all of them.
"""

from pathlib import Path

import numpy as np
import vl_convert
from depth_runs import BUDGETS, DECAYING, SEEDS

import crosslayer
from crosslayer.output.panel import COLORS
from crosslayer.stats.differences import holm, paired_difference
from crosslayer.verbs.compare.speedup import Curve, first_below, geometric_mean, monotone

ROOT = Path(__file__).parent.parent
EVIDENCE, FIGURES = ROOT / "docs" / "evidence" / "depth_connections", ROOT / "docs" / "figures"
BUDGET_RUNS = EVIDENCE / "64" / "budgets"
NAMES = {
    "vanilla": "vanilla",
    "resformer(mode=identity)": "ResFormer, Eq. 7",
    "resformer": "ResFormer, learnable",
    "svformer": "SVFormer",
    "denseformer": "DenseFormer",
    "attnres": "AttnRes, full",
    "attnres(block=2)": "AttnRes, blocks of 2",
    "hyper_connections": "hyper-connections (mHC)",
    "mudd": "MUDD",
}
LAYERS = {64: 4, 128: 8}
# in the figure: variants whose name stands at the left of their interval, and how many pixels a name is moved down
LEFT = {
    64: ("AttnRes, full", "SVFormer", "ResFormer, Eq. 7", "AttnRes, blocks of 2"),
    128: ("ResFormer, learnable", "ResFormer, Eq. 7"),
}
DOWN = {
    64: {"ResFormer, learnable": -19, "DenseFormer": 8, "ResFormer, Eq. 7": -6, "AttnRes, blocks of 2": 3},
    128: {"ResFormer, learnable": -7, "ResFormer, Eq. 7": 5, "AttnRes, full": -8, "AttnRes, blocks of 2": 10},
}
PAIRS = (  # elaborate, simple
    ("mudd", "denseformer"),
    ("hyper_connections", "resformer"),
    ("attnres", "attnres(block=2)"),
    ("mudd", "attnres(block=2)"),
)


def records() -> dict[int, crosslayer.Comparison]:
    """Return the comparison of each width that is there."""
    folders = sorted(EVIDENCE.glob("*/record.json"), key=lambda file: int(file.parent.name))
    return {int(file.parent.name): crosslayer.load_result(file.parent) for file in folders}


def table(width: int, record: crosslayer.Comparison) -> list[str]:
    """Return the rows of a width, the fastest in tokens first; a variant at another rate follows at the end."""
    (configuration,) = record.configurations
    base = [run.final_loss for run in record.runs_of(configuration.label, "vanilla")]
    rate = next(run.learning_rate for run in record.runs if run.variant == "vanilla")
    rows = [
        "| variant | learning rate | loss | × in tokens | × in FLOPs | × in seconds | a step's time |",
        "|" + "---|" * 7,
        f"| vanilla | {rate:g} | {sum(base) / len(base):.3f} | 1 | 1 | 1 | 1 |",
    ]
    rows += outcome_rows(record)
    if (EVIDENCE / str(width) / "other_rates" / "record.json").is_file():
        rows += outcome_rows(crosslayer.load_result(EVIDENCE / str(width) / "other_rates"))
    return rows


def outcome_rows(record: crosslayer.Comparison) -> list[str]:
    """Return a row for each variant of a record but the baseline, the fastest in tokens first."""
    rates = {run.variant: run.learning_rate for run in record.runs}
    rows = []
    for outcome in sorted(record.outcomes, key=lambda one: -one.speedup.tokens.value if one.speedup else 0):
        found = outcome.speedup
        speedups = (found.tokens, found.flops, found.seconds) if found else (None, None, None)
        cells = [
            NAMES[outcome.variant],
            f"{rates[outcome.variant]:g}",
            outcome.final.change.text(3, signed=True),
            *(one.text(2) if one else "–" for one in speedups),
            outcome.step_time.change.text(2) if outcome.step_time else "–",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def figure(found: dict) -> dict:
    """Speedup in tokens against speedup in seconds: for each variant a point with two intervals, a chart a width."""
    charts = []
    for width, record in found.items():
        rows = []
        for outcome in record.outcomes:
            if outcome.speedup is None or outcome.speedup.seconds is None:
                continue
            tokens, seconds = outcome.speedup.tokens, outcome.speedup.seconds
            row = {"name": NAMES[outcome.variant], "tokens": tokens.value, "seconds": seconds.value}
            (row["left"], row["right"]), (row["low"], row["high"]) = tokens.interval, seconds.interval
            rows.append(row)
        charts.append(one_width(width, rows))
    return {"hconcat": charts, "config": {"view": {"stroke": None}, "font": "sans-serif"}, "background": "white"}


def one_width(width: int, rows: list[dict]) -> dict:
    """Return the chart of a width in Vega-Lite; both axes are logarithmic, and grey lines stand at 1."""
    axis = {"type": "quantitative", "axis": {"values": [0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2], "grid": False}}
    across = {**axis, "title": "effective speedup in tokens", "scale": {"type": "log", "domain": [0.6, 2.6]}}
    up = {**axis, "title": "in seconds, on a CPU", "scale": {"type": "log", "domain": [0.3, 1.8]}}
    names = [*NAMES.values()][1:]
    color = {"field": "name", "type": "nominal", "legend": None, "scale": {"domain": names, "range": [*COLORS]}}
    grey = {"type": "rule", "color": "#b8bdca", "strokeDash": [3, 3]}
    layers = [
        {"mark": grey, "encoding": {"x": {"datum": 1, **across}}},
        {"mark": grey, "encoding": {"y": {"datum": 1, **up}}},
        {
            "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6},
            "encoding": {"x": {"field": "left", **across}, "x2": {"field": "right"}, "y": {"field": "seconds", **up}},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6},
            "encoding": {"x": {"field": "tokens", **across}, "y": {"field": "low", **up}, "y2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"x": {"field": "tokens", **across}, "y": {"field": "seconds", **up}},
        },
    ]
    for layer in layers[2:]:
        layer["encoding"]["color"] = color
    # a name stands at the right end of its interval, or at the left where another variant is in the way
    for row in rows:
        is_left = row["name"] in LEFT[width]
        mark = {"type": "text", "align": "right" if is_left else "left", "dx": -6 if is_left else 6, "fontSize": 11}
        mark["dy"] = DOWN[width].get(row["name"], 0)
        end = {"field": "left" if is_left else "right", **across}
        encoding = {"x": end, "y": {"field": "seconds", **up}, "text": {"field": "name"}, "color": color}
        layers.append({"data": {"values": [row]}, "mark": mark, "encoding": encoding})
    title = {"text": f"width {width}, {LAYERS[width]} layers", "anchor": "start", "fontSize": 13}
    return {"data": {"values": rows}, "width": 460, "height": 360, "title": title, "layer": layers}


def pairs(found: dict) -> list[str]:
    """Return question 3's pairs: elaborate minus simple at each width."""
    tests = []
    for width, record in found.items():
        (configuration,) = record.configurations
        for elaborate, simple in PAIRS:
            own, other = (record.runs_of(configuration.label, name) for name in (elaborate, simple))
            seeds = sorted({run.seed for run in own} & {run.seed for run in other})
            losses = [[run.final_loss for run in runs if run.seed in seeds] for runs in (own, other)]
            tests.append((f"{NAMES[elaborate]} minus {NAMES[simple]}", width, paired_difference(*losses)))
    adjusted = holm([one.p for *_, one in tests])
    rows = ["| pair | width | nats per token | p (Holm) |", "|" + "---|" * 4]
    for (name, width, change), p in zip(tests, adjusted, strict=True):
        rows.append(f"| {name} | {width} | {change.text(3, signed=True)} | {p:.3f} |")
    return rows


def budget_check() -> list[str]:
    """Return the speedup of blocks in runs whose rate decays, read at their ends and within the longest run.

    Read at the ends of runs at three budgets, the speedup is the longest budget over the one at which the variant ends
    as low as the baseline. Read within its longest run, the variant still has a higher rate where it passes that loss.
    So small models learn faster there than in a run that ends there, and the speedup seems larger.
    """
    baseline, variant = DECAYING
    at_ends, within = [], []
    for seed in SEEDS:
        runs = {
            name: [crosslayer.load_result(BUDGET_RUNS / f"{size}-{name}-{seed}") for size in BUDGETS]
            for name in DECAYING
        }
        target = runs[baseline][-1].final_loss
        ends = np.array(BUDGETS, float), np.array([run.final_loss for run in runs[variant]])
        curve = held_out(runs[variant][-1])
        at_ends.append(BUDGETS[-1] / (first_below(ends, target) or np.nan))
        within.append(BUDGETS[-1] / (first_below(curve, target) or np.nan))
    rows = ["| the speedup of blocks, rate decaying to a tenth, read | × in tokens |", "|---|---|"]
    for name, ratios in (("at the ends of runs at three budgets", at_ends), ("within the longest run", within)):
        rows.append(f"| {name} | {geometric_mean(ratios).text(2)} |")
    return rows


def held_out(run: crosslayer.TrainingRun) -> Curve:
    """Return the held-out loss of a run over its tokens, smoothed as `crosslayer compare` does."""
    shares = {domain.name: domain.share for domain in run.domains}
    losses = [sum(share * entry.losses[name] for name, share in shares.items()) for entry in run.validation]
    tokens = np.array([entry.step for entry in run.validation]) * run.tokens / run.steps
    return monotone(tokens, np.array(losses))


def main() -> None:
    found = records()
    for width, record in found.items():
        print(f"\nwidth {width}\n", *table(width, record), sep="\n")
    (FIGURES / "depth_speedup.svg").write_text(vl_convert.vegalite_to_svg(figure(found)), encoding="utf-8")
    print("", *pairs(found), "", *budget_check(), sep="\n")


if __name__ == "__main__":
    main()
