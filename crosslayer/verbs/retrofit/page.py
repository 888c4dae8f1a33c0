"""The page of a retrofit, from its record alone: sentences, cards, figures and tables."""

import math
from collections.abc import Sequence
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.core.plan import CACHED, PASSED, STATES
from crosslayer.judge.page import found, grid, quantity_name, retrieval_sentence
from crosslayer.judge.report import ALL, Against, Row
from crosslayer.judge.rows import NEW, RETRIEVAL, WINDOW_QUANTITIES
from crosslayer.output.formatting import listed, ranges
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, Line, Panel, Wires
from crosslayer.stats.estimate import band
from crosslayer.verbs.retrofit.moments import FITTED_WEIGHTS
from crosslayer.verbs.retrofit.result import ORIGINAL, UNFITTED, RetrofitReport

FITTED = {"none": "nothing", "zero": "nothing", "refit": "W_c and W_o", "refit-o": "W_o"}
FIT_LINES = (  # of the calibration figure: name, field of a fit, color, dashed
    ("per token, before", "token_before", 0, True),
    ("per token, after", "token_after", 0, False),
    ("mean by position, before", "mean_before", 1, True),
    ("mean by position, after", "mean_after", 1, False),
)
QUICK = "A first estimate (--quick): few and short windows, for the fit too. Run it without --quick to rely on it."
EFFECTS = {
    "lower": "lowers",
    "higher": "raises",
    "no difference seen": "does not significantly change",
    None: "was not tested for its effect on",
}
SEARCHED = {  # by the verdict on the KL of what it is compared with
    "higher": "beats",
    "lower": "is worse than",
    "no difference seen": "is not significantly different from",
    None: "was not tested against",
}
# Characters of an option in a title: one with an entry for each of many layers would fill the page.
SHOWN = 200


def title(methods: Sequence[Method]) -> str:
    """Return the methods with the layers that they act on, such as "NAME (groups 18-21, 22-25) + NAME"."""
    titles = []
    for method in methods:
        changed = []
        for option in options_of(method):
            value = vars(method)[option.name]
            # defaults are left out, except that of `compensation`: it says that there is a W_c
            if value not in (None, ()) and (value != option.default or option.name == "compensation"):
                shown = _shown(value)
                changed.append(f"{option.name} {shown if len(shown) <= SHOWN else f'of {len(value)} layers'}")
        titles.append(f"{method.name()} ({', '.join(changed)})" if changed else method.name())
    return " + ".join(titles)


def _shown(value: Any) -> str:
    """Write layers as 18-21, 22-25, and groups with gaps as 18+20, 19+21."""
    if not isinstance(value, list | tuple):
        return str(value)
    if () in value:  # an entry for each layer, empty for some
        return f"of {sum(entry != () for entry in value)} layers"
    if all(isinstance(entry, int) for entry in value):
        return ranges(value)
    return ", ".join(_shown(entry).replace(", ", "+") for entry in value)


def sentences(record: RetrofitReport) -> list[str]:
    """Return the memory saved, the quality lost, and what was measured."""
    cache, settings, domains = record.cache, record.settings, record.domains
    model = record.architecture
    lines = [
        _in_short(record),
        f"{record.title}: KV cache {cache.share:.2%} of the original's 16-bit cache "
        f"({cache.bytes_per_token_before:,.0f} → {cache.bytes_per_token_after:,.0f} bytes per token at "
        f"{cache.context:,.0f} tokens), parameters {model.parameters / 1e6:.1f} → "
        f"{model.parameters_after / 1e6:.1f} M.",
        *_damage(record),
    ]
    if settings.quick:
        lines.insert(0, QUICK)
    if record.plan.reads_less:
        lines.append(
            f"A decoding step after {cache.context:,} tokens reads {cache.read_share:.1%} of the cached bytes that the "
            "original reads."
        )
    if record.step is not None:
        lines.append(
            f"A decoding step after {record.step.context:,} tokens takes {record.step.time.change.text(unit='x')} of "
            f"the original's time ({record.step.time.durations()})."
        )
    if len(domains) > 1:
        labels = []
        for label, is_seen in (("unseen", False), ("calibration", True)):
            labeled = [domain for domain in domains if (domain in record.fitted) == is_seen]
            ratios = [f"{domain} {record.of('perplexity', domain).text()}" for domain in labeled]
            labels += [f"{label} {', '.join(ratios)}"] if ratios else []
        lines.append(f"Perplexity ratio by domain (95% CI): {'; '.join(labels)}.")
    if record.rows_of("KL", Against.UNFITTED):
        lines.append(gain_sentence(record))
    if set(domains) <= set(record.fitted):
        lines.append(
            "Every evaluation domain was also calibrated on, so the loss on other text was not measured: calibrate on "
            "some text (--calibration-text) and evaluate on other text (--text)."
        )
    counts = "-".join(str(count) for count in sorted({record.of("KL", domain).n for domain in domains}))
    lines.append(
        f"Measured on {record.of('KL').n} windows of {settings.length} tokens ({counts} per domain), none of them used "
        "for calibration. 95% CI: paired bootstrap over windows, within long documents, conditional on these texts."
    )
    lines += retrieval_sentence(record.rows_of(RETRIEVAL, candidate=record.candidate))
    if settings.sweep:
        count = len(record.changes("bytes"))
        lines.append(f"The table has {count} variants; the rest is of the first. No model is saved.")
    else:
        lines += _cheaper(record.caches)
    search = record.choice.search
    baselines = [] if search is None else search.baselines
    return lines + [_searched(record, row) for row in baselines if row.against == Against.SEARCHED]


