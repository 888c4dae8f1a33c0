"""A retrofit's methods and results as sentences."""

from collections.abc import Sequence
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.judge.damage import Damage, DomainDamage
from crosslayer.judge.retrieval import count_retrieved, retrieval_sentence
from crosslayer.output.formatting import listed, ranges, signed, signed_interval
from crosslayer.stats import Interval
from crosslayer.stats.times import StepTime
from crosslayer.verbs.retrofit.moments import FITTED_WEIGHTS
from crosslayer.verbs.retrofit.result import Alternative, MeasuredBaseline, RetrofitReport

QUICK = "A first estimate (--quick): few and short windows, for the fit too. Run it without --quick to rely on it."
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
    """Write layers as 18-21, 22-25, groups with gaps as 18+20, 19+21, and (reader, source) as (9, 4)."""
    if not isinstance(value, list | tuple):
        return str(value)
    if () in value:  # an entry for each layer, empty for some
        return f"of {sum(entry != () for entry in value)} layers"
    if all(isinstance(entry, int) for entry in value):
        return ranges(value)
    pairs = [list(entry) != sorted(entry) for entry in value]
    return ", ".join(
        f"({', '.join(map(str, entry))})" if is_pair else _shown(entry).replace(", ", "+")
        for entry, is_pair in zip(value, pairs, strict=True)
    )


def sentences(record: RetrofitReport) -> list[str]:
    """Return the memory saved, the quality lost, and what was measured."""
    cache, model, domains = record.cache, record.architecture, record.damage.domains
    worst = domains[0]
    lines = [
        f"{record.title}: KV cache {cache.share:.2%} of the original's 16-bit cache "
        f"({cache.bytes_per_token_before:,.0f} → {cache.bytes_per_token_after:,.0f} bytes per token at "
        f"{cache.context:,.0f} tokens), parameters {model.parameters / 1e6:.1f} → "
        f"{model.parameters_after / 1e6:.1f} M.",
        f"Worst {'calibration' if worst.seen else 'unseen'} domain ({worst.name}): perplexity "
        f"{worst.perplexity_before:.2f} → {worst.perplexity_after:.2f} (×{worst.ratio:.3f}, 95% CI "
        f"{interval(worst.ratio_ci95)}); KL to the original {kl(worst)} nats/token.",
    ]
    if record.settings.quick:
        lines.insert(0, QUICK)
    if record.plan.reads_less:
        lines.append(
            f"A decoding step after {cache.context:,} tokens reads {cache.read_share:.1%} of the cached bytes that the "
            "original reads."
        )
    if record.step is not None:
        lines.append(_step(record.step))
    if len(domains) > 1:
        labels = {"unseen": False, "calibration": True}
        by_label = {
            label: ", ".join(f"{domain.name} {ratio(domain)}" for domain in domains if domain.seen == seen)
            for label, seen in labels.items()
        }
        ratios = "; ".join(f"{label} {ratios}" for label, ratios in by_label.items() if ratios)
        lines.append(f"Perplexity ratio by domain (95% CI): {ratios}.")
    if any(domain.gain is not None for domain in domains):
        lines.append(gain_sentence(domains, record.calibration.fit))
    if all(domain.seen for domain in domains):
        lines.append(
            "Every evaluation domain was also calibrated on, so the loss on other text was not measured: calibrate on "
            "some text (--calibration-text) and evaluate on other text (--text)."
        )
    counts = "-".join(str(count) for count in sorted({domain.windows for domain in domains}))
    lines.append(
        f"Measured on {record.damage.all.windows} windows of {record.settings.length} tokens ({counts} per domain), "
        f"none of them used for calibration. 95% CI: paired bootstrap, {sampling(domains)}, conditional on these texts."
    )
    if record.needles is not None:
        lines.append(retrieval_sentence(record.needles.retrofit, record.needles.original))
    if record.settings.sweep:
        lines.append(f"The table has {len(record.alternatives)} variants, the rest is of the first; no model is saved.")
    elif record.alternatives:
        lines.append(_alternatives(record.alternatives))
    baselines = record.choice.search.baselines if record.choice.search is not None else []
    return lines + [_search(record, baseline) for baseline in baselines]


