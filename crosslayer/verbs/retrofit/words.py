"""The receipt in sentences, from its record alone."""

from collections.abc import Sequence

from crosslayer.stats import Interval
from crosslayer.verbs.needles.lookup import lookup_words
from crosslayer.verbs.retrofit.moments import REFITTED
from crosslayer.verbs.retrofit.record import Damage, DomainDamage, FixedBlocks, Gain
from crosslayer.verbs.retrofit.result import Receipt


def sentences(record: Receipt) -> list[str]:
    """Return what the retrofit is, what it costs and what that rests on."""
    fixed = record.choice.search.fixed if record.choice.search is not None else []
    return [
        _savings(record),
        *_damage(record),
        *([lookup_words(record.needles.retrofit, record.needles.original)] if record.needles is not None else []),
        *(_search(record, blocks) for blocks in fixed),
    ]


def with_interval(value: float, interval: Interval, digits: int = 3) -> str:
    """Return a figure with its interval."""
    low, high = interval
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio(damage: Damage) -> str:
    """Return the perplexity ratio with its interval."""
    return with_interval(damage.ratio, damage.ratio_ci95)


def kl(damage: Damage, digits: int = 3) -> str:
    """Return the KL with its interval."""
    return with_interval(damage.kl, damage.kl_ci95, digits)


def _savings(record: Receipt) -> str:
    cache, model = record.cache, record.architecture
    return (
        f"{record.title}: the KV cache allocates {cache.share:.2%} of the original's "
        f"({cache.bytes_per_token_before:,.0f} → {cache.bytes_per_token_after:,.0f} bytes a token, "
        f"at {cache.context:,.0f} tokens); "
        f"parameters {model.parameters_before / 1e6:.1f} → {model.parameters_after / 1e6:.1f} M."
    )


def _damage(record: Receipt) -> list[str]:
    """Say the worst domain, all domains, whether W_c helps, and what the figures rest on."""
    domains = record.damage.domains
    worst = domains[0]
    kind = "text that it was fitted to (other windows)" if worst.seen else "text that it was not fitted to"
    said = [
        f"Worst on {kind}, {worst.name}: perplexity {worst.perplexity_before:.2f} → {worst.perplexity_after:.2f}, "
        f"ratio {ratio(worst)}; KL to the original {kl(worst, 4)} nats a token, before any training."
    ]
    if len(domains) > 1:
        said.append(_ratios(domains))
    gains = [(domain, domain.gain) for domain in domains if domain.gain is not None]
    if gains:
        said.append(gain_sentence(gains, record.calibration.fit))
    if all(domain.seen for domain in domains):
        said.append(
            "All of this is text of the kind that it was fitted to: what it costs on other text was not measured; "
            "fit it to some text (--calibration-text) and judge it on others (--text)."
        )
    counts = "-".join(str(count) for count in sorted({domain.windows for domain in domains}))
    said.append(
        f"{record.damage.all.windows} windows of {record.options.length} tokens, {counts} of each domain, none of them "
        f"fitted to; 95 % paired bootstrap, {drawn(domains)}: conditional on these texts."
    )
    return said


def _ratios(domains: Sequence[DomainDamage]) -> str:
    """Say the perplexity ratio of each domain, those first that nothing was fitted to."""
    parts = []
    for title, seen in (("not fitted to", False), ("fitted to", True)):
        listed = ", ".join(f"{domain.name} {ratio(domain)}" for domain in domains if domain.seen == seen)
        if listed:
            parts.append(f"{title}: {listed}")
    return f"Perplexity ratio by domain, {'; '.join(parts)}."


def drawn(domains: Sequence[DomainDamage]) -> str:
    """Say within what windows were drawn."""
    single = [domain.name for domain in domains if domain.strata == 1]
    independent = "drawn by window, taken as independent"
    if len(single) == len(domains):
        return independent
    return f"drawn within documents (of {', '.join(single)}: {independent})" if single else "drawn within documents"


def gain_sentence(gains: Sequence[tuple[DomainDamage, Gain]], fit: str) -> str:
    """Say on which domains what was fitted lowers the KL, on which it raises it, and on which neither can be told."""
    lowers, raises, unclear = [], [], []
    for domain, gain in gains:
        low, high = gain.kl_ci95
        listed = lowers if high < 0 else raises if low > 0 else unclear
        listed.append(f"{domain.name} ({gain.without.kl:.3f} → {domain.kl:.3f})")
    verdicts = {"lowers the KL on": lowers, "raises the KL on": raises, "is not told apart from none on": unclear}
    said = [f"{verdict} {', '.join(listed)}" for verdict, listed in verdicts.items() if listed]
    fitted = f"the fit of {REFITTED[fit]}" if fit in REFITTED else "W_c"
    return f"Against the same wiring without it, {fitted} {'; '.join(said)}."


def _search(record: Receipt, blocks: FixedBlocks) -> str:
    """Say whether the search's wiring is better than fixed blocks."""
    low, high = blocks.search_minus_fixed_ci95
    verdict = "better than" if high < 0 else "worse than" if low > 0 else "not told apart from"
    repaired = "each layer repaired by itself" if record.calibration.layers else "without a repair"
    return (
        f"On windows that were not searched, {repaired}, the search's wiring "
        f"({record.cache.share:.2%} of the cache) is {verdict} fixed blocks of {blocks.method} ({blocks.share:.2%}): "
        f"KL {blocks.search_minus_fixed:+.4f} ({low:+.4f} to {high:+.4f})."
    )
