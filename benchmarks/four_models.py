"""The section of docs/results/findings.md on four models: each claim on each model, and damage by their size.

`benchmarks/models.py` measures the numbers, and `benchmarks/findings.py` writes the page.
"""

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
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
NAMES = {
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma 3 270M",
    "qwen": "Qwen2.5-Coder-0.5B",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B",
}
PARAMETERS = {"smollm2": 134.5e6, "gemma3": 268.1e6, "qwen": 630.2e6, "qwen-1.5b": 1777.1e6}
UNSHOWN = 0.1  # rise of perplexity beyond which perplexity would have shown the damage
SECTION = """## On four models

Seven of the findings (2, 3, 5, 6, 8, 9 and 10) are repeated here on up to four pretrained models, on other text, so
that numbers on SmolLM2 differ slightly. The other rows are about stored prompts and about the first token. Each row is
a claim, each column a model, and each cell the number that decides, with its interval over windows or items. Claims
that do not hold everywhere come first. ✓ The whole interval supports the claim. ✗ The whole interval contradicts it.
? It does neither. – Not measured, or not measurable.

KL and losses are measured on twelve windows of 512 tokens (science, speeches, code). W_c and W_o are fitted to 24
windows of 256 tokens of books, web pages and documentation. Dropped layers are those whose removal alone costs the
least KL on other windows, before any repair. Stored prompts use the text of
[Store prompts](../guides/store.md). All models run in float32 on a CPU. The larger Qwen has 1.54 billion parameters;
its file stores the output matrix separately (1.78 billion).

{verdict}

{table}

`python benchmarks/models.py smollm2 gemma3 qwen` measures everything except the stored prompts for
`benchmarks/results/models.json`, in about an hour and a half on two cores; `qwen-1.5b --only sinks isolated` measures
the claims on sinks for the largest model, in six minutes. `benchmarks/codecs.py` contains the commands of the stored
prompts.

### Damage by size of the model

![Damage by size of the model](../figures/scale.svg)

{scale}

The models differ in family, training and shape, so damage depends on the model more than on its size.
"""
Cell = tuple[Estimate, str] | None  # the number that decides, and what else the cell shows


@dataclass(frozen=True)
class Claim:
    """A sentence, how a cell is read from a model's results, and which side of no difference it claims."""

    text: str
    cell: Callable[[str, dict[str, Any]], Cell]
    better: Better
    digits: int = 3

    def mark(self, cell: Cell) -> str:
        """Return whether the claim holds on a model."""
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


def stored_prompt(part: str, setting: str, other: str, named: str) -> Claim:
    """Return the claim that a stored prompt, a part of the 16-bit cache, has less KL than another way."""
    text = f"KL of a stored prompt ({part}) ÷ KL of {named} is below 1"
    return Claim(text, lambda name, stored: codec_ratio(name, setting, other), "lower")


CLAIMS = (
    stored_prompt("1/8", "12.5", "unrotated-int", ROUNDED_KEYS),
    stored_prompt("1/16", "6.25", "unrotated-int", ROUNDED_KEYS),
    stored_prompt("1/8", "12.5", "int", RECENT_EXACT),
    stored_prompt("1/16", "6.25", "int", RECENT_EXACT),
    stored_prompt("1/8", "12.5", "kvtc-4", "KVTC at equal bytes"),
    Claim(
        "Dropping attention in a sixth of the layers costs more KL than 4 bits",
        lambda name, stored: gap(stored["dropping"], "dropped, 83%", "4 bits"), "higher",
    ),
    Claim(
        "Sharing keys and values in blocks costs more KL than dropping attention in as many layers (30%)",
        lambda name, stored: gap(stored["dropping"], "cla blocks, 70%", "dropped, 70%"), "higher",
    ),
    Claim(
        "W_c alone costs more KL than W_o and W_c, where three pairs of layers share keys and values",
        lambda name, stored: gap(stored["refit"], "W_c", "W_o and W_c"), "higher",
    ),
    Claim(
        "W_c fitted to books alone costs more KL on other text than W_c fitted to a mixture",
        lambda name, stored: gap(stored["calibration"], "books", "mixture"), "higher",
    ),
    Claim(
        f"H2O at 60% of the cache loses hidden numbers, and perplexity rises by less than {UNSHOWN:.0%} (share found)",
        evicted, "lower",
    ),
    Claim(
        "In the layer with the strongest sink, the first token's share of attention, minus 30%, is above 0",
        sink, "higher",
    ),
    Claim("In that layer, the norm of the first token's values ÷ the median, minus 1, is below 0", drained, "lower"),
    Claim("Without the first token, neighboring maps of the upper half are less alike (cosine)", maps, "lower"),
    Claim("A token that attends only to itself becomes a sink (share of attention)", isolated, "higher"),
)  # fmt: skip


def row(claim: Claim, models: dict[str, Any]) -> tuple[int, int, str]:
    """Return on how many models a claim fails or is open, on how many it holds, and its line of the table."""
    cells = {}
    for name in models:
        try:
            cells[name] = claim.cell(name, models[name])
        except (KeyError, FileNotFoundError):
            cells[name] = None
    marks = {name: claim.mark(cell) for name, cell in cells.items()}
    shown = []
    for name, cell in cells.items():
        if cell is None:
            shown.append("–")
            continue
        signed = cell[0].none == 0
        shown.append(f"{marks[name]} {cell[0].text(claim.digits, signed=signed)}<br>{cell[1]}")
    holds, measured = list(marks.values()).count("✓"), sum(mark != "–" for mark in marks.values())
    return measured - holds, holds, f"| {claim.text} | {' | '.join(shown)} | {holds} of {measured} |"


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
        FIGURES,
    )  # fmt: skip
    return "\n".join(rows)


def on_four_models(models: dict[str, Any]) -> str:
    """Draw the figure, and return the section in Markdown."""
    models = {name: models[name] for name in NAMES if name in models}
    rows = sorted((row(claim, models) for claim in CLAIMS), key=lambda entry: (-entry[0], entry[1]))
    head = f"| claim | {' | '.join(NAMES[name] for name in models)} | holds on |"
    whole = sum(missing == 0 for missing, _, _ in rows)
    verdict = f"**{whole} of {len(rows)} claims hold on every model where they can be measured.**"
    table = "\n".join([head, "|---" * (len(models) + 2) + "|", *(line for _, _, line in rows)])
    return SECTION.format(verdict=verdict, table=table, scale=scale(models))