def _step(step: StepTime) -> str:
    """Return how long a decoding step takes."""
    return (
        f"A decoding step after {step.context:,} tokens takes {step.time.change.text(unit='x')} of the original's time "
        f"({step.time.durations()})."
    )


def _alternatives(rows: Sequence[Alternative]) -> str:
    """Return what bits cost instead, and whether they do less damage with fewer bytes."""
    retrofit = rows[0]
    described = []
    for row in rows[1:]:
        described.append(f"{row.name} {with_interval(row.kl, row.kl_ci95)} at {row.share:.0%}{_retrieved(row)}")
    cheaper = [
        row.name
        for row in rows[1:]
        if row.of == "original" and row.share <= retrofit.share and row.minus_retrofit_ci95[1] < 0
    ]
    verdict = f" For memory alone, {' or '.join(cheaper)} does less damage with no more bytes." if cheaper else ""
    return (
        f"Other caches (KL in nats/token, share of the original's 16-bit cache): {'; '.join(described)}; "
        f"the retrofit as it is {with_interval(retrofit.kl, retrofit.kl_ci95)} at {retrofit.share:.0%}.{verdict}"
    )


def _retrieved(row: Alternative) -> str:
    if not row.needles:
        return ""
    return f", {count_retrieved(row.needles)} of {sum(len(result.found) for result in row.needles)} hidden numbers"


def interval(ends: Interval, digits: int = 3) -> str:
    """Return a 95% interval: 1.270-1.393, or −0.036 to 0.002."""
    low, high = (f"{end:.{digits}f}".replace("-", "−") for end in ends)
    return f"{low} to {high}" if ends[0] < 0 else f"{low}-{high}"


def with_interval(value: float, ends: Interval, digits: int = 3) -> str:
    """Return a value with its interval: 1.333 (1.270-1.393)."""
    return f"{value:.{digits}f}".replace("-", "−") + f" ({interval(ends, digits)})"


def ratio(damage: Damage) -> str:
    """Return the perplexity ratio with its interval."""
    return with_interval(damage.ratio, damage.ratio_ci95)


def kl(damage: Damage, digits: int = 3) -> str:
    """Return the KL with its interval."""
    return with_interval(damage.kl, damage.kl_ci95, digits)


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
            low, high = domain.gain.kl_ci95
            effect = "lowers" if high < 0 else "raises" if low > 0 else "does not significantly change"
            change = f"{domain.name} ({domain.gain.without.kl:.3f} → {domain.kl:.3f})"
            effects.setdefault(effect, []).append(change)
    listing = "; ".join(f"{effect} the KL on {', '.join(changes)}" for effect, changes in effects.items())
    return f"Fitting {FITTED_WEIGHTS.get(fit, 'the linear compensation W_c')} {listing}."


def _search(record: RetrofitReport, baseline: MeasuredBaseline) -> str:
    """Return whether the searched configuration is better than one that was not searched."""
    low, high = baseline.search_minus_baseline_ci95
    verdict = "beats" if high < 0 else "is worse than" if low > 0 else "is not significantly different from"
    fits = bool(record.calibration.layers) and not record.plan.reads_less  # a search for choosers fits nothing
    fitted = "each layer compensated separately" if fits else "without compensation"
    share, others = f"{record.cache.share:.2%} of the cache", f"fixed blocks of {baseline.method}"
    if record.plan.reads_less:
        share, others = f"{record.cache.read_share:.1%} of the reads", "choosers at equal distances"
    return (
        f"The searched configuration ({share}) {verdict} {others} ({baseline.share:.2%}): KL "
        f"{signed(baseline.search_minus_baseline)} "
        f"({signed_interval(baseline.search_minus_baseline_ci95)}) on windows that the search did not use, {fitted}."
    )