def _in_short(record: RetrofitReport) -> str:
    """Return what is kept and lost in one sentence: the cache, the perplexity of the worst text, numbers found."""
    if record.plan.reads_less:
        kept = f"Reads {record.cache.read_share:.0%} of the cached bytes"
    elif record.cache.share == 1:
        kept = "Saves nothing of the KV cache"
    else:
        kept = f"Keeps {record.cache.share:.0%} of the KV cache"
    ratios = {domain: record.of("perplexity", domain).value for domain in record.domains}
    # text that nothing was fitted to counts, if there is any
    ratios = {domain: ratio for domain, ratio in ratios.items() if domain not in record.fitted} or ratios
    worst = max(ratios, key=lambda domain: ratios[domain])
    parts = [kept, f"perplexity of the worst text ({worst}) ×{ratios[worst]:.2f}"]
    numbers = record.row(record.candidate, RETRIEVAL)
    if numbers is not None:
        parts.append(
            f"{numbers.count(numbers.value)} hidden numbers found, {numbers.count(numbers.original)} by the original"
        )
    return "; ".join(parts) + "."


def _damage(record: RetrofitReport) -> list[str]:
    """Return the perplexities on the worst domain, and the KL on the worst, the best and perhaps a new domain."""
    domains = record.domains
    first = domains[0]  # the worst unseen one, if there is one
    kl = {domain: record.of("KL", domain) for domain in domains}
    best = min(kl, key=lambda domain: kl[domain].value)
    worst = max(kl, key=lambda domain: kl[domain].value)
    line = f"KL to the original, in nats/token: {kl[worst].text()} on {worst}"
    if len(domains) > 1:
        line += f", the worst of {len(domains)} domains, {kl[best].value:.3f} on {best}, the best"
    new = record.row(record.candidate, "KL", NEW)
    if new is not None and new.change is not None and new.change.interval is not None:
        line += f"; on a new domain {new.change.text()}, a 95% prediction interval"
    perplexity = record.row(record.candidate, "perplexity", first)
    assert perplexity is not None
    return [
        f"Worst {'calibration' if first in record.fitted else 'unseen'} domain ({first}): perplexity "
        f"{perplexity.original:.2f} → {perplexity.value:.2f}, ×{record.of('perplexity', first).text()}.",
        f"{line}.",
    ]


def _cheaper(rows: Sequence[Row]) -> list[str]:
    """Return which quantized caches of the original do less damage than the first row's with no more bytes, if any."""
    size = {row.candidate: row.value or 0.0 for row in rows if row.quantity == "bytes"}
    names = []
    for row in rows:
        is_lower = row.quantity == "KL" and row.against == Against.FIRST and row.verdict == "lower"
        if is_lower and row.candidate.startswith(ORIGINAL) and size[row.candidate] <= size[rows[0].candidate]:
            names.append(row.candidate)
    return [f"For memory alone, {' or '.join(names)} does less damage with no more bytes."] if names else []


