"""The page of a retrofit, from its record alone: cards, figures and tables."""

import math

from crosslayer.core.plan import STATES
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, Line, Panel
from crosslayer.verbs.needles.lookup import count_found
from crosslayer.verbs.retrofit.result import CurvePoint, FixedBlocks, RetrofitReport
from crosslayer.verbs.retrofit.words import kl, ratio, sentences

NAMES_SHOWN = 6  # of weights
FIT_LINES = (  # of the figure of what is fitted: name, field of a fit, color, dashed
    ("each token, before", "token_before", 0, True),
    ("each token, after", "token_after", 0, False),
    ("mean by position, before", "mean_before", 1, True),
    ("mean by position, after", "mean_after", 1, False),
)


def layout(record: RetrofitReport) -> Page:
    """Return the parts of the page."""
    model, settings = record.architecture, record.settings
    classes = f"{model.class_} → {model.retrofit_class}"
    measured = f"{settings.windows} windows of {settings.length} tokens, {', '.join(record.judged)}"
    fitted = f"fitted to {', '.join(record.fitted) or 'nothing'}"
    return Page(
        title=f"Retrofit of {model.name}",
        subtitle=f"{record.title} · {classes} · {measured} · {fitted}",
        cards=_cards(record),
        sentences=sentences(record),
        panels=panels(record),
        tables=_tables(record),
    )


def _cards(record: RetrofitReport) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    worst, fitted = record.damage.domains[0], record.calibration.windows
    low, high = worst.ratio_ci95
    kl_low, kl_high = worst.kl_ci95
    about = f"{sum(fitted.values())} windows of {', '.join(fitted)}" if fitted else "no calibration text"
    shown = [
        ("KV cache", f"{record.cache.share:.2%}", "of the original's bytes, as allocated"),
        ("Perplexity", f"× {worst.ratio:.3f}", f"95 %: {low:.3f} to {high:.3f}, on {worst.name}"),
        ("KL", f"{worst.kl:.3f}", f"95 %: {kl_low:.3f} to {kl_high:.3f} nats a token, on {worst.name}"),
        ("Compensation", record.calibration.fit, about),
    ]
    if record.needles is not None:
        asked = sum(len(lookup.found) for lookup in record.needles.retrofit)
        original = count_found(record.needles.original)
        found = f"{count_found(record.needles.retrofit)} of {asked}"
        shown.insert(3, ("Hidden numbers", found, f"found in long texts; the original finds {original}"))
    return shown


def panels(record: RetrofitReport) -> list[Panel]:
    """Return the figures: error by layer where W_c was fitted, and the trade-off curve where layers were searched."""
    drawn = []
    fits = [vars(fit) for fit in record.calibration.layers]
    if fits:
        layers = [float(fit["layer"]) for fit in fits]
        lines = [
            Line(name, layers, [fit[key] for fit in fits], color=COLORS[color], dashed=dashed)
            for name, key, color, dashed in FIT_LINES
        ]
        words = "RMS of what the converted stream lacks, without and with what is fitted, on calibration text."
        title = "What the fit makes up for"
        drawn.append(Panel("calibration", title, words, "layer", "RMS error", lines, log_y=True, wide=True))
    search = record.choice.search
    if search is not None and search.curve:
        drawn.append(_trade_off(search.curve, search.fixed))
    return drawn


def _trade_off(curve: list[CurvePoint], fixed: list[FixedBlocks]) -> Panel:
    low, high = zip(*(point.kl_ci95 for point in curve), strict=True)
    lines = [Line("search", [point.share for point in curve], [point.kl for point in curve], list(low), list(high))]
    for blocks in fixed:
        low, high = blocks.kl_ci95
        lines.append(Line(f"fixed blocks, {blocks.method}", [blocks.share], [blocks.kl], [low], [high]))
    sentence = (
        "KL to the original on text that was not searched, as states are taken away and layers are repaired; 95 % "
        "bootstrap intervals over windows."
    )
    axes = ("cached share", "KL (nats a token)")
    return Panel("trade_off", "Cache against damage", sentence, *axes, lines, wide=True, bounds=(0, math.inf))


def _tables(record: RetrofitReport) -> list[Table]:
    """Return the damage with what was fitted and without it, what became of the weights, and the wiring."""
    damage = []
    for domain in record.damage.domains:
        without = ("–", "–") if domain.gain is None else (ratio(domain.gain.without), kl(domain.gain.without))
        seen = "fitted to" if domain.seen else ""
        damage.append([domain.name, seen, str(domain.windows), ratio(domain), without[0], kl(domain), without[1]])
    weights = []
    for kind, names in record.weights.model_dump().items():
        shown = names[:NAMES_SHOWN]
        weights.append([kind, str(len(names)), [*shown, "…"] if len(names) > len(shown) else shown])
    states = (*STATES, "mlps")
    plan = [
        [str(layer), *(record.plan.source_label(state, layer) for state in states)] for layer in record.changed_layers
    ]
    heads = ["domain", "", "windows", "perplexity ratio", "without the fit", "KL", "without the fit"]
    title = "Who reads from whom (all other layers own everything)"
    return [
        ("Damage by domain", heads, damage),
        ("Weights", ["", "count", "names"], weights),
        (title, ["layer", "queries", "keys", "values", "MLP"], plan),
    ]
