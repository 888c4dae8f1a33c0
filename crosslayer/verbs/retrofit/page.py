"""The page of a retrofit, from its record alone: cards, figures and tables."""

import math
from collections.abc import Sequence
from statistics import fmean

from crosslayer.core.plan import CACHED, PASSED, STATES
from crosslayer.judge.retrieval import count_retrieved
from crosslayer.output.formatting import UNKNOWN, listed
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, Line, Panel, Wires
from crosslayer.stats.estimate import band
from crosslayer.verbs.retrofit.result import Alternative, CurvePoint, MeasuredBaseline, RetrofitReport
from crosslayer.verbs.retrofit.sentences import QUICK, sentences

FITTED = {"none": "nothing", "zero": "nothing", "refit": "W_c and W_o", "refit-o": "W_o"}
FIT_LINES = (  # of the calibration figure: name, field of a fit, color, dashed
    ("per token, before", "token_before", 0, True),
    ("per token, after", "token_after", 0, False),
    ("mean by position, before", "mean_before", 1, True),
    ("mean by position, after", "mean_after", 1, False),
)


def layout(record: RetrofitReport) -> Page:
    """Return the content of the page."""
    model, settings = record.architecture, record.settings
    classes = f"{model.class_} → {model.retrofit_class}"
    evaluated = f"{settings.windows} windows of {settings.length} tokens, {', '.join(record.judged)}"
    verdict, *others = [line for line in sentences(record) if line != QUICK]
    calibrated = f"calibrated on {', '.join(record.fitted)}" if record.fitted else "not calibrated"
    return Page(
        title=f"Retrofit of {model.name}" + (" (quick)" if settings.quick else ""),
        subtitle=f"{record.title} · {classes} · {evaluated} · {calibrated}",
        cards=_cards(record),
        sentences=[f"{verdict} {others[0]}", *([QUICK] if settings.quick else []), *others[1:]],
        panels=panels(record),
        tables=_tables(record),
    )


def _cards(record: RetrofitReport) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    worst, calibration = record.damage.domains[0], record.calibration.windows
    domain = f"on {worst.name} ({'calibration' if worst.seen else 'unseen'} text)"
    text = f"on {sum(calibration.values())} windows of {', '.join(calibration)}"
    size = ("KV cache", f"{record.cache.share:.2%}", "of the original's 16-bit cache, as allocated")
    if record.plan.reads_less:
        note = f"of the original's bytes in a step after {record.cache.context:,} tokens"
        size = ("Read", f"{record.cache.read_share:.1%}", note)
    cards = [
        size,
        ("Perplexity", f"×{worst.ratio.text()}", f"95% CI, {domain}"),
        ("KL", worst.kl.text(), f"nats/token, 95% CI, {domain}"),
        ("Fitted", FITTED.get(record.calibration.fit, "W_c"), text if calibration else "no calibration text"),
    ]
    if record.needles is not None:
        total = sum(len(result.found) for result in record.needles.retrofit)
        original = count_retrieved(record.needles.original)
        count = f"{count_retrieved(record.needles.retrofit)} of {total}"
        cards.insert(3, ("Hidden numbers", count, f"retrieved from long texts; the original retrieves {original}"))
    return cards


def panels(record: RetrofitReport) -> list[Panel]:
    """Return the figures: what each layer caches, what a fit recovers, and bytes against damage."""
    figures = [_by_layer(record)]
    fits = [vars(fit) for fit in record.calibration.layers]
    if fits:
        layers = [float(fit["layer"]) for fit in fits]
        lines = [
            Line(name, layers, [fit[key] for fit in fits], color=COLORS[color], dashed=dashed)
            for name, key, color, dashed in FIT_LINES
        ]
        caption = "RMS difference to the original's residual stream, before and after the fit, on calibration text."
        title = "What the compensation recovers"
        figures.append(Panel("calibration", title, caption, "layer", "RMS error", lines, log_y=True))
    if record.alternatives and not record.settings.sweep:
        figures.append(_bytes_and_damage(record.alternatives))
    search = record.choice.search
    if search is not None and search.curve:
        figures.append(_trade_off(search.curve, search.baselines, record.plan.reads_less))
    return figures


def _by_layer(record: RetrofitReport) -> Panel:
    """Return the figure of what each layer caches, and from which layers it reads; or of the bytes that it reads."""
    plan, each, axis = record.plan, range(record.plan.layers), "% of the original's bytes"
    if plan.reads_less:
        caption = f"In a step after {record.cache.context:,} tokens, of what the original's layer reads."
        reads = Line("retrofit", [*map(float, each)], [100 * share for share in record.cache.layer_reads])
        return Panel("layers", "What each layer reads", caption, "layer", axis, [reads], bounds=(0, math.inf))
    wires = Wires(
        widths=[100 * fmean(plan.stored_share(state, layer) for state in CACHED) for layer in each],
        kinds=[listed(plan.stored(layer)) for layer in each],
        sources=[sorted({*plan.reads("keys", layer), *plan.reads("values", layer)} - {layer}) for layer in each],
    )
    caption = "Share of the original's bytes of a token. Arrows come from the layers whose states a layer reads."
    return Panel("layers", "What each layer caches", caption, axis, "layer", wires=wires)


