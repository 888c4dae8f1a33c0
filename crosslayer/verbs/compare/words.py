"""What a comparison says in sentences: what is shown, what is not, and what it would take."""

from collections.abc import Sequence

from crosslayer.output.formatting import listed, percent, percent_interval, signed, signed_interval
from crosslayer.stats.means import FEWEST, Difference
from crosslayer.verbs.compare.record import (
    ALPHA,
    COSTS,
    RELEVANT,
    ComparedRun,
    Law,
    LengthTrend,
    Outcome,
    mean_of_known,
)
from crosslayer.verbs.compare.result import Comparison


def sentences(record: Comparison) -> list[str]:
    """Return what the runs show."""
    return [
        *_budget(record),
        *(line for setting in record.settings for line in _differences(record, setting.label)),
        *_tests(record),
        *(_overtaken(result, record.baseline) for result in record.outcomes if result.overtaken),
        *(_law(law, record) for law in record.laws if law.variant != record.baseline),
        *([f"No power law: {record.no_laws}."] if record.no_laws and len(record.settings) > 1 else []),
        *(_trend(trend, record.baseline) for trend in record.trends),
        *(line for setting in record.settings for line in _inside(record, setting.label)),
        *_missing(record),
        "Intervals are over seeds, on this held-out text; other text or recipes may rank the variants differently.",
    ]


def with_values(difference: Difference) -> str:
    """Write a difference with its interval, or with the single differences where there is none."""
    if difference.interval is None:
        return listed([signed(value) for value in difference.values])
    return f"{signed(difference.mean)} ({signed_interval(difference.interval)})"


def in_words(result: Outcome) -> str:
    """Return the verdict on a variant: lower and higher are of all comparisons together."""
    if result.final is None:
        return "no pair"
    if result.final.interval is None:
        return "none: 1 seed" if len(result.seeds) == 1 else f"none: {len(result.seeds)} seeds"
    if result.verdict == result.final.verdict:
        return result.verdict
    return f"{result.final.verdict} only if taken alone"


def inside(runs: Sequence[ComparedRun]) -> tuple[float | None, float | None, float | None]:
    """Return first-token share, sink rate and growth of the stream at the end: means over runs, or None."""
    ends = [run.snapshots[-1] for run in runs if run.snapshots]
    return (
        mean_of_known([end.first_token_share for end in ends]),
        mean_of_known([end.sink_rate for end in ends]),
        mean_of_known([end.stream_growth for end in ends]),
    )


def titled(title: str, label: str) -> str:
    """Return the title of a table or a figure with its setting, nothing more where there is a single one."""
    return f"{title}, {label}" if label else title


def _at(label: str) -> str:
    """Return what comes before a sentence about a setting, nothing where there is a single one."""
    return f"{label}: " if label else ""


def _budget(record: Comparison) -> list[str]:
    budget = record.budget
    if budget is None:
        return []
    kinds = {
        "tokens": (",.0f", "tokens", [run.tokens for run in record.runs]),
        "flops": (".3g", "FLOPs", [run.flops_per_token * run.tokens for run in record.runs]),
        "time": (".3g", "s of training steps", [run.seconds for run in record.runs]),
    }
    form, unit, taken = kinds[budget.kind]
    spent = " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(taken), max(taken))))
    measured = " (a step's time was measured beforehand, variants in turns)" if budget.kind == "time" else ""
    return [
        f"Every run was given {budget.amount:{form}} {unit}, in whole steps over which its learning rate falls"
        f"{measured}; the runs took {spent}."
    ]


def _differences(record: Comparison, setting: str) -> list[str]:
    """Say of each variant beside the baseline whether its final loss is lower, higher, or neither."""
    results = [part for part in record.outcomes if part.setting == setting]
    results.sort(key=lambda part: part.loss)
    base = record.baseline
    alone = [part for part in results if part.final and part.final.verdict != part.verdict]
    few = [part for part in results if part.final and part.final.interval is None]
    groups = {
        f"Lower loss than {base} at the end, nats a token": [part for part in results if part.verdict == "lower"],
        f"Higher loss than {base} at the end, nats a token": [part for part in results if part.verdict == "higher"],
        f"Beside {base}, a difference only if taken alone": alone,
        f"Fewer than {FEWEST} pairs give no interval and no verdict; differences to {base}, seed by seed": few,
    }
    lines = []
    for words, group in groups.items():
        each = "; ".join(f"{part.variant} {with_values(part.final)}" for part in group if part.final)
        lines += [f"{_at(setting)}{words}: {each}."] if each else []
    same = [part for part in results if part.final and part.final.interval and part.final.verdict == "undecided"]
    return [*lines, *(f"{_at(setting)}{_undecided(part, base)}" for part in same)]


def _undecided(result: Outcome, baseline: str) -> str:
    assert result.final is not None and result.final.interval is not None and result.final.visible is not None
    words = f"No difference seen at this budget between {result.variant} and {baseline}, {with_values(result.final)}"
    low, high = result.final.interval
    if max(-low, high) < RELEVANT:
        return f"{words}; a difference of {RELEVANT} lies outside of the interval."
    if result.final.visible < RELEVANT:
        return f"{words}."
    needed = result.seeds_needed
    count = "more seeds than can be told" if needed is None else f"about {needed:,} seeds"
    return f"{words}; a difference of {RELEVANT} would have needed {count}."