def gain_sentence(record: RetrofitReport) -> str:
    """Return on which domains compensation lowers the KL, raises it, or makes no significant difference."""
    effects: dict[str, list[str]] = {}
    rows = {row.scope: row for row in record.rows_of("KL", Against.UNFITTED)}
    for domain in record.domains:
        row = rows[domain]
        verdict = None if row.change is None else row.change.verdict
        effects.setdefault(EFFECTS[verdict], []).append(f"{domain} ({row.original:.3f} → {row.value:.3f})")
    written = "; ".join(f"{effect} the KL on {', '.join(changes)}" for effect, changes in effects.items())
    return f"Fitting {FITTED_WEIGHTS.get(record.calibration.fit, 'the linear compensation W_c')} {written}."


def _searched(record: RetrofitReport, baseline: Row) -> str:
    """Return whether a configuration that was not searched is better than the searched one."""
    if record.plan.reads_less:
        share = f"{record.cache.read_share:.1%} of the reads"
        compared = "evenly spaced choosers"
        fitted = "without compensation"  # a search for choosers fits nothing
    else:
        share = f"{record.cache.share:.2%} of the cache"
        compared = f"fixed blocks of {baseline.candidate}"
        fitted = "each layer compensated separately" if record.calibration.layers else "without compensation"
    verdict = None if baseline.change is None else baseline.change.verdict
    return (
        f"The searched configuration ({share}) {SEARCHED[verdict]} {compared} ({baseline.details['share']:.2%}): "
        f"KL {baseline.original:.4f} against {baseline.value:.4f}, a difference of {baseline.change_text()}, on "
        f"windows that the search did not use, {fitted}."
    )


def layout(record: RetrofitReport) -> Page:
    """Return the page."""
    model, settings = record.architecture, record.settings
    # QUICK stands second here, under the verdict; where sentences are printed, it comes first
    first, *rest = [line for line in sentences(record) if line != QUICK]
    calibrated = f"calibrated on {', '.join(record.fitted)}" if record.fitted else "not calibrated"
    states = (*PASSED, "mlps") if record.plan.reads_less else (*STATES, "mlps")
    sources = []
    for layer in record.changed_layers:
        sources.append([str(layer), *(record.plan.source_label(state, layer) for state in states)])
    title = "Sources of converted layers (all other layers compute their own states)"
    return Page(
        title=f"Retrofit of {model.name}" + (" (quick)" if settings.quick else ""),
        subtitle=(
            f"{record.title} · {model.class_} → {model.retrofit_class} · {settings.windows} windows of "
            f"{settings.length} tokens, {', '.join(record.judged)} · {calibrated}"
        ),
        cards=_cards(record),
        sentences=[first, *([QUICK] if settings.quick else []), *rest],
        panels=panels(record),
        lead=(),
        tables=[*tables(record), damage_table(record), (title, ["layer", *states[:-1], "MLP"], sources)],
    )


def _cards(record: RetrofitReport) -> list[tuple[str, str, str]]:
    """Return the headline cards: title, figure, explanation."""
    worst = record.domains[0]
    calibration = record.calibration.windows
    domain = f"on {worst} ({'calibration' if worst in record.fitted else 'unseen'} text)"
    text = f"on {sum(calibration.values())} windows of {', '.join(calibration)}"
    size = ("KV cache", f"{record.cache.share:.2%}", "of the original's 16-bit cache, as allocated")
    if record.plan.reads_less:
        note = f"of the original's bytes in a step after {record.cache.context:,} tokens"
        size = ("Read", f"{record.cache.read_share:.1%}", note)
    cards = [
        size,
        ("Perplexity", f"×{record.of('perplexity', worst).text()}", f"95% CI, {domain}"),
        ("KL", record.of("KL", worst).text(), f"nats/token, 95% CI, {domain}"),
        ("Fitted", FITTED.get(record.calibration.fit, "W_c"), text if calibration else "no calibration text"),
    ]
    numbers = record.row(record.candidate, RETRIEVAL)
    if numbers is not None:
        note = f"retrieved from long texts; the original retrieves {numbers.count(numbers.original)}"
        cards.insert(3, ("Hidden numbers", numbers.count(numbers.value), note))
    return cards


