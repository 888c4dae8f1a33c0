"""The page of `benchmarks/models.py`: each finding on each model, and damage by the size of the model."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosslayer.output.chart import save_svg
from crosslayer.output.panel import Line, Panel
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.differences import share_difference
from crosslayer.stats.estimate import Better, Estimate

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results" / "models.md"
NAMES = {
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma 3 270M",
    "qwen": "Qwen2.5-Coder-0.5B",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B",
}
PARAMETERS = {"smollm2": 134.5e6, "gemma3": 268.1e6, "qwen": 630.2e6, "qwen-1.5b": 1777.1e6}
UNSHOWN = 0.1  # rise of perplexity beyond which perplexity would have shown the damage
HEAD = """# Findings on four models

Each row is a finding, each column a pretrained model, and each cell the number that decides it, with its 95% interval
over windows or items. Findings that do not hold everywhere come first. ✓ The whole interval supports the finding.
✗ The whole interval contradicts it. ? It does neither. – Not measured, or not measurable.

KL and losses are measured on twelve windows of 512 tokens (science, speeches, code). W_c and W_o are fitted to 24
windows of 256 tokens of books, web pages and documentation. Dropped layers are those whose removal alone costs the
least KL on other windows, before any repair. Stored prompts use the text of
[Store prompts](../guides/store.md). All models run in float32 on a CPU. Seven rows repeat findings 2, 3, 5, 6, 8, 9 and
10 of [Findings](findings.md), on other text, so that numbers on SmolLM2 differ slightly. The larger Qwen has 1.54
billion parameters; its file stores the output matrix separately (1.78 billion).
"""
TAIL = """## Damage by size of the model

![Damage by size of the model](../figures/scale.svg)

{scale}

The models differ in family, training and shape, so damage depends on the model more than on its size.

## Command

`python benchmarks/models.py smollm2 gemma3 qwen` measures everything except the stored prompts for
`benchmarks/results/models.json`, in about an hour and a half on two cores; `qwen-1.5b --only sinks isolated` measures
the findings on sinks for the largest model, in six minutes. `python benchmarks/models.py` writes this page.
`benchmarks/codecs.py` contains the commands of the stored prompts.
"""
Cell = tuple[Estimate, str] | None  # the number that decides, and what else the cell shows


@dataclass(frozen=True)
class Finding:
    """A sentence, how a cell is read from a model's results, and which side of no difference it claims."""

    claim: str
    cell: Callable[[str, dict[str, Any]], Cell]
    better: Better
    digits: int = 3

    def mark(self, cell: Cell) -> str:
        """Return whether the finding holds on a model."""
        if cell is None:
            return "–"
        return {True: "✓", False: "✗", None: "?"}[cell[0].is_better(self.better)]


def codecs(name: str) -> dict[str, Any]:
    """Return the committed comparison of codecs on a model."""
    return json.loads((RESULTS / f"codecs-{name}.json").read_text())


def codec_ratio(name: str, setting: str, other: str) -> Cell:
    """Return the KL of a stored prompt over that of another codec."""
    for row in codecs(name)["ratios"]:
        if (row["codec"], row["other"]) == (setting, other):
            value, low, high = row["ratio"]
            count = {"n": row["of"], "over": "windows", "how": "bootstrap"}
            shown = f"{row['share']:.1%} and {row['other_share']:.1%} of the bytes"
            return Estimate(value=value, low=low, high=high, none=1, **count), shown
    return None


def mean(values: Any, documents: list[int]) -> Estimate:
    """Return the mean over windows."""
    return Bootstrap(tuple(documents)).mean(np.asarray(values, dtype=float))


def gap(part: dict[str, Any], one: str, other: str) -> Cell:
    """Return the KL of a candidate minus that of another."""
    if one not in part["kl"] or other not in part["kl"]:
        return None
    costs = [np.array(part["kl"][name]["kl"]) for name in (one, other)]
    shown = f"{costs[0].mean():.3g} and {costs[1].mean():.3g}"
    return mean(costs[0] - costs[1], part["kl"][one]["documents"]), shown