def _tests(record: Comparison) -> list[str]:
    """Say that seeds were added after a page was seen, or that there are many comparisons, and what that asks."""
    lines, pages = [], len(record.extends)
    if pages:
        counts = listed([str(len(seeds)) for seeds in record.extends])
        lines.append(
            f"Seeds were added after {'a page' if pages == 1 else f'{pages} pages'} with {counts} of them: lower and "
            f"higher are said here only below p = {ALPHA / (5 * pages * (pages + 1)):.2g}, not {ALPHA} (the adjusted "
            "p-values hold that), so that adding seeds until something shows does not make it show."
        )
    count = sum(result.adjusted is not None for result in record.outcomes)
    if count > 1:
        lines.append(
            f"The page makes {count} comparisons of the final loss. Each interval, taken alone, misses once in 20 "
            f"times; lower and higher are said only where the p-value, adjusted by Holm for all {count}, is below "
            f"{ALPHA}."
        )
    return lines


def _overtaken(result: Outcome, baseline: str) -> str:
    assert result.critical is not None
    ends = [point for point in result.critical.reached if point is not None]
    return (
        f"{_at(result.setting)}{result.variant} is overtaken by {baseline} in training loss at step "
        f"{result.critical.mean:,.0f} on average ({min(ends):,.0f} to {max(ends):,.0f} over {len(ends)} pairs), and "
        "stays behind."
    )


def _law(law: Law, record: Comparison) -> str:
    """Say at which cost a variant reaches the loss that the baseline has at its largest."""
    place, baseline = _at(law.where), record.baseline
    sides = [part for part in record.laws if part.where == law.where and part.variant in (baseline, law.variant)]
    rising = [part.variant for part in sides if part.exponent <= 0]
    if rising:
        loss = f"{place}The loss of {listed(rising)}"
        return f"{loss} does not fall with {COSTS[law.cost]}; no law says what would reach it."
    if law.fewer is None:
        return f"{place}The power law of {law.variant} does not reach the loss of {baseline}."
    sign, word = (1, "fewer") if law.fewer >= 0 else (-1, "more")
    interval = "no interval below three seeds"
    if law.fewer_interval is not None:
        ends = sorted(sign * end for end in law.fewer_interval)
        interval = f"{percent_interval(ends, 1)}, over seeds alone"
    beyond = ", a cost outside of those that were trained" if law.extrapolated else ""
    return (
        f"{place}By power laws through {len(law.costs)} points, {law.variant} reaches the loss of {baseline} at its "
        f"largest with {percent(sign * law.fewer, 1)} {word} {COSTS[law.cost]} ({interval}){beyond}."
    )


def _trend(trend: LengthTrend, baseline: str) -> str:
    points = zip(trend.tokens, trend.lengths, strict=True)
    reached = ", ".join(f"{tokens:,.0f} tokens with sequences of {length:,}" for tokens, length in points)
    interval = "no interval from two lengths" if trend.interval is None else signed_interval(trend.interval, 2)
    return (
        f"{_at(trend.where)}{baseline} overtakes {trend.variant} after {reached}; on a straight line in logarithms, "
        f"length "
        f"to the power {signed(trend.exponent, 2)} ({interval}), that would be about {trend.next_tokens:,.0f} with "
        f"{trend.next_length:,}."
    )


def _inside(record: Comparison, setting: str) -> list[str]:
    """Say the ends of what was seen inside, over the variants of a setting."""
    seen = {variant: inside(record.of(setting, variant)) for variant in record.ordered}
    shares = {variant: share for variant, (share, rate, _) in seen.items() if share is not None and rate is not None}
    growth = {variant: growth for variant, (_, _, growth) in seen.items() if growth is not None}
    if not len(shares) == len(growth) == len(seen):
        return []
    return [
        f"{_at(setting)}At the end the first token takes {_ends(shares, '{:.1%}')} of the attention; from the first "
        f"layer to the last the stream's norm grows by {_ends(growth, '× {:.2f}')}."
    ]


def _ends(values: dict[str, float], form: str) -> str:
    """Return the least and the greatest of values with their variants, and the first, which is the baseline's."""
    (baseline, reference), *_ = values.items()
    least, most = min(values, key=lambda variant: values[variant]), max(values, key=lambda variant: values[variant])
    own = f"; {baseline} {form.format(reference)}" if baseline not in (least, most) else ""
    return f"{form.format(values[least])} ({least}) to {form.format(values[most])} ({most}{own})"


def _missing(record: Comparison) -> list[str]:
    lines = [f"Left out, since it stopped: {name}, {what}." for name, what in record.stopped.items()]
    for setting in record.settings:
        group = [result for result in record.outcomes if result.setting == setting.label and result.missing]
        variants = "; ".join(f"{result.variant} (seed {', '.join(map(str, result.missing))})" for result in group)
        if variants:
            words = f"Left out, since the variant or {record.baseline} has no run of that seed"
            lines.append(f"{_at(setting.label)}{words}: {variants}.")
    return lines
