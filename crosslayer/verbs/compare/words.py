"""What a comparison says in sentences: what is shown, what is not, and what it would take."""

from collections.abc import Collection, Sequence

from crosslayer.stats.means import FEWEST, Difference, Interval, Verdict
from crosslayer.verbs.compare.record import COSTS, RELEVANT, ComparedRun, Law, LengthTrend, Outcome
from crosslayer.verbs.compare.result import Comparison


def sentences(record: Comparison) -> list[str]:
    """Return what the runs show."""
    lines = [
        *_budget_words(record),
        *(line for setting in record.settings for line in _setting_words(record, setting.label)),
        *_extended_words(record),
        *_many_words(record),
        *_critical_words(record),
        *(line for law in record.laws if law.arm != record.baseline for line in _law_words(law, record)),
        *([f"No power law: {record.no_laws}."] if record.no_laws and len(record.settings) > 1 else []),
        *(_trend_words(trend, record.baseline) for trend in record.trends),
        *_inside_words(record),
        *_missing_words(record),
        "Intervals are over seeds, on this held-out text; other text or another recipe may order the arms otherwise.",
    ]
    labels = tuple(arm.label for arm in record.arms)
    named = [line.startswith(labels) or "=" in line.split(" ")[0] for line in lines]  # an arm or a setting comes first
    return [line if own else line[:1].upper() + line[1:] for line, own in zip(lines, named, strict=True)]


