"""The page of a retrofit, from its record alone: sentences, cards, figures and tables."""

import math
from collections.abc import Sequence
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.core.plan import CACHED, PASSED, STATES
from crosslayer.judge.damage import DomainDamage
from crosslayer.judge.retrieval import count_retrieved, retrieval_sentence, retrieved_of
from crosslayer.output.formatting import UNKNOWN, listed, ranges
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, Line, Panel, Wires
from crosslayer.stats.estimate import band
from crosslayer.verbs.retrofit.moments import FITTED_WEIGHTS
from crosslayer.verbs.retrofit.result import Alternative, MeasuredBaseline, RetrofitReport

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
SEARCHED = {
    "lower": "beats",
    "higher": "is worse than",
    "no difference seen": "is not significantly different from",
    None: "was not tested against",
}
SHOWN = 200  # characters of an option in a title


def title(methods: Sequence[Method]) -> str:
    """Return the methods with the layers that they act on, such as "NAME (groups 18-21, 22-25) + NAME"."""
    titles = []
    for method in methods:
        changed = []
        for option in options_of(method):
            value = vars(method)[option.name]
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
    cache, model, settings, domains = record.cache, record.architecture, record.settings, record.damage.domains
    lines = [
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
        for label, seen in (("unseen", False), ("calibration", True)):
            ratios = [f"{domain.name} {domain.ratio.text()}" for domain in domains if domain.seen == seen]
            labels += [f"{label} {', '.join(ratios)}"] if ratios else []
        lines.append(f"Perplexity ratio by domain (95% CI): {'; '.join(labels)}.")
    if any(domain.gain is not None for domain in domains):
        lines.append(gain_sentence(domains, record.calibration.fit))
    if all(domain.seen for domain in domains):
        lines.append(
            "Every evaluation domain was also calibrated on, so the loss on other text was not measured: calibrate on "
            "some text (--calibration-text) and evaluate on other text (--text)."
        )
    counts = "-".join(str(count) for count in sorted({domain.kl.n for domain in domains}))
    lines.append(
        f"Measured on {record.damage.all.kl.n} windows of {settings.length} tokens ({counts} per domain), "
        f"none of them used for calibration. 95% CI: paired bootstrap, {sampling(domains)}, conditional on these texts."
    )
    if record.needles is not None:
        lines.append(retrieval_sentence(record.needles.retrofit, record.needles.original))
    if settings.sweep:
        lines.append(f"The table has {len(record.alternatives)} variants; the rest is of the first. No model is saved.")
    else:
        lines += _cheaper(record.alternatives)
    search = record.choice.search
    return lines + [_searched(record, baseline) for baseline in ([] if search is None else search.baselines)]


def _damage(record: RetrofitReport) -> list[str]:
    """Return the perplexities on the worst domain, and the KL on the worst, the best and perhaps a new domain."""
    domains, by_kl = record.damage.domains, sorted(record.damage.domains, key=lambda domain: domain.kl.value)
    first, best, worst = domains[0], by_kl[0], by_kl[-1]
    line = f"KL to the original, in nats/token: {worst.kl.text()} on {worst.name}"
    if len(domains) > 1:
        line += f", the worst of {len(domains)} domains, {best.kl.value:.3f} on {best.name}, the best"
    if record.damage.new_domain is not None:
        line += f"; on a new domain {record.damage.new_domain.text()}, a 95% prediction interval"
    return [
        f"Worst {'calibration' if first.seen else 'unseen'} domain ({first.name}): perplexity "
        f"{first.perplexity_before:.2f} → {first.perplexity_after:.2f}, ×{first.ratio.text()}.",
        f"{line}.",
    ]


def _cheaper(rows: Sequence[Alternative]) -> list[str]:
    """Return which quantized caches of the original do less damage than the first row with no more bytes, if any."""
    names = []
    for row in rows[1:]:
        if row.of == "original" and row.share <= rows[0].share and row.change.verdict == "lower":
            names.append(row.name)
    return [f"For memory alone, {' or '.join(names)} does less damage with no more bytes."] if names else []


def sampling(domains: Sequence[DomainDamage]) -> str:
    """Return how the bootstrap resamples windows."""
    single = [domain.name for domain in domains if domain.strata == 1]
    if len(single) == len(domains):
        return "windows taken as independent"
    return "windows resampled within documents" + (f" ({listed(single)}: taken as independent)" if single else "")


def gain_sentence(domains: Sequence[DomainDamage], fit: str) -> str:
    """Return on which domains compensation lowers the KL, raises it, or makes no significant difference."""
    effects: dict[str, list[str]] = {}
    for domain in domains:
        if domain.gain is not None:
            change = f"{domain.name} ({domain.gain.without.kl.value:.3f} → {domain.kl.value:.3f})"
            effects.setdefault(EFFECTS[domain.gain.kl.verdict], []).append(change)
    listing = "; ".join(f"{effect} the KL on {', '.join(changes)}" for effect, changes in effects.items())
    return f"Fitting {FITTED_WEIGHTS.get(fit, 'the linear compensation W_c')} {listing}."


def _searched(record: RetrofitReport, baseline: MeasuredBaseline) -> str:
    """Return whether the searched configuration is better than one that was not searched."""
    share, others = f"{record.cache.share:.2%} of the cache", f"fixed blocks of {baseline.method}"
    fitted = "each layer compensated separately" if record.calibration.layers else "without compensation"
    if record.plan.reads_less:  # a search for choosers fits nothing
        share, others = f"{record.cache.read_share:.1%} of the reads", "evenly spaced choosers"
        fitted = "without compensation"
    return (
        f"The searched configuration ({share}) {SEARCHED[baseline.change.verdict]} {others} "
        f"({baseline.share:.2%}): KL {baseline.change.text(4, signed=True)} on windows that the search did not use, "
        f"{fitted}."
    )


def layout(record: RetrofitReport) -> Page:
    """Return the page."""
    model, settings = record.architecture, record.settings
    verdict, *others = [line for line in sentences(record) if line != QUICK]
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
        sentences=[f"{verdict} {others[0]}", *([QUICK] if settings.quick else []), *others[1:]],
        panels=panels(record),
        lead=(),
        tables=[*tables(record), damage_table(record), (title, ["layer", *states[:-1], "MLP"], sources)],
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
        note = f"retrieved from long texts; the original retrieves {count_retrieved(record.needles.original)}"
        cards.insert(3, ("Hidden numbers", retrieved_of(record.needles.retrofit), note))
    return cards


def panels(record: RetrofitReport) -> list[Panel]:
    """Return the figures: what each layer caches, what a fit recovers, and bytes against damage."""
    figures, possible = [_by_layer(record)], (0, math.inf)
    fits, search, axis = [vars(fit) for fit in record.calibration.layers], record.choice.search, "KL (nats/token)"
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
        lines = [Line(row.name, [row.share], *band([row.kl])) for row in record.alternatives]
        caption = (
            "Share of the original's 16-bit cache against KL to the original, with 95% intervals; lower left is better."
        )
        ticks = {share / 10: f"{10 * share}%" for share in range(1, 11)}
        drawn: dict[str, Any] = {"wide": True, "log_y": True, "bounds": possible, "x_ticks": ticks}
        title, share = "What other caches cost", "share of the KV cache"
        figures.append(Panel("alternatives", title, caption, share, axis, lines, **drawn))
    if search is not None and search.curve:
        title, share, others = "Cache size against damage", "share of the KV cache", "fixed blocks, {}"
        if record.plan.reads_less:
            title, share, others = "Reads against damage", "share of keys and values read", "evenly spaced choosers"
        lines = [Line("search", [point.share for point in search.curve], *band([point.kl for point in search.curve]))]
        for baseline in search.baselines:
            lines.append(Line(others.format(baseline.method), [baseline.share], *band([baseline.kl])))
        caption = "KL to the original on text that the search did not use. 95% bootstrap intervals over windows."
        figures.append(Panel("trade_off", title, caption, share, axis, lines, wide=True, bounds=possible))
    return figures


def _by_layer(record: RetrofitReport) -> Panel:
    """Return the figure of what each layer caches, and from which layers it reads; or of the bytes that it reads."""
    plan, each, axis = record.plan, range(record.plan.layers), "% of the original's bytes"
    if plan.reads_less:
        caption = f"In a step after {record.cache.context:,} tokens, of what the original's layer reads."
        reads = Line("retrofit", [*map(float, each)], [100 * share for share in record.cache.layer_reads])
        return Panel("layers", "What each layer reads", caption, "layer", axis, [reads], bounds=(0, math.inf))
    wires = Wires(
        widths=[100 * len(plan.stored(layer)) / len(CACHED) for layer in each],
        kinds=[listed(plan.stored(layer)) for layer in each],
        sources=[sorted({*plan.reads("keys", layer), *plan.reads("values", layer)} - {layer}) for layer in each],
    )
    caption = "Share of the original's bytes of a token. Arrows come from the layers whose states a layer reads."
    return Panel("layers", "What each layer caches", caption, axis, "layer", wires=wires)


def damage_table(record: RetrofitReport) -> Table:
    """Return the table of the damage by domain, with and without compensation."""
    rows = []
    for domain in record.damage.domains:
        without = [UNKNOWN, UNKNOWN]
        if domain.gain is not None:
            without = [domain.gain.without.ratio.text(), domain.gain.without.kl.text()]
        rows.append([domain.name, "yes" if domain.seen else "no", str(domain.kl.n)])
        rows[-1] += [f"{domain.perplexity_before:.2f}", f"{domain.perplexity_after:.2f}"]
        rows[-1] += [domain.ratio.text(), domain.kl.text(), *without]
    figures = ["perplexity before", "after", "ratio (95% CI)", "KL, nats/token (95% CI)"]
    head = ["domain", "calibrated on", "windows", *figures, "ratio without the fit", "KL without the fit"]
    return "Damage by domain", head, rows


def tables(record: RetrofitReport) -> list[Table]:
    """Return the table that is printed, too: of a sweep's variants, or of quantized caches next to the retrofit's."""
    if not record.alternatives:
        return []
    rows, swept = [], bool(record.settings.sweep)
    retrieved = () if record.needles is None else record.needles.retrofit
    for number, row in enumerate(record.alternatives):
        rows.append([row.name, f"{row.share:.1%}", row.kl.text(4), row.change.text() if number else UNKNOWN])
        if swept:
            rows[-1] += [f"{row.kl_by_domain[domain]:.3f}" for domain in record.domains]
        else:
            rows[-1].append(retrieved_of(row.needles if number else retrieved))
            rows[-1].append(UNKNOWN if row.kv_bits is None else [f"--kv-bits {row.kv_bits}"])
    if swept:
        head = ["variant", "bytes", "KL", "KL minus the first's", *(f"on {domain}" for domain in record.domains)]
        return [("Variants (share of the original's 16-bit cache; KL in nats/token)", head, rows)]
    head = ["cache", "bytes", "KL", "KL minus the retrofit's", "hidden numbers", "option"]
    return [("What other caches cost (share of the original's 16-bit cache; KL in nats/token)", head, rows)]
