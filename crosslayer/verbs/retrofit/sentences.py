"""A retrofit's methods and results as sentences."""

from collections.abc import Sequence
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.judge.damage import DomainDamage, Domains
from crosslayer.judge.retrieval import retrieval_sentence
from crosslayer.output.formatting import listed, ranges
from crosslayer.verbs.retrofit.moments import FITTED_WEIGHTS
from crosslayer.verbs.retrofit.result import Alternative, MeasuredBaseline, RetrofitReport

QUICK = "A first estimate (--quick): few and short windows, for the fit too. Run it without --quick to rely on it."
EFFECTS = {"lower": "lowers", "higher": "raises", "no difference seen": "does not significantly change"}
SEARCHED = {"lower": "beats", "higher": "is worse than", "no difference seen": "is not significantly different from"}
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
        f"{worst.perplexity_before:.2f} → {worst.perplexity_after:.2f}, ×{worst.ratio.text()}.",
        _kl(record.damage),
    ]
    if record.settings.quick:
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
        labels = {"unseen": False, "calibration": True}
        by_label = {
            label: ", ".join(f"{domain.name} {domain.ratio.text()}" for domain in domains if domain.seen == seen)
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
    counts = "-".join(str(count) for count in sorted({domain.kl.n for domain in domains}))
    lines.append(
        f"Measured on {record.damage.all.kl.n} windows of {record.settings.length} tokens ({counts} per domain), "
        f"none of them used for calibration. 95% CI: paired bootstrap, {sampling(domains)}, conditional on these texts."
    )
    if record.needles is not None:
        lines.append(retrieval_sentence(record.needles.retrofit, record.needles.original))
    if record.settings.sweep:
        lines.append(f"The table has {len(record.alternatives)} variants; all else is of the first. No model is saved.")
    elif record.alternatives:
        lines += _cheaper(record.alternatives)
    baselines = record.choice.search.baselines if record.choice.search is not None else []
    return lines + [_search(record, baseline) for baseline in baselines]


def _kl(damage: Domains) -> str:
    """Return the KL on the worst and on the best domain, and what a domain of another kind may have."""
    domains = sorted(damage.domains, key=lambda domain: domain.kl.value)
    best, worst = domains[0], domains[-1]
    line = f"KL to the original, in nats/token: {worst.kl.text()} on {worst.name}"
    if len(domains) > 1:
        line += f", the worst of {len(domains)} domains, {best.kl.value:.3f} on {best.name}, the best"
    if damage.new_domain is not None:
        line += f"; on a new domain {damage.new_domain.text()}, a 95% prediction interval"
    return f"{line}."


def _cheaper(rows: Sequence[Alternative]) -> list[str]:
    """Return which quantized caches of the original do less damage with no more bytes, if any."""
    retrofit, *others = rows
    names = []
    for row in others:
        if row.of == "original" and row.share <= retrofit.share and row.change.verdict == "lower":
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


def _search(record: RetrofitReport, baseline: MeasuredBaseline) -> str:
    """Return whether the searched configuration is better than one that was not searched."""
    fits = bool(record.calibration.layers) and not record.plan.reads_less  # a search for choosers fits nothing
    fitted = "each layer compensated separately" if fits else "without compensation"
    share, others = f"{record.cache.share:.2%} of the cache", f"fixed blocks of {baseline.method}"
    if record.plan.reads_less:
        share, others = f"{record.cache.read_share:.1%} of the reads", "evenly spaced choosers"
    return (
        f"The searched configuration ({share}) {SEARCHED[baseline.change.verdict]} {others} "
        f"({baseline.share:.2%}): KL {baseline.change.text(4, signed=True)} on windows that the search did not use, "
        f"{fitted}."
    )
