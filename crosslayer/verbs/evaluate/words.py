"""What an evaluation says in sentences and cells, a gain and a loss in the same words."""

from collections.abc import Sequence

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.verbs.bench.record import Comparison
from crosslayer.verbs.evaluate.paired import Paired
from crosslayer.verbs.evaluate.record import GroupRow, Row, Score
from crosslayer.verbs.evaluate.result import Evaluation

MINUS = "−"
UNKNOWN = "–"
NAMED = 6  # rows that a sentence names


def sentences(record: Evaluation) -> list[str]:
    """Return what was seen, groups first."""
    if record.models.baseline is None:
        first = "Scores of one model, with lm-eval's standard errors; with a baseline, differences are paired by item."
        return [*_eviction_words(record), first, *_sample_words(record)]
    words = [_group_words(row) for row in record.groups]
    said = [*_eviction_words(record), *_cost_words(record), *words, *_row_words(record.rows)]
    return [*said, *_sample_words(record), *_chance_words(record)]


def title(row: Row | GroupRow) -> str:
    """Name a row: task and metric, with the filter where it is not the usual one."""
    name = row.task if isinstance(row, Row) else row.group
    filtered = f" ({row.filter})" if isinstance(row, Row) and row.filter != "none" else ""
    return f"{name} {row.metric}{filtered}"


def score(value: float, kind: str | None, error: float | None = None) -> str:
    """Write a score: a share in percent, with its standard error where there is one."""
    if kind == "share":
        return f"{value:.2%}" + ("" if error is None else f"\n± {error:.2%}")
    return f"{value:.4g}" + ("" if error is None else f"\n± {error:.2g}")


def score_of(row: Row, side: Score | None) -> str:
    """Write the score of a side of a row."""
    return UNKNOWN if side is None else score(side.value, row.kind, side.stderr)


def difference(paired: Paired | None, kind: str | None) -> str:
    """Write a difference with its interval: in points for shares, as a ratio for perplexities."""
    if paired is None:
        return UNKNOWN
    if paired.form == "ratio":
        figures = [f"× {value:.4f}" for value in (paired.estimate, *(paired.interval or ()))]
    elif kind == "share":
        figures = [signed(100 * value, 2) for value in (paired.estimate, *(paired.interval or ()))]
    else:
        figures = [f"{value:+.4g}".replace("-", MINUS) for value in (paired.estimate, *(paired.interval or ()))]
    return figures[0] if len(figures) == 1 else f"{figures[0]} ({figures[1]} to {figures[2]})"


def signed(value: float, digits: int) -> str:
    """Write a number with its sign, and a proper minus."""
    return f"{value:+.{digits}f}".replace("-", MINUS)


def _eviction_words(record: Evaluation) -> list[str]:
    asked, candidate = record.settings.evict, record.models.candidate
    if asked is None:
        return []
    first = f"The cache of {candidate.name} evicts ({asked}): {parse_eviction(asked).rule.about} stay."
    if not candidate.reduced:
        return [
            f"{first} Of none of the {candidate.requests:,} requests did a token go: they are too short to show it."
        ]
    return [f"{first} Of {candidate.reduced:,} of {candidate.requests:,} requests tokens went before the end."]


def _cost_words(record: Evaluation) -> list[str]:
    cost = record.cost
    if cost is None:
        return []
    times = [f"{name} {times_of(time)}" for name, time in (("first token", cost.ttft), ("further tokens", cost.tpot))]
    return [
        f"At {cost.context} tokens its cache is {cost.cache.ratio:.2%} of the baseline's bytes; time of the "
        f"{', of '.join(times)} of the baseline's."
    ]


def times_of(time: Comparison) -> str:
    """Write a ratio of times with its interval and what it shows."""
    low, high = time.interval or (time.ratio, time.ratio)
    return f"× {time.ratio:.3f} ({low:.3f} to {high:.3f}, {time.verdict})"


def _group_words(row: GroupRow) -> str:
    assert row.baseline is not None
    return (
        f"{title(row)}, mean over {_counted(row)}: {score(row.baseline, 'share')} → "
        f"{score(row.candidate, 'share')}, {difference(row.paired, 'share')} points: {_verdict(row.paired)}."
    )


def _counted(row: GroupRow) -> str:
    """Return over what a group's score is a mean."""
    tasks = f"{len(row.tasks)} tasks"
    return tasks if row.weighting == "tasks" else f"{row.items:,} items of {tasks}"


def _row_words(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each verdict, which names its rows."""
    words = []
    for verdict in ("better", "worse"):
        found = [row for row in rows if row.paired is not None and row.paired.verdict == verdict]
        if found:
            named = [f"{title(row)} {difference(row.paired, row.kind)}" for row in found[:NAMED]]
            more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
            words.append(f"{verdict.capitalize()} than the baseline: {'; '.join(named)}{more}.")
    unseen = [row for row in rows if row.paired is not None and row.paired.verdict == "no difference seen"]
    if unseen:
        named = [f"{title(row)} {difference(row.paired, row.kind)}" for row in unseen[:NAMED]]
        more = f"; and {len(unseen) - NAMED} more" if len(unseen) > NAMED else ""
        words.append(f"No difference seen: {'; '.join(named)}{more}. The table says how many items 1 point needs.")
    lone = [row for row in rows if row.paired is None]
    if lone:
        words.append(f"Not paired, since their scores are no means over items: {', '.join(map(title, lone))}.")
    return words


def _sample_words(record: Evaluation) -> list[str]:
    limit, asked = record.settings.limit, record.settings.num_fewshot
    words = [] if limit is None else [f"Only the first {limit} items of each task were asked."]
    for side in (record.models.candidate, record.models.baseline):
        if side is not None and side.shortened:
            words.append(f"Of {side.shortened:,} requests {side.name} read no beginning: they exceed its positions.")
    own = {row.task: row.shots for row in record.rows if asked is not None and row.shots != asked}
    if own:
        named = ", ".join(f"{task} ({shots})" for task, shots in own.items())
        words.append(f"Not asked with {asked} examples, since lm-eval fixes their number: {named}.")
    return words


def _chance_words(record: Evaluation) -> list[str]:
    count = sum(row.paired is not None for row in record.rows)
    if count < 2:
        return []
    expected = f"{count / 20:.1f}" if count < 200 else f"{count / 20:.0f}"
    return [f"Of {count} comparisons of equal models at most about {expected} would show a difference by chance alone."]


def _verdict(paired: Paired | None) -> str:
    return UNKNOWN if paired is None else paired.verdict