def signed(value: float, digits: int = 4) -> str:
    """Write a difference with its sign, a proper minus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def span(interval: Interval | None, digits: int = 4) -> str:
    """Write an interval of differences."""
    return "no interval" if interval is None else f"{signed(interval[0], digits)} to {signed(interval[1], digits)}"


def with_values(difference: Difference) -> str:
    """Write a difference with its interval, or with the single differences where there is none."""
    if difference.interval is not None:
        return f"{signed(difference.mean)} ({span(difference.interval)})"
    return " and ".join(map(signed, difference.values))


def in_words(result: Outcome) -> str:
    """Return the verdict on an arm: lower and higher are of all comparisons together."""
    if result.final is None:
        return "no pair"
    if result.final.interval is None:
        return f"none: {_seeds(len(result.seeds))}"
    if result.verdict != "undecided":
        return result.verdict
    return "undecided" if result.final.verdict == "undecided" else f"{result.final.verdict} only if taken alone"


def _budget_words(record: Comparison) -> list[str]:
    budget = record.budget
    if budget is None:
        return []
    if budget.kind == "tokens":
        tokens = {run.tokens for run in record.runs}
        words = f"Every run was given {_range(tokens, ',')} tokens"
        return [f"{words}." if tokens == {budget.amount} else f"{words}: {budget.amount:,.0f} in whole steps."]
    if budget.kind == "flops":
        costs = {run.flops_per_token * run.tokens for run in record.runs}
        return [
            f"Every run was given {budget.amount:.3g} FLOPs: each arm the whole steps that fit, by the FLOPs of its "
            f"tokens, and a schedule over these. The runs took {_range(costs, '.3g')}."
        ]
    times = [run.seconds for run in record.runs]
    return [
        f"Every run was given {budget.amount:g} s of training steps. The time a step was measured beforehand, arms in "
        "turns; each arm has the whole steps that fit, and a learning rate that ends with them. The runs took "
        f"{min(times):.1f} to {max(times):.1f} s."
    ]


def _range(values: Collection[float], form: str) -> str:
    """Write the least and the greatest of values, or the only one."""
    ends = dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values)))
    return " to ".join(ends)


def _setting_words(record: Comparison, setting: str) -> list[str]:
    results = [result for result in record.outcomes if result.setting == setting]
    results.sort(key=lambda result: result.loss)
    place = f"{setting}: " if setting else ""
    lines = []
    kinds: tuple[Verdict, ...] = ("lower", "higher")
    for kind in kinds:
        group = [result for result in results if result.verdict == kind]
        if group:
            lines.append(f"{place}{kind} loss than {record.baseline} at the end: {_listed(group)} nats a token.")
    alone = [r for r in results if r.verdict == "undecided" and r.final and r.final.verdict != "undecided"]
    if alone:
        lines.append(f"{place}beside {record.baseline}, a difference only if taken alone: {_listed(alone)}.")
    lines += [f"{place}{_undecided_words(result, record.baseline)}" for result in results if _is_open(result)]
    few = [result for result in results if result.final and result.final.interval is None]
    if few:
        lines.append(
            f"{place}fewer than {FEWEST} pairs give no interval and no verdict; these are the differences to "
            f"{record.baseline}, seed by seed: {_listed(few)}."
        )
    return lines


def _is_open(result: Outcome) -> bool:
    return result.final is not None and result.final.interval is not None and result.final.verdict == "undecided"


def _undecided_words(result: Outcome, baseline: str) -> str:
    assert result.final is not None
    words = f"no difference seen at this budget between {result.arm} and {baseline}, {with_values(result.final)}"
    assert result.final.interval is not None and result.final.visible is not None
    low, high = result.final.interval
    if max(-low, high) < RELEVANT:
        return f"{words}; a difference of {RELEVANT} lies outside of the interval."
    if result.final.visible < RELEVANT:
        return f"{words}."
    needed = result.seeds_needed
    count = "more seeds than can be told" if needed is None else f"about {needed:,} seeds"
    return f"{words}; a difference of {RELEVANT} would have needed {count}."


def _listed(results: Sequence[Outcome]) -> str:
    return "; ".join(f"{result.arm} {with_values(result.final)}" for result in results if result.final)


def _extended_words(record: Comparison) -> list[str]:
    """Say that seeds were added after a page was seen, and what that asks of this one."""
    if not record.extends:
        return []
    pages = len(record.extends)
    counts = [str(len(seeds)) for seeds in record.extends]
    bound = 0.05 / (5 * pages * (pages + 1))
    return [
        f"Seeds were added after {'a page' if pages == 1 else f'{pages} pages'} with {' and '.join(counts)} of them: "
        f"lower and higher are said here only below p = {bound:.2g}, not 0.05 (the adjusted p-values hold that), so "
        "that adding seeds until something shows does not make it show."
    ]


def _many_words(record: Comparison) -> list[str]:
    count = sum(result.adjusted is not None for result in record.outcomes)
    if count < 2:
        return []
    return [
        f"The page makes {count} comparisons of the final loss. Each interval, taken alone, misses once in 20 times; "
        f"lower and higher are said only where the p-value, adjusted by Holm for all {count}, is below 0.05."
    ]


def _critical_words(record: Comparison) -> list[str]:
    lines = []
    for result in record.outcomes:
        if result.overtaken and result.critical is not None:
            place = f"{result.setting}: " if result.setting else ""
            ends = [point for point in result.critical.reached if point is not None]
            lines.append(
                f"{place}{result.arm} is overtaken by {record.baseline} in training loss at step "
                f"{result.critical.mean:,.0f} on average ({min(ends):,.0f} to {max(ends):,.0f} over "
                f"{len(ends)} pairs), and stays behind."
            )
    return lines


def _law_words(law: Law, record: Comparison) -> list[str]:
    place, baseline = f"{law.where}: " if law.where else "", record.baseline
    sides = [part for part in record.laws if part.where == law.where and part.arm in (baseline, law.arm)]
    rising = [part.arm for part in sides if part.exponent <= 0]
    if rising:
        names = " and ".join(rising)
        return [f"{place}the loss of {names} does not fall with {COSTS[law.cost]}; no law says what would reach it."]
    if law.fewer is None:
        return [f"{place}the power law of {law.arm} does not reach the loss of {baseline}."]
    sign, word = (1, "fewer") if law.fewer >= 0 else (-1, "more")
    interval = "no interval below three seeds"
    if law.fewer_interval is not None:
        low, high = sorted(sign * end for end in law.fewer_interval)
        interval = f"{percent(low)} to {percent(high)}, over seeds alone"
    beyond = ", a cost outside of those that were trained" if law.extrapolated else ""
    return [
        f"{place}by power laws through {len(law.costs)} points, {law.arm} reaches the loss that {baseline} has at its "
        f"largest with {percent(sign * law.fewer)} {word} {COSTS[law.cost]} ({interval}){beyond}."
    ]


def percent(share: float) -> str:
    """Write a share, with a proper minus."""
    return f"{share:.1%}".replace("-", "−")


def _trend_words(trend: LengthTrend, baseline: str) -> str:
    place = f"{trend.where}: " if trend.where else ""
    points = zip(trend.tokens, trend.lengths, strict=True)
    reached = ", ".join(f"{tokens:,.0f} tokens with sequences of {length:,}" for tokens, length in points)
    interval = "no interval from two lengths" if trend.interval is None else span(trend.interval, 2)
    return (
        f"{place}{baseline} overtakes {trend.arm} after {reached}; on a straight line in logarithms, length to the "
        f"power {signed(trend.exponent, 2)} ({interval}), that would be about {trend.next_tokens:,.0f} with "
        f"{trend.next_length:,}."
    )


def _inside_words(record: Comparison) -> list[str]:
    """Return the ends of what was seen inside, over the arms of each setting."""
    lines = []
    for setting in record.settings:
        seen = {arm: inside(record.of(setting.label, arm)) for arm in record.ordered}
        if len([arm for arm, values in seen.items() if None not in values]) < len(seen):
            continue
        place = f"{setting.label}: " if setting.label else ""
        shares = _ends({arm: values[0] or 0.0 for arm, values in seen.items()}, "{:.1%}")
        growth = _ends({arm: values[2] or 0.0 for arm, values in seen.items()}, "× {:.2f}")
        lines.append(
            f"{place}at the end the first token takes {shares} of the attention; from the first layer to the last the "
            f"stream's norm grows by {growth}."
        )
    return lines


def _ends(values: dict[str, float], form: str) -> str:
    """Return the least and the greatest of values with their arms, and the first, which is the baseline's."""
    (baseline, reference), *_ = values.items()
    least, most = min(values, key=lambda arm: values[arm]), max(values, key=lambda arm: values[arm])
    own = f"; {baseline} {form.format(reference)}" if baseline not in (least, most) else ""
    return f"{form.format(values[least])} ({least}) to {form.format(values[most])} ({most}{own})"


def inside(runs: Sequence[ComparedRun]) -> tuple[float | None, float | None, float | None]:
    """Return first-token share, sink rate and growth of the stream at the end: means over runs, or None."""
    ends = [run.glances[-1] for run in runs if run.glances]
    return (
        _mean([end.first_token_share for end in ends]),
        _mean([end.sink_rate for end in ends]),
        _mean([end.stream_growth for end in ends]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _missing_words(record: Comparison) -> list[str]:
    lines = [f"Left out, since it stopped: {name}, {what}." for name, what in record.stopped.items()]
    for setting in record.settings:
        group = [result for result in record.outcomes if result.setting == setting.label and result.missing]
        if group:
            place = f"{setting.label}: " if setting.label else ""
            arms = "; ".join(f"{result.arm} (seed {', '.join(map(str, result.missing))})" for result in group)
            lines.append(f"{place}left out, since the arm or {record.baseline} has no run of that seed: {arms}.")
    return lines


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"
