"""The figures of the papers' pages that committed records decide.

    python benchmarks/paper_figures.py     # docs/figures/*.svg, in seconds

Each figure is one that a reader of the paper looks for; the record that it comes from stands beside its function.
"""

import math
import re
from pathlib import Path

import numpy as np

import crosslayer
from crosslayer.output.chart import save_svg
from crosslayer.output.panel import COLORS, QUIET, Line, Panel
from crosslayer.output.record import Measure
from crosslayer.stats.differences import t_ends, t_mean

ROOT = Path(__file__).parent.parent
EVIDENCE, FIGURES = ROOT / "docs" / "evidence", ROOT / "docs" / "figures"
LAYERS = 30  # of SmolLM2
VARIANTS = {"vanilla": "vanilla", "AttnRes, full": "attnres", "AttnRes, blocks of 4": "attnres-block-4"}
PRETRAINED = {"SmolLM2-135M": "smollm2", "Gemma 3 270M": "gemma3", "Qwen2.5-Coder-0.5B": "qwen"}


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    of_papers = (relative_loss(), loss_by_weight(), critical_points(), outputs(), gradients(), *last_rows(), cache())
    for panel in (*of_papers, *side_by_side()):
        save_svg(panel, FIGURES)
    print(spreads())


def relative_loss() -> Panel:
    """ResFormer's Fig. 7, right: evidence/methods."""
    names = {"resformer": "ResFormer (learnable)", "svformer": "SVFormer", "neutreno": "NeuTRENO"}
    names |= {"denseformer": "DenseFormer", "cla": "CLA"}
    record = crosslayer.load_result(EVIDENCE / "methods")
    tokens = {run.steps: run.tokens // run.steps for run in record.runs}
    lines = []
    for outcome in record.outcomes:
        if outcome.variant in names:
            (per_step,) = set(tokens.values())
            x, curve = [step * per_step / 1000 for step in outcome.curve.steps], outcome.curve
            band = (curve.low, curve.high) if outcome.variant == "resformer" else (None, None)
            lines.append(Line(names[outcome.variant], x, curve.mean, *band))
    title, y = "Training loss minus vanilla's, four seeds", "nats per token, smoothed"
    return Panel("relative_loss", title, "", "thousand tokens", y, lines, wide=True)


def loss_by_weight() -> Panel:
    """ResFormer's Fig. 8 and 22: evidence/ablations."""
    weights = {
        "V_n + λ V_1 (Fig. 8)": {
            0.5: "resformer(mode=constant, weights=[0.5])",
            1: "resformer(mode=constant, weights=[1.0])",
            2: "resformer(mode=constant)",
            5: "resformer(mode=constant, weights=[5.0])",
        },
        "NeuTRENO's λ (Fig. 22)": {
            0.2: "neutreno(weight=0.2)",
            0.4: "neutreno",
            0.6: "neutreno(weight=0.6)",
        },
    }
    found = {one.variant: one.final.change for one in crosslayer.load_result(EVIDENCE / "ablations").outcomes}
    lines = []
    for name, variants in weights.items():
        changes = [found[variant] for variant in variants.values()]
        values, lows, highs = zip(*((one.value, one.low, one.high) for one in changes), strict=True)
        lines.append(Line(name, [*variants], values, lows, highs))
    ticks = {weight: f"{weight:g}" for weight in (0.2, 0.4, 0.6, 1, 2, 5)}
    title, y = "Final loss minus vanilla's by λ, four seeds", "nats per token (95%)"
    return Panel("loss_by_weight", title, "", "λ", y, lines, log_x=True, x_ticks=ticks, bars=True)


def critical_points() -> Panel:
    """ResFormer's Fig. 14, right: evidence/critical."""
    outcomes = crosslayer.load_result(EVIDENCE / "critical").outcomes
    lengths = {int(outcome.configuration.split("=")[1]): outcome.critical.reached for outcome in outcomes}
    lines = []
    for seed in range(4):
        points = {length: lengths[length][seed] for length in sorted(lengths)}
        known = {length: step for length, step in points.items() if step is not None}
        lines.append(Line(f"seed {seed}", [float(length) for length in known], [*known.values()]))
    ticks = {float(length): str(length) for length in lengths}
    title = "Step from which vanilla stays ahead of SVFormer"
    return Panel("critical_points", title, "", "sequence length", "step", lines, log_x=True, x_ticks=ticks)


def _by_depth(key: str, title: str, axis: str, fields: tuple[str, str]) -> Panel:
    """Return both sublayers' norms in each pretrained model, by the share of the depth."""
    lines = []
    for (name, folder), color in zip(PRETRAINED.items(), COLORS, strict=False):
        found = crosslayer.load_result(EVIDENCE / "outputs" / folder).outputs
        for sublayer, field, dashed in zip(("attention", "MLP"), fields, (False, True), strict=True):
            measure: Measure = getattr(found, field)
            depth = [layer / (len(measure.mean) - 1) for layer in range(len(measure.mean))]
            lines.append(Line(f"{name}, {sublayer}", depth, measure.mean, color=color, dashed=dashed))
    return Panel(key, title, "", "depth (0: first layer, 1: last)", axis, lines, log_y=True, wide=True)


def outputs() -> Panel:
    """AttnRes, training dynamics, in pretrained models: evidence/outputs."""
    fields = ("attention_output_norm", "mlp_output_norm")
    return _by_depth("outputs_by_depth", "What sublayers add to the stream", "mean L2 norm", fields)


def gradients() -> Panel:
    """AttnRes, training dynamics, in pretrained models: evidence/outputs."""
    fields = ("attention_gradient_norm", "mlp_gradient_norm")
    return _by_depth("gradients_by_depth", "Gradients at the outputs of sublayers", "mean L2 norm, nats", fields)


def side_by_side() -> list[Panel]:
    """AttnRes, training dynamics, of the three variants of 16 layers: evidence/depth, geometric means over seeds."""
    panels = []
    for what, axis in {"output": "mean L2 norm", "gradient": "mean L2 norm of the gradient"}.items():
        lines = []
        for name in VARIANTS:
            logs = np.log(_norms_of_sublayers(name, what))  # (seeds, sublayers)
            ends = t_ends(logs)
            low, high = (None, None) if ends is None else np.exp(ends)
            lines.append(Line(name, [*range(1, logs.shape[1] + 1)], np.exp(logs.mean(0)), low, high))
        subject = "What sublayers add" if what == "output" else "The gradient of what sublayers add"
        title = f"{subject}, 16 layers of width 64, after training"
        panels.append(Panel(f"trained_{what}s_by_depth", title, "", "sublayer", axis, lines, log_y=True, wide=True))
    return panels


def spreads() -> str:
    """Return the largest norm over the smallest, with and without the first layer, as a table: geometric means."""
    rows = []
    for what in ("output", "gradient"):
        for first, note in ((0, "all layers"), (2, "without the first layer")):
            cells = []
            for name in VARIANTS:
                norms = _norms_of_sublayers(name, what)[:, first:]
                logs = np.log(norms)
                cells.append(t_mean(logs.max(1) - logs.min(1)).mapped(math.exp).text(1))
            rows.append(f"| spread of {what}s, {note} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _norms_of_sublayers(variant: str, what: str) -> np.ndarray:
    """Return the norms (seeds, 2 × layers) of attention and MLP in turn, of each run's last snapshot."""
    norms = []
    for folder in sorted((EVIDENCE / "depth" / "runs").glob(f"{VARIANTS[variant]}-[0-9]")):
        last = crosslayer.load_result(folder).snapshots[-1]
        pair = [getattr(last, f"{kind}_{what}_norm") for kind in ("attention", "mlp")]  # each (layers,)
        norms.append(np.array(pair).T.ravel())
    return np.array(norms)


def last_rows() -> list[Panel]:
    """The waiver's Fig. 3 and 4, the last token's attention in one head: evidence/waiver."""
    panels = []
    for folder, name in (("isolated", "SmolLM2, position 255 isolated"), ("swap", "MiniLM, row 0 at position 383")):
        row = crosslayer.load_result(EVIDENCE / "waiver" / folder).last_row_of_head
        positions = [float(position) for position in range(len(row.before))]
        lines = [
            Line("before", positions, row.before, color=QUIET),
            Line("after", positions, row.after, color=COLORS[0]),
        ]
        title = f"{name}: layer {row.layer}, head {row.head}"
        panels.append(Panel(f"last_row_{folder}", title, "", "position", "share of the last token's attention", lines))
    return panels


def cache() -> Panel:
    """UniAttn, CLA and dropped attention without W_c: evidence/uniattn."""
    lines = []
    methods = {"number": ("UniAttn", 0.5), "number-cla": ("CLA", 1), "number-drop": ("attention dropped", 1)}
    for folder, (name, saved) in methods.items():  # a reader keeps its values with UniAttn, nothing with the others
        record = crosslayer.load_result(EVIDENCE / "uniattn" / folder)
        points = {}
        for row in record.rows:
            if (row.quantity, row.scope, row.against) == ("KL", "all", "the original"):
                readers = int(re.search(r"--count (\d+)", row.candidate)[1])
                points[100 * (1 - saved * readers / LAYERS)] = row.change
        values, lows, highs = zip(*((one.value, one.low, one.high) for one in points.values()), strict=True)
        lines.append(Line(name, [*points], values, lows, highs))
    title, y = "SmolLM2 without W_c and without training", "KL to the original, nats per token"
    return Panel("kl_by_cache", title, "", "KV cache, % of the original's", y, lines, log_y=True, bars=True)


if __name__ == "__main__":
    main()