def evicted(name: str, stored: dict[str, Any]) -> Cell:
    """Return the change of the share of hidden numbers that are found; none where perplexity shows the damage too."""
    part = stored["eviction"]
    before, after = part["found"]["original"], part["found"]["h2o:0.4"]
    gained = sum(b and not a for a, b in zip(before, after, strict=True))
    lost = sum(a and not b for a, b in zip(before, after, strict=True))
    losses = part["kl"]["h2o:0.4"]
    rise = float(np.exp(np.mean(losses["after"]) - np.mean(losses["before"])))
    shown = f"{sum(before)} → {sum(after)} of {len(before)}; perplexity × {rise:.3f}"
    change = share_difference(gained, lost, len(before))
    if rise > 1 + UNSHOWN:
        change = change.model_copy(update={"low": None, "high": None})
    return change, shown


def isolated(name: str, stored: dict[str, Any]) -> Cell:
    """Return the rise of the isolated token's share of attention."""
    part = stored["isolated"]
    change = mean(np.subtract(part["after"], part["before"]), part["documents"])
    return change, f"{np.mean(part['before']):.2%} → {np.mean(part['after']):.1%}"


def maps(name: str, stored: dict[str, Any]) -> Cell:
    """Return how much of the similarity of neighboring maps is the first token."""
    part = stored["sinks"]
    change = mean(np.subtract(part["maps_without"], part["maps"]), part["documents"])
    return change, f"{np.mean(part['maps']):.2f} → {np.mean(part['maps_without']):.2f}"


def sink(name: str, stored: dict[str, Any]) -> Cell:
    """Return the first token's share of attention in the strongest layer, less the 30% that make a sink."""
    part = stored["sinks"]
    return mean(np.array(part["share"]) - 0.3, part["documents"]), f"{np.mean(part['share']):.0%}"


def drained(name: str, stored: dict[str, Any]) -> Cell:
    """Return the norm of the first token's values over the median, in that layer, less 1."""
    part = stored["sinks"]
    return mean(np.array(part["values"]) - 1, part["documents"]), f"{np.mean(part['values']):.2f} of the median"


ROUNDED_KEYS = "4 bits quantized before RoPE (28% of the bytes)"
RECENT_EXACT = "`--kv-bits 4`, whose latest 64 tokens are exact,"


def stored_prompt(part: str, setting: str, other: str, named: str) -> Finding:
    """Return the finding that a stored prompt, a part of the 16-bit cache, has less KL than another way."""
    claim = f"KL of a stored prompt ({part}) ÷ KL of {named} is below 1"
    return Finding(claim, lambda name, stored: codec_ratio(name, setting, other), "lower")


FINDINGS = (
    stored_prompt("1/8", "12.5", "unrotated-int", ROUNDED_KEYS),
    stored_prompt("1/16", "6.25", "unrotated-int", ROUNDED_KEYS),
    stored_prompt("1/8", "12.5", "int", RECENT_EXACT),
    stored_prompt("1/16", "6.25", "int", RECENT_EXACT),
    stored_prompt("1/8", "12.5", "kvtc-4", "KVTC at equal bytes"),
    Finding(
        "Dropping attention in a sixth of the layers costs more KL than 4 bits",
        lambda name, stored: gap(stored["dropping"], "dropped, 83%", "4 bits"), "higher",
    ),
    Finding(
        "Sharing keys and values in blocks costs more KL than dropping attention in as many layers (30%)",
        lambda name, stored: gap(stored["dropping"], "cla blocks, 70%", "dropped, 70%"), "higher",
    ),
    Finding(
        "W_c alone costs more KL than W_o and W_c, where three pairs of layers share keys and values",
        lambda name, stored: gap(stored["refit"], "W_c", "W_o and W_c"), "higher",
    ),
    Finding(
        "W_c fitted to books alone costs more KL on other text than W_c fitted to a mixture",
        lambda name, stored: gap(stored["calibration"], "books", "mixture"), "higher",
    ),
    Finding(
        f"H2O at 60% of the cache loses hidden numbers, and perplexity rises by less than {UNSHOWN:.0%} (share found)",
        evicted, "lower",
    ),
    Finding(
        "In the layer with the strongest sink, the first token's share of attention, minus 30%, is above 0",
        sink, "higher",
    ),
    Finding("In that layer, the norm of the first token's values ÷ the median, minus 1, is below 0", drained, "lower"),
    Finding("Without the first token, neighboring maps of the upper half are less alike (cosine)", maps, "lower"),
    Finding("A token that attends only to itself becomes a sink (share of attention)", isolated, "higher"),
)  # fmt: skip


