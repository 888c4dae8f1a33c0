"""The figures, cards, tables and model card of a retrofit, from its record alone."""

import math
from typing import Any

from crosslayer.report.page import Table, runs
from crosslayer.report.panel import COLORS, Line, Panel
from crosslayer.report.record import RetrofitRecord


def words(record: RetrofitRecord) -> list[str]:
    """Return the receipt in sentences."""
    damage, cache, settings = record.damage, record.cache, record.settings
    low, high = damage["ratio_ci95"]
    made = [
        f"{methods(record)}: the KV cache allocates {cache['share']:.2%} of the original's "
        f"({cache['bytes_per_token_before']:,.0f} → {cache['bytes_per_token_after']:,.0f} bytes a token); "
        f"parameters {record.model['parameters_before'] / 1e6:.1f} → {record.model['parameters_after'] / 1e6:.1f} M.",
        f"Perplexity {damage['perplexity_before']:.2f} → {damage['perplexity_after']:.2f}, ratio {damage['ratio']:.3f} "
        f"({low:.3f} to {high:.3f}); KL to the original {damage['kl']:.4f} ({damage['kl_ci95'][0]:.4f} to "
        f"{damage['kl_ci95'][1]:.4f}) nats a token, before any training.",
        f"{damage['windows']} windows of {settings['length']} tokens from {damage['documents']} documents; 95 % paired "
        "bootstrap, stratified by document: conditional on this corpus. Calibration text is excluded.",
    ]
    paper = record.choice.get("paper")
    if paper is not None:
        low, high = paper["ci95"]
        verdict = "better than" if high < 0 else "worse than" if low > 0 else "not told apart from"
        made.append(
            "On text that was not searched, before compensation, the search's wiring "
            f"({record.cache['share']:.2%} of the cache) is {verdict} fixed superblocks "
            f"({paper['share']:.2%}): KL {paper['search_minus_paper']:+.4f} ({low:+.4f} to {high:+.4f})."
        )
    return made


def methods(record: RetrofitRecord) -> str:
    """Return the methods with the layers that they act on."""
    return " + ".join(f"{entry['name']} ({_options(entry)})" for entry in record.methods)


def _options(entry: dict[str, Any]) -> str:
    shown = []
    for key, value in entry.items():
        if key == "name" or value in (None, (), []) or (entry["name"] == "cla" and key in ("group", "start")):
            continue
        shown.append(f"{key} {_layers(value)}")
    return ", ".join(shown)


def _layers(value: Any) -> str:
    """Write layers as 18-21, 22-25."""
    if not isinstance(value, list | tuple):
        return str(value)
    if all(isinstance(item, int) for item in value):
        return runs(value)
    return ", ".join(runs(item) if isinstance(item, list | tuple) else str(item) for item in value)


def cards(record: RetrofitRecord) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    damage = record.damage
    low, high = damage["ratio_ci95"]
    return [
        ("KV cache", f"{record.cache['share']:.2%}", "of the original's bytes, as allocated"),
        ("Perplexity", f"× {damage['ratio']:.3f}", f"95 %: {low:.3f} to {high:.3f}, before any training"),
        ("KL", f"{damage['kl']:.3f}", "nats a token, to the original"),
        ("Compensation", record.calibration["fit"], f"{record.calibration['windows']} windows of calibration text"),
    ]


def panels(record: RetrofitRecord) -> list[Panel]:
    """Return the figures: error by layer where W_c was fitted, and the trade-off curve where layers were searched."""
    made, fits, curve = [], record.calibration["layers"], record.choice.get("curve")
    if fits:
        layers = [float(fit["layer"]) for fit in fits]
        names = {
            "token_before": "each token, before",
            "token_after": "each token, after",
            "mean_before": "mean by position, before",
            "mean_after": "mean by position, after",
        }
        sentence = (
            "Root mean square of what the rewired layer's stream lacks, without and with W_c, on calibration text."
        )
        lines = [
            Line(name, layers, [fit[key] for fit in fits], color=COLORS[key.startswith("mean")], dashed="before" in key)
            for key, name in names.items()
        ]
        made.append(
            Panel("calibration", "What W_c makes up for", sentence, "layer", "RMS error", lines, log_y=True, wide=True)
        )
    if curve:
        x = [point["share"] for point in curve]
        low, high = ([point["kl_ci95"][end] for point in curve] for end in (0, 1))
        lines = [Line("search", x, [point["kl"] for point in curve], low, high)]
        paper = record.choice.get("paper")
        if paper is not None:
            low, high = ([end] for end in paper["kl_ci95"])
            lines.append(Line("fixed superblocks", [paper["share"]], [paper["kl"]], low, high))
        sentence = (
            "KL to the original on text that was not searched, without compensation, as states are taken away; 95 % "
            "bootstrap intervals over windows."
        )
        title, titles = "Cache against damage", ("cached share", "KL (nats a token)")
        made.append(Panel("trade_off", title, sentence, *titles, lines, wide=True, bounds=(0, math.inf)))
    return made


def tables(record: RetrofitRecord) -> list[Table]:
    """Return the tables: what became of the weights, how layers were chosen, and with what this was made."""
    rows: list[list[str | list[str]]] = [
        [name, str(len(found)), [*found[:6], *(["…"] if len(found) > 6 else [])]]
        for name, found in record.weights.items()
    ]
    states = ("queries", "keys", "values", "mlps")
    changed = [i for i in range(record.model["layers"]) if any(record.plan[state][i] != i for state in states)]
    plan = [[str(i), *(_source(record.plan[state][i], i) for state in states)] for i in changed]
    seconds = {f"{key}, seconds": f"{value:.1f}" for key, value in record.seconds.items()}
    made = [[key, str(value)] for key, value in {**record.settings, **seconds}.items() if value is not None]
    return [
        ("Weights", ["", "count", "names"], rows),
        ("Who reads from whom (all other layers own everything)", ["layer", "queries", "keys", "values", "MLP"], plan),  # type: ignore[list-item]
        ("Made with", ["setting", "value"], [*made, *map(list, record.environment["versions"].items())]),  # type: ignore[list-item]
    ]


def _source(source: int | None, layer: int) -> str:
    return "–" if source is None else "own" if source == layer else f"← {source}"


def model_card(record: RetrofitRecord, name: str, command: str) -> str:
    """Return the README of a model's folder."""
    own = record.model["retrofit_class"] == "CrossLayerForCausalLM"
    load = ["import crosslayer  # registers the model class", "from transformers import AutoModelForCausalLM"]
    versions = ", ".join(f"{key} {value}" for key, value in record.environment["versions"].items() if value)
    meta = [
        "---",
        "library_name: transformers",
        f"tags: [crosslayer, {', '.join(e['name'] for e in record.methods)}]",
        "---",
    ]
    body = [
        f"# {name}, rewired",
        *words(record),
        "## Use",
        "\n".join(
            ["```python", *load[0 if own else 1 :], 'model = AutoModelForCausalLM.from_pretrained("FOLDER")', "```"]
        ),
        "## How it was made",
        f"```sh\n{command}\n```",
        f"Seed {record.settings['seed']}. {versions}.",
        "## Limits",
        "- The figures hold for the text they were measured on; other text, tasks and lengths can suffer more.\n"
        "- Storing less is not reading less: a layer that borrows keys or values reads its lender's at every step.\n"
        "- `crosslayer verify FOLDER` checks the files, the plan and that cached, padded and compiled runs agree.\n"
        "- The licence is that of the original model.",
    ]
    return "\n".join(meta) + "\n\n" + "\n\n".join(body) + "\n"
