"""The page of a retrofit, from its record alone: cards, figures and tables."""

import math

from crosslayer.core.plan import STATES
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, Line, Panel
from crosslayer.verbs.needles.lookup import count_found
from crosslayer.verbs.retrofit.record import CurvePoint, DomainDamage, FixedBlocks
from crosslayer.verbs.retrofit.result import Receipt
from crosslayer.verbs.retrofit.words import kl, ratio, sentences

NAMES_SHOWN = 6  # of weights
FIT_LINES = (  # of the figure of what is fitted: name, field of a fit, color, dashed
    ("each token, before", "token_before", 0, True),
    ("each token, after", "token_after", 0, False),
    ("mean by position, before", "mean_before", 1, True),
    ("mean by position, after", "mean_after", 1, False),
)


def layout(record: Receipt) -> Page:
    """Return the parts of the page."""
    model, options = record.architecture, record.options
    classes = f"{model.source_class} → {model.retrofit_class}"
    measured = f"{options.windows} windows of {options.length} tokens, {', '.join(record.texts.judged)}"
    return Page(
        title=f"Retrofit of {model.name}",
        subtitle=f"{record.title} · {classes} · {measured}",
        cards=cards(record),
        words=sentences(record),
        panels=panels(record),
        tables=tables(record),
    )


def cards(record: Receipt) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    worst, fitted = record.damage.domains[0], record.calibration.windows
    low, high = worst.ratio_ci95
    kl_low, kl_high = worst.kl_ci95
    about = f"{sum(fitted.values())} windows of {', '.join(fitted)}" if fitted else "no calibration text"
    needles = []
    if record.needles is not None:
        asked = sum(len(lookup.found) for lookup in record.needles.retrofit)
        counts = count_found(record.needles.retrofit), count_found(record.needles.original)
        needles = [
            ("Hidden numbers", f"{counts[0]} of {asked}", f"found in long texts; the original finds {counts[1]}")
        ]
    return [
        ("KV cache", f"{record.cache.share:.2%}", "of the original's bytes, as allocated"),
        ("Perplexity", f"× {worst.ratio:.3f}", f"95 %: {low:.3f} to {high:.3f}, on {worst.name}"),
        ("KL", f"{worst.kl:.3f}", f"95 %: {kl_low:.3f} to {kl_high:.3f} nats a token, on {worst.name}"),
        *needles,
        ("Compensation", record.calibration.fit, about),
    ]


def panels(record: Receipt) -> list[Panel]:
    """Return the figures: error by layer where W_c was fitted, and the trade-off curve where layers were searched."""
    drawn = []
    if record.calibration.layers:
        drawn.append(_fits(record))
    search = record.choice.search
    if search is not None and search.curve:
        drawn.append(_trade_off(search.curve, search.fixed))
    return drawn


def _fits(record: Receipt) -> Panel:
    fits = [vars(fit) for fit in record.calibration.layers]
    layers = [float(fit["layer"]) for fit in fits]
    lines = [
        Line(name, layers, [fit[key] for fit in fits], color=COLORS[color], dashed=dashed)
        for name, key, color, dashed in FIT_LINES
    ]
    sentence = (
        "Root mean square of what the rewired stream lacks, without and with what is fitted, on calibration text."
    )
    return Panel(
        "calibration", "What the fit makes up for", sentence, "layer", "RMS error", lines, log_y=True, wide=True
    )


def _trade_off(curve: list[CurvePoint], fixed: list[FixedBlocks]) -> Panel:
    shares = [point.share for point in curve]
    low = [point.kl_ci95[0] for point in curve]
    high = [point.kl_ci95[1] for point in curve]
    lines = [Line("search", shares, [point.kl for point in curve], low, high)]
    for blocks in fixed:
        low, high = blocks.kl_ci95
        lines.append(Line(f"fixed blocks, {blocks.method}", [blocks.share], [blocks.kl], [low], [high]))
    sentence = (
        "KL to the original on text that was not searched, as states are taken away and layers are repaired; 95 % "
        "bootstrap intervals over windows."
    )
    return Panel(
        "trade_off",
        "Cache against damage",
        sentence,
        "cached share",
        "KL (nats a token)",
        lines,
        wide=True,
        bounds=(0, math.inf),
    )


def tables(record: Receipt) -> list[Table]:
    """Return the tables: damage by domain, what became of the weights, who reads from whom, and how it was done."""
    return [_by_domain(record.damage.domains), _weights(record), _plan(record), _settings(record)]


def _by_domain(domains: list[DomainDamage]) -> Table:
    """Return the damage of each domain, with what was fitted and without it."""
    rows = []
    for domain in domains:
        without = None if domain.gain is None else domain.gain.without
        rows.append(
            [
                domain.name,
                "fitted to" if domain.seen else "",
                str(domain.windows),
                ratio(domain),
                "–" if without is None else ratio(without),
                kl(domain),
                "–" if without is None else kl(without),
            ]
        )
    heads = ["domain", "", "windows", "perplexity ratio", "without the fit", "KL", "without the fit"]
    return ("Damage by domain", heads, rows)


def _weights(record: Receipt) -> Table:
    weights = record.weights
    rows = []
    for title, names in (
        ("dropped", weights.dropped),
        ("merged", weights.merged),
        ("new", weights.new),
        ("refitted", weights.refitted),
    ):
        shown = names[:NAMES_SHOWN]
        rows.append([title, str(len(names)), [*shown, "…"] if len(names) > len(shown) else shown])
    return ("Weights", ["", "count", "names"], rows)


def _plan(record: Receipt) -> Table:
    rows = []
    for layer in changed_layers(record):
        rows.append([str(layer), *(record.plan.words(state, layer) for state in (*STATES, "mlps"))])
    title = "Who reads from whom (all other layers own everything)"
    return (title, ["layer", "queries", "keys", "values", "MLP"], rows)


def changed_layers(record: Receipt) -> list[int]:
    """Return the layers that do not own everything."""
    plan = record.plan
    vectors = [plan.sources(state) for state in (*STATES, "mlps")]
    return [layer for layer in range(plan.layers) if any(vector[layer] != layer for vector in vectors)]


def _settings(record: Receipt) -> Table:
    """Return the options that were asked for, texts, seconds and versions."""
    rows = [[name, str(value)] for name, value in record.options.model_dump().items() if value is not None]
    rows += [["text", ", ".join(record.texts.judged)], ["fitted to", ", ".join(record.texts.fitted) or "nothing"]]
    if record.command is not None:
        rows.append(["command", record.command])
    rows += [[f"{phase}, seconds", f"{seconds:.1f}"] for phase, seconds in record.seconds.model_dump().items()]
    rows += [[name, str(version)] for name, version in record.environment.versions.items()]
    return ("Done with", ["setting", "value"], rows)