def row(finding: Finding, models: dict[str, Any]) -> tuple[int, int, str]:
    """Return on how many models a finding fails or is open, on how many it holds, and its line of the table."""
    cells = {}
    for name in models:
        try:
            cells[name] = finding.cell(name, models[name])
        except (KeyError, FileNotFoundError):
            cells[name] = None
    marks = {name: finding.mark(cell) for name, cell in cells.items()}
    shown = []
    for name, cell in cells.items():
        if cell is None:
            shown.append("–")
            continue
        signed = cell[0].none == 0
        shown.append(f"{marks[name]} {cell[0].text(finding.digits, signed=signed)}<br>{cell[1]}")
    holds, measured = list(marks.values()).count("✓"), sum(mark != "–" for mark in marks.values())
    return measured - holds, holds, f"| {finding.claim} | {' | '.join(shown)} | {holds} of {measured} |"


def stored_costs(setting: str, models: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Return the KL of stored prompts, with its interval, by model."""
    found = {}
    for name in models:
        rows = {one["setting"]: one for one in codecs(name)["rows"] if one["way"] == "codec"}
        if setting in rows:
            found[name] = tuple(rows[setting]["kl"])
    return found


def dropped_costs(models: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Return the KL of attention dropped in 30% of the layers, with its interval, by model."""
    found = {}
    for name, stored in models.items():
        if "dropping" in stored:
            part = stored["dropping"]["kl"]["dropped, 70%"]
            cost = mean(part["kl"], part["documents"])
            assert cost.interval is not None
            found[name] = (cost.value, *cost.interval)
    return found


def scale(models: dict[str, Any]) -> str:
    """Draw damage by the size of the model, and return it as a table."""
    models = {name: models[name] for name in sorted(models, key=PARAMETERS.__getitem__)}
    settings = {"25": "stored, 1/4", "12.5": "stored, 1/8", "6.25": "stored, 1/16"}
    costs = {label: stored_costs(setting, models) for setting, label in settings.items()}
    costs["attention dropped, 70%"] = dropped_costs(models)
    lines, rows = [], [f"| KL, nats per token | {' | '.join(NAMES[name] for name in models)} |"]
    rows.append("|---" * (len(models) + 1) + "|")
    for label, found in costs.items():
        values, lows, highs = (list(column) for column in zip(*found.values(), strict=True))
        lines.append(Line(label, [PARAMETERS[name] for name in found], values, lows, highs))
        cells = [f"{found[name][0]:.2g}" if name in found else "–" for name in models]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    ticks = {PARAMETERS[name]: NAMES[name].replace("-", " ").split()[-1] for name in models}
    save_svg(
        Panel(
            "scale", "Damage by size of the model", "", "parameters", "KL to the original (nats per token)", lines,
            log_x=True, log_y=True, bars=True, x_ticks=ticks,
        ),
        ROOT / "docs" / "figures",
    )  # fmt: skip
    return "\n".join(rows)


def write_page(models: dict[str, Any]) -> None:
    """Write the page and its figure."""
    models = {name: models[name] for name in NAMES if name in models}
    rows = sorted((row(finding, models) for finding in FINDINGS), key=lambda entry: (-entry[0], entry[1]))
    head = f"| finding | {' | '.join(NAMES[name] for name in models)} | holds on |"
    whole = sum(missing == 0 for missing, _, _ in rows)
    verdict = f"**{whole} of {len(rows)} findings hold on every model where they can be measured.**"
    table = "\n".join([head, "|---" * (len(models) + 2) + "|", *(line for _, _, line in rows)])
    tail = TAIL.format(scale=scale(models))
    PAGE.write_text(f"{HEAD}\n{verdict}\n\n{table}\n\n{tail}")
