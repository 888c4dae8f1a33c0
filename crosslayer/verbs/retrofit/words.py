"""Methods and reports in words."""

from collections.abc import Sequence
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.output.formatting import listed, ranges, signed, signed_interval
from crosslayer.stats import Interval
from crosslayer.verbs.needles.lookup import lookup_words
from crosslayer.verbs.retrofit.moments import REFITTED
from crosslayer.verbs.retrofit.result import Damage, DomainDamage, FixedBlocks, RetrofitReport


def title(methods: Sequence[Method]) -> str:
    """Return the methods with the layers that they act on, such as "NAME (groups 18-21, 22-25) + NAME"."""
    titles = []
    for method in methods:
        set_ones = []
        for option in options_of(method):
            value = vars(method)[option.name]
            if value not in (None, ()) and (value != option.default or option.name == "compensation"):
                set_ones.append(f"{option.name} {_shown(value)}")
        titles.append(f"{method.name()} ({', '.join(set_ones)})" if set_ones else method.name())
    return " + ".join(titles)


def _shown(value: Any) -> str:
    """Write layers as 18-21, 22-25, groups with gaps as 18+20, 19+21, and (reader, source) as (9, 4)."""
    if not isinstance(value, list | tuple):
        return str(value)
    if all(isinstance(entry, int) for entry in value):
        return ranges(value)
    pairs = [list(entry) != sorted(entry) for entry in value]
    return ", ".join(
        f"({', '.join(map(str, entry))})" if is_pair else _shown(entry).replace(", ", "+")
        for entry, is_pair in zip(value, pairs, strict=True)
    )


def sentences(record: RetrofitReport) -> list[str]:
    """Return what the retrofit saves, what it costs and what that rests on."""
    cache, model, domains = record.cache, record.architecture, record.damage.domains
    worst = domains[0]
    said = [
        f"{record.title}: the KV cache allocates {cache.share:.2%} of the original's "
        f"({cache.bytes_per_token_before:,.0f} → {cache.bytes_per_token_after:,.0f} bytes a token at "
        f"{cache.context:,.0f} tokens), parameters {model.parameters / 1e6:.1f} → "
        f"{model.parameters_after / 1e6:.1f} M.",
        f"Worst {'fitted' if worst.seen else 'unseen'} domain, {worst.name}: perplexity "
        f"{worst.perplexity_before:.2f} → {worst.perplexity_after:.2f}, ratio {ratio(worst)}; KL to the original "
        f"{kl(worst, 4)} nats a token.",
    ]
    if len(domains) > 1:
        kinds = {"unseen": False, "fitted": True}
        by_kind = {
            kind: ", ".join(f"{domain.name} {ratio(domain)}" for domain in domains if domain.seen == seen)
            for kind, seen in kinds.items()
        }
        parts = "; ".join(f"{kind}: {ratios}" for kind, ratios in by_kind.items() if ratios)
        said.append(f"Perplexity ratio by domain, {parts}.")
    if any(domain.gain is not None for domain in domains):
        said.append(gain_sentence(domains, record.calibration.fit))
    if all(domain.seen for domain in domains):
        said.append(
            "All domains were fitted to: what it costs on other text was not measured; fit it to some text "
            "(--calibration-text) and judge it on others (--text)."
        )
    counts = "-".join(str(count) for count in sorted({domain.windows for domain in domains}))
    said.append(
        f"Measured on {record.damage.all.windows} windows of {record.settings.length} tokens, {counts} a domain, to "
        f"which nothing was fitted; 95 % intervals: paired bootstrap, {drawn(domains)}, conditional on these texts."
    )
    if record.needles is not None:
        said.append(lookup_words(record.needles.retrofit, record.needles.original))
    fixed = record.choice.search.fixed if record.choice.search is not None else []
    return said + [_search(record, blocks) for blocks in fixed]


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


def drawn(domains: Sequence[DomainDamage]) -> str:
    """Say within what windows were drawn."""
    single = [domain.name for domain in domains if domain.strata == 1]
    if len(single) == len(domains):
        return "windows taken as independent"
    return "windows drawn within documents" + (f" (of {listed(single)}: taken as independent)" if single else "")


def gain_sentence(domains: Sequence[DomainDamage], fit: str) -> str:
    """Say on which domains what was fitted lowers the KL, on which it raises it, and on which neither can be told."""
    verdicts: dict[str, list[str]] = {}
    for domain in domains:
        if domain.gain is not None:
            low, high = domain.gain.kl_ci95
            verdict = "lowers" if high < 0 else "raises" if low > 0 else "does not clearly change"
            change = f"{domain.name} ({domain.gain.without.kl:.3f} → {domain.kl:.3f})"
            verdicts.setdefault(verdict, []).append(change)
    said = "; ".join(f"{verdict} the KL on {', '.join(changes)}" for verdict, changes in verdicts.items())
    return f"{'The fit of ' + REFITTED[fit] if fit in REFITTED else 'W_c'} {said}."


def _search(record: RetrofitReport, blocks: FixedBlocks) -> str:
    """Say whether the search's wiring is better than fixed blocks."""
    low, high = blocks.search_minus_fixed_ci95
    verdict = "better than" if high < 0 else "worse than" if low > 0 else "not told apart from"
    repaired = "each layer repaired by itself" if record.calibration.layers else "without a repair"
    return (
        f"On unsearched windows, {repaired}, the searched wiring ({record.cache.share:.2%} of the cache) is {verdict} "
        f"fixed blocks of {blocks.method} ({blocks.share:.2%}): KL {signed(blocks.search_minus_fixed)} "
        f"({signed_interval(blocks.search_minus_fixed_ci95)})."
    )
