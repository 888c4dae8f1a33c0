"""The sentences of a comparison: which differences are significant, which are not, and how many seeds would tell."""

from crosslayer.output.formatting import listed, plural, signed
from crosslayer.stats.differences import FEWEST, MOST
from crosslayer.stats.estimate import NOT_TESTED
from crosslayer.verbs.compare.result import ALPHA, COSTS, EVALUATIONS, RELEVANT, Comparison, Difference, Law, Outcome


def sentences(record: Comparison) -> list[str]:
    """Return the findings, most important first."""
    labels = [configuration.label for configuration in record.configurations]
    lines = [line for label in labels for line in _differences(record, label)]
    # Several comparisons require a smaller p-value.
    count = sum(result.adjusted is not None for result in record.outcomes)
    if count > 1:
        lines.append(
            f"This page makes {count} comparisons of the final loss. Each interval covers 95% by itself; lower and "
            f"higher require a p-value below {ALPHA} after Holm's correction for all {count}."
        )
    lines += [line for label in labels for line in _speedups(record, label)]

    for result in record.outcomes:
        if result.overtaken:
            assert result.critical is not None and result.critical.step is not None
            steps = ", ".join(f"{point:,.0f}" for point in result.critical.reached if point is not None)
            lines.append(
                f"{_prefix(result.configuration)}{record.baseline} overtakes {result.variant} in training loss at step "
                f"{result.critical.step.value:,.0f} on average (by seed: {steps}) and stays ahead."
            )
    lines += [_law(law, record) for law in record.laws if law.variant != record.baseline]
    if record.no_laws and len(labels) > 1:
        lines.append(f"No power law: {record.no_laws}.")

    lines += [f"Excluded because training stopped: {name}, {message}." for name, message in record.stopped.items()]
    for label in labels:
        unpaired = [result for result in record.outcomes if result.configuration == label and result.missing]
        variants = "; ".join(f"{result.variant} (seed {', '.join(map(str, result.missing))})" for result in unpaired)
        if variants:
            reason = f"Excluded because the variant or {record.baseline} has no run with that seed"
            lines.append(f"{_prefix(label)}{reason}: {variants}.")
    counts = {run.held_out_tokens for run in record.runs}
    size = f" of {held_out:,} tokens" if (held_out := counts.pop()) and not counts else ""
    return [
        *lines,
        "95% intervals, in parentheses from three seeds on, cover the variation between seeds on this held-out text"
        f"{size}; other text or recipes may rank variants differently.",
    ]


def with_values(difference: Difference) -> str:
    """Write the mean with its interval, or without one each seed's difference: −0.0120, +0.0030 (2 seeds)."""
    if difference.change.interval is not None:
        return difference.change.text(4, signed=True)
    return f"{', '.join(map(signed, difference.values))} ({plural(len(difference.values), 'seed')})"


def written_verdict(result: Outcome) -> str:
    """Return the verdict on a variant, corrected for all comparisons of the page."""
    if result.final is None:
        return "no pair of runs"
    if result.final.change.interval is None:
        return f"{NOT_TESTED}: {plural(len(result.seeds), 'seed')}"
    if result.verdict == result.final.change.verdict:
        return result.verdict or NOT_TESTED
    return f"{result.final.change.verdict} before correction only"


def titled(title: str, label: str) -> str:
    """Return the title of a table or a figure, with its configuration if there are several."""
    return f"{title}, {label}" if label else title


def _prefix(label: str) -> str:
    """Return the beginning of a sentence about one configuration of several."""
    return f"{label}: " if label else ""


def _differences(record: Comparison, configuration: str) -> list[str]:
    """Say which variants have a lower or higher final loss than the baseline, and which no significant difference."""
    results = [result for result in record.outcomes if result.configuration == configuration]
    results.sort(key=lambda result: result.rank)
    base = record.baseline
    uncorrected = [result for result in results if result.final and result.final.change.verdict != result.verdict]
    few = [result for result in results if result.final and result.final.change.interval is None]
    groups = {
        f"Lower final loss than {base}, nats per token": [result for result in results if result.verdict == "lower"],
        f"Higher final loss than {base}, nats per token": [result for result in results if result.verdict == "higher"],
        f"Different from {base} only before the correction for multiple comparisons": uncorrected,
        f"Too few seeds for an interval or a verdict ({FEWEST} are needed); difference from {base} by seed": few,
    }
    lines = []
    for title, group in groups.items():
        each = "; ".join(f"{result.variant} {with_values(result.final)}" for result in group if result.final)
        lines += [f"{_prefix(configuration)}{title}: {each}."] if each else []
    for result in results:
        change = result.final and result.final.change
        if not change or change.low is None or change.high is None or change.verdict != "no difference seen":
            continue
        needed = result.seeds_needed
        seeds = f"more than {MOST:,} seeds" if needed is None else f"about {needed:,} seeds"
        more = f"; detecting a difference of {RELEVANT} would take {seeds}"
        if max(-change.low, change.high) < RELEVANT:
            more = f"; the interval excludes a difference of {RELEVANT}"
        elif (change.high - change.low) / 2 < RELEVANT:  # the least mean that these pairs would have shown
            more = ""
        values = change.text(4, signed=True)
        prefix = _prefix(configuration)
        lines.append(f"{prefix}No difference seen between {result.variant} and {base}: {values}{more}.")
    return lines


def _speedups(record: Comparison, configuration: str) -> list[str]:
    """Say how many times fewer tokens each variant needs, and where the clock changes the answer."""
    prefix, base = _prefix(configuration), record.baseline
    results = [result for result in record.outcomes if result.configuration == configuration and result.final]
    without = listed([result.variant for result in results if not result.speedup])
    each = "; ".join(f"{result.variant} {result.speedup.tokens.text(2)}" for result in results if result.speedup)
    lost = [
        f"{result.variant} {result.speedup.seconds.text(2)}"
        for result in results
        if result.speedup and result.speedup.seconds
        if result.speedup.tokens.verdict == "higher" and result.speedup.seconds.verdict != "higher"
    ]
    lines = [f"{prefix}Effective speedup in tokens, {base}'s over the variant's: {each}."] if each else []
    lines += [f"{prefix}Not seen in seconds: {'; '.join(lost)}."] if lost else []
    needs = f"a constant rate after the warmup (schedule.minimum=1), {EVALUATIONS} evaluations, and curves that overlap"
    return lines + ([f"{prefix}No effective speedup of {without}: it needs {needs}."] if without else [])


def _law(law: Law, record: Comparison) -> str:
    """Say at which cost a variant reaches the loss of the baseline at its largest cost."""
    prefix, baseline = _prefix(law.where), record.baseline
    pair = [each for each in record.laws if each.where == law.where and each.variant in (baseline, law.variant)]
    rising = [each.variant for each in pair if each.exponent.value <= 0]
    if rising:
        loss = f"{prefix}The loss of {listed(rising)}"
        return f"{loss} does not fall with {COSTS[law.cost]}, so no power law tells what would reach it."
    if law.fewer is None:
        return f"{prefix}The power law of {law.variant} does not reach the loss of {baseline}."
    sign, word = (1, "fewer") if law.fewer.value >= 0 else (-1, "more")
    change = law.fewer.mapped(lambda share: sign * share)
    beyond = "; extrapolated, no run had this cost" if law.extrapolated else ""
    return (
        f"{prefix}By power laws through {len(law.costs)} points, {law.variant} needs "
        f"{change.text(1, percent=True)} {word} {COSTS[law.cost]} to reach the loss of {baseline} at its largest cost"
        f"{beyond}."
    )