def panels(record: RetrofitReport) -> list[Panel]:
    """Return the figures: what each layer caches, what a fit recovers, and bytes against damage."""
    figures = [_by_layer(record)]
    possible, axis = (0, math.inf), "KL (nats/token)"
    fits = [vars(fit) for fit in record.calibration.layers]
    search = record.choice.search
    if fits:
        layers = [float(fit["layer"]) for fit in fits]
        lines = [
            Line(name, layers, [fit[key] for fit in fits], color=COLORS[color], dashed=dashed)
            for name, key, color, dashed in FIT_LINES
        ]
        caption = "RMS difference to the original's residual stream, before and after the fit, on calibration text."
        title = "What the compensation recovers"
        figures.append(Panel("calibration", title, caption, "layer", "RMS error", lines, log_y=True))
    if record.caches:
        share = {row.candidate: row.change.value for row in record.caches if row.quantity == "bytes" and row.change}
        lines = []
        for row in record.caches:
            if row.quantity == "KL" and row.against == Against.ORIGINAL and row.change is not None:
                lines.append(Line(row.candidate, [share[row.candidate]], *band([row.change])))
        caption = (
            "Share of the original's 16-bit cache against KL to the original, with 95% intervals; lower left is better."
        )
        ticks = {tenth / 10: f"{10 * tenth}%" for tenth in range(1, 11)}
        drawn: dict[str, Any] = {"wide": True, "log_y": True, "bounds": possible, "x_ticks": ticks}
        title, x = "What other caches cost", "share of the KV cache"
        figures.append(Panel("alternatives", title, caption, x, axis, lines, **drawn))
    if search is not None and search.curve:
        title, share, baseline = "Cache size against damage", "share of the KV cache", "fixed blocks, {}"
        if record.plan.reads_less:
            title, share, baseline = "Reads against damage", "share of keys and values read", "evenly spaced choosers"
        lines = [Line("search", [point.share for point in search.curve], *band([point.kl for point in search.curve]))]
        for row in search.baselines:
            if row.against == Against.ORIGINAL and row.change is not None:
                lines.append(Line(baseline.format(row.candidate), [float(row.details["share"])], *band([row.change])))
        caption = "KL to the original on text that the search did not use. 95% bootstrap intervals over windows."
        figures.append(Panel("trade_off", title, caption, share, axis, lines, wide=True, bounds=possible))
    return figures


def _by_layer(record: RetrofitReport) -> Panel:
    """Return the figure of what each layer caches, and from which layers it reads; or of the bytes that it reads."""
    plan = record.plan
    layers, axis = range(plan.layers), "% of the original's bytes"
    if plan.reads_less:
        caption = f"In a step after {record.cache.context:,} tokens, of what the original's layer reads."
        reads = Line("retrofit", [*map(float, layers)], [100 * share for share in record.cache.layer_reads])
        return Panel("layers", "What each layer reads", caption, "layer", axis, [reads], bounds=(0, math.inf))
    wires = Wires(
        widths=[100 * len(plan.stored(layer)) / len(CACHED) for layer in layers],
        kinds=[listed(plan.stored(layer)) for layer in layers],
        sources=[sorted({*plan.reads("keys", layer), *plan.reads("values", layer)} - {layer}) for layer in layers],
    )
    caption = "Share of the original's bytes of a token. Arrows come from the layers whose states a layer reads."
    return Panel("layers", "What each layer caches", caption, axis, "layer", wires=wires)


def damage_table(record: RetrofitReport) -> Table:
    """Return the table of the damage by domain, with and without compensation."""
    cells = []
    for domain in record.domains:
        line = f"{domain} ({'calibrated on' if domain in record.fitted else 'unseen'})"
        for row in record.rows:
            is_measured = row.against == Against.ORIGINAL and row.quantity in WINDOW_QUANTITIES
            if is_measured and row.scope == domain and row.candidate in (record.candidate, UNFITTED):
                column = f"{quantity_name(row)}{', without the fit' if row.candidate == UNFITTED else ''}"
                before = f"{row.original:.2f} → {row.value:.2f}, " if row.quantity == "perplexity" else ""
                cells.append((line, column, before + row.change_text()))
    return grid("Damage by domain (95% CI)", "domain", cells)


def tables(record: RetrofitReport) -> list[Table]:
    """Return the table that is printed, too: of a sweep's variants, or of quantized caches next to the retrofit's."""
    if record.settings.sweep:
        title = "Variants"
        rows = [row for row in record.rows if row.scope != NEW and row.quantity in ("bytes", "KL")]
        # against the first variant only on all windows: by domain the table would be twice as wide
        rows = [row for row in rows if row.against == Against.ORIGINAL or row.scope == ALL]
    else:
        title = "What other caches cost"
        rows = list(record.caches)
    cells = []
    for row in rows:
        column = quantity_name(row) if row.scope == ALL else f"on {row.scope}"
        cells.append((row.candidate, column, found(row)))
    title += " (share of the original's 16-bit cache; intervals: 95%)"
    return [grid(title, "cache", cells)] if rows else []
