"""The figures, cards, tables and model card of a retrofit, from its record alone."""

import math
from typing import Any

from crosslayer.conversion.record import RetrofitRecord
from crosslayer.output.page import Table, runs
from crosslayer.output.panel import COLORS, Line, Panel


def words(record: RetrofitRecord) -> list[str]:
    """Return the receipt in sentences."""
    cache = record.cache
    made = [
        f"{methods(record)}: the KV cache allocates {cache['share']:.2%} of the original's "
        f"({cache['bytes_per_token_before']:,.0f} → {cache['bytes_per_token_after']:,.0f} bytes a token, "
        f"at {cache['context']:,.0f} tokens); "
        f"parameters {record.model['parameters_before'] / 1e6:.1f} → {record.model['parameters_after'] / 1e6:.1f} M.",
        *_damage_words(record),
    ]
    paper = record.choice.get("paper")
    if paper is not None:
        low, high = paper["ci95"]
        verdict = "better than" if high < 0 else "worse than" if low > 0 else "not told apart from"
        made.append(
            "On windows that were not searched, before compensation, the search's wiring "
            f"({record.cache['share']:.2%} of the cache) is {verdict} fixed superblocks "
            f"({paper['share']:.2%}): KL {paper['search_minus_paper']:+.4f} ({low:+.4f} to {high:+.4f})."
        )
    return made


def _damage_words(record: RetrofitRecord) -> list[str]:
    """Return the damage in sentences: the worst domain, all domains, whether W_c helps, what the figures rest on."""
    rows, everything = record.damage["domains"], record.damage["all"]
    seen = [row for row in rows if row["seen"]]
    worst = rows[0]
    what = "text that it was fitted to (other windows)" if worst["seen"] else "text that it was not fitted to"
    made = [
        f"Worst on {what}, {worst['name']}: perplexity {worst['perplexity_before']:.2f} → "
        f"{worst['perplexity_after']:.2f}, ratio {_with_interval(worst, 'ratio')}; KL to the original "
        f"{_with_interval(worst, 'kl', 4)} nats a token, before any training."
    ]
    if len(rows) > 1:
        parts = [("not fitted to", [row for row in rows if not row["seen"]]), ("fitted to", seen)]
        listed = [f"{title}: {_ratios(group)}" for title, group in parts if group]
        made.append(f"Perplexity ratio by domain, {'; '.join(listed)}.")
    if "gain" in worst:
        made.append(_gain_words(rows))
    if len(seen) == len(rows):
        made.append(
            "All of this is text of the kind that it was fitted to: what it costs on other text was not measured; "
            "fit it to one text (--calibration-text) and judge it on others (--text)."
        )
    counts = sorted({row["windows"] for row in rows})
    made.append(
        f"{everything['windows']} windows of {record.settings['length']} tokens, {'-'.join(map(str, counts))} of each "
        f"domain, none of them fitted to; 95 % paired bootstrap, {_drawn(rows)}: conditional on these texts."
    )
    return made


def _drawn(rows: list[dict[str, Any]]) -> str:
    """Say within what windows were drawn."""
    single = [row["name"] for row in rows if row["strata"] == 1]
    independent = "drawn by window, taken as independent"
    if len(single) == len(rows):
        return independent
    return f"drawn within documents (of {', '.join(single)}: {independent})" if single else "drawn within documents"


def _gain_words(rows: list[dict[str, Any]]) -> str:
    """Say on which domains W_c lowers the KL, on which it raises it, and on which neither can be told."""
    verdicts = {
        "lowers the KL on": [row for row in rows if row["gain_ci95"][1] < 0],
        "raises the KL on": [row for row in rows if row["gain_ci95"][0] > 0],
        "is not told apart from none on": [row for row in rows if row["gain_ci95"][0] <= 0 <= row["gain_ci95"][1]],
    }
    said = [f"{verdict} {', '.join(map(_gain, group))}" for verdict, group in verdicts.items() if group]
    return f"Against the same wiring without it, W_c {'; '.join(said)}."


def _gain(row: dict[str, Any]) -> str:
    return f"{row['name']} ({row['without']['kl']:.3f} → {row['kl']:.3f})"


def _ratios(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['name']} {_with_interval(row, 'ratio')}" for row in rows)


def _with_interval(row: dict[str, Any], key: str, digits: int = 3) -> str:
    low, high = row[f"{key}_ci95"]
    return f"{row[key]:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def methods(record: RetrofitRecord) -> str:
    """Return the methods with the layers that they act on."""
    shown = [(entry["name"], _options(entry)) for entry in record.methods]
    return " + ".join(f"{name} ({options})" if options else name for name, options in shown)


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
    worst, fitted = record.damage["domains"][0], record.calibration["windows"]
    (low, high), (kl_low, kl_high) = worst["ratio_ci95"], worst["kl_ci95"]
    about = f"{sum(fitted.values())} windows of {', '.join(fitted)}" if fitted else "no calibration text"
    return [
        ("KV cache", f"{record.cache['share']:.2%}", "of the original's bytes, as allocated"),
        ("Perplexity", f"× {worst['ratio']:.3f}", f"95 %: {low:.3f} to {high:.3f}, on {worst['name']}"),
        ("KL", f"{worst['kl']:.3f}", f"95 %: {kl_low:.3f} to {kl_high:.3f} nats a token, on {worst['name']}"),
        ("Compensation", record.calibration["fit"], about),
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
        _by_domain(record),
        ("Weights", ["", "count", "names"], rows),
        ("Who reads from whom (all other layers own everything)", ["layer", "queries", "keys", "values", "MLP"], plan),  # type: ignore[list-item]
        ("Made with", ["setting", "value"], [*made, *map(list, record.environment["versions"].items())]),  # type: ignore[list-item]
    ]


def _by_domain(record: RetrofitRecord) -> Table:
    """Return the damage of each domain, with and without W_c."""
    rows = [
        [
            row["name"],
            "fitted to" if row["seen"] else "",
            str(row["windows"]),
            _with_interval(row, "ratio"),
            _with_interval(row["without"], "ratio") if "without" in row else "–",
            _with_interval(row, "kl"),
            _with_interval(row["without"], "kl") if "without" in row else "–",
        ]
        for row in record.damage["domains"]
    ]
    heads = ["domain", "", "windows", "perplexity ratio", "without W_c", "KL", "without W_c"]
    return ("Damage by domain", heads, rows)  # type: ignore[return-value]


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