def _bytes_and_damage(rows: Sequence[Alternative]) -> Panel:
    """Return the figure of bytes against KL, a point for each cache."""
    lines = [Line(row.name, [row.share], *band([row.kl])) for row in rows]
    caption = (
        "Share of the original's 16-bit cache against KL to the original, with 95% intervals; lower left is better."
    )
    axes = ("share of the KV cache", "KL (nats/token)")
    ticks = {share / 10: f"{10 * share}%" for share in range(1, 11)}
    drawn = {"wide": True, "log_y": True, "bounds": (0, math.inf), "x_ticks": ticks}
    return Panel("alternatives", "What other caches cost", caption, *axes, lines, **drawn)


def _trade_off(curve: list[CurvePoint], baselines: list[MeasuredBaseline], of_reads: bool) -> Panel:
    """Return the figure of the search's steps: cache size, or what a decoding step reads, against damage."""
    lines = [Line("search", [point.share for point in curve], *band([point.kl for point in curve]))]
    for baseline in baselines:
        label = "evenly spaced choosers" if of_reads else f"fixed blocks, {baseline.method}"
        lines.append(Line(label, [baseline.share], *band([baseline.kl])))
    caption = "KL to the original on text that the search did not use. 95% bootstrap intervals over windows."
    axes = ("share of keys and values read" if of_reads else "share of the KV cache", "KL (nats/token)")
    title = "Reads against damage" if of_reads else "Cache size against damage"
    return Panel("trade_off", title, caption, *axes, lines, wide=True, bounds=(0, math.inf))


def tables(record: RetrofitReport) -> list[Table]:
    """Return the table that is printed, too: of a sweep's variants, or of other caches."""
    return [_alternatives(record)] if record.alternatives else []


def damage_table(record: RetrofitReport) -> Table:
    """Return the table of the damage by domain, with and without compensation."""
    rows = []
    for domain in record.damage.domains:
        perplexities = [f"{domain.perplexity_before:.2f}", f"{domain.perplexity_after:.2f}"]
        own, without = [domain.ratio.text(), domain.kl.text()], [UNKNOWN, UNKNOWN]
        if domain.gain is not None:
            without = [domain.gain.without.ratio.text(), domain.gain.without.kl.text()]
        windows, seen = str(domain.kl.n), "yes" if domain.seen else "no"
        rows.append([domain.name, seen, windows, *perplexities, *own, *without])
    figures = ["perplexity before", "after", "ratio (95% CI)", "KL, nats/token (95% CI)"]
    head = ["domain", "calibrated on", "windows", *figures, "ratio without the fit", "KL without the fit"]
    return "Damage by domain", head, rows


def _alternatives(record: RetrofitReport) -> Table:
    """Return the table of quantized caches next to the retrofit's, or of a sweep's variants."""
    rows, swept = [], bool(record.settings.sweep)
    retrieved = None if record.needles is None else record.needles.retrofit
    for number, row in enumerate(record.alternatives):
        asked = retrieved if number == 0 else row.needles
        found = f"{count_retrieved(asked)} of {sum(len(result.found) for result in asked)}" if asked else UNKNOWN
        than = row.change.text() if number else UNKNOWN
        means = [f"{row.kl_by_domain[domain]:.3f}" for domain in record.domains]
        rest = means if swept else [found, UNKNOWN if row.kv_bits is None else [f"--kv-bits {row.kv_bits}"]]
        rows.append([row.name, f"{row.share:.1%}", row.kl.text(4), than, *rest])
    if swept:
        head = ["variant", "bytes", "KL", "KL minus the first's", *(f"on {domain}" for domain in record.domains)]
        return "Variants (share of the original's 16-bit cache; KL in nats/token)", head, rows
    head = ["cache", "bytes", "KL", "KL minus the retrofit's", "hidden numbers", "option"]
    return "What other caches cost (share of the original's 16-bit cache; KL in nats/token)", head, rows


def _tables(record: RetrofitReport) -> list[Table]:
    """Return the damage, and the sources of each layer."""
    states = (*PASSED, "mlps") if record.plan.reads_less else (*STATES, "mlps")
    plan = [
        [str(layer), *(record.plan.source_label(state, layer) for state in states)] for layer in record.changed_layers
    ]
    title = "Sources of converted layers (all other layers compute their own states)"
    return [
        *tables(record),
        damage_table(record),
        (title, ["layer", *states[:-1], "MLP"], plan),
    ]
