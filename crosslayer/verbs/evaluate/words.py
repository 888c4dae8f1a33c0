"""What an evaluation says in sentences and cells, a gain and a loss in the same words."""

from collections.abc import Sequence

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.output.words import UNKNOWN, signed
from crosslayer.verbs.bench.words import judged
from crosslayer.verbs.evaluate.record import Score, ScoreRow
from crosslayer.verbs.evaluate.result import Evaluation

NAMED = 6  # rows that a sentence names


def sentences(record: Evaluation) -> list[str]:
    """Return what was found, groups first."""
    if record.models.baseline is None:
        found = [
            "Scores of one model, with lm-eval's standard errors; beside a baseline differences are paired by item."
        ]
    else:
        found = [*_cost_words(record), *map(_group_words, record.groups), *_row_words(record.rows)]
    return [*_eviction_words(record), *found, *_sample_words(record)]


def score(row: ScoreRow, side: Score | None) -> str:
    """Write the score of a side: a share in per cent, with its standard error where there is one."""
    if side is None:
        return UNKNOWN
    share = row.kind == "share"
    value = f"{side.value:.2%}" if share else f"{side.value:.4g}"
    if side.stderr is None:
        return value
    return f"{value}\n± {side.stderr:.2%}" if share else f"{value}\n± {side.stderr:.2g}"


def difference(row: ScoreRow) -> str:
    """Write a difference with its interval: in points for shares, as a ratio for perplexities."""
    if row.paired is None:
        return UNKNOWN
    values = (row.paired.estimate, *(row.paired.interval or ()))
    if row.paired.form == "ratio":
        figures = [f"× {value:.4f}" for value in values]
    elif row.kind == "share":
        figures = [signed(100 * value, 2) for value in values]
    else:
        figures = [f"{value:+.4g}".replace("-", "−") for value in values]
    return figures[0] if len(figures) == 1 else f"{figures[0]} ({figures[1]} to {figures[2]})"


def _eviction_words(record: Evaluation) -> list[str]:
    evict, candidate = record.settings.evict, record.models.candidate
    if evict is None:
        return []
    words = f"The cache of {candidate.name} evicts ({evict}): {parse_eviction(evict).rule.about} stay."
    words += f" Tokens were evicted before the end of {candidate.reduced:,} of {candidate.requests:,} requests"
    return [f"{words}." if candidate.reduced else f"{words}: all are too short to show what it costs."]


def _cost_words(record: Evaluation) -> list[str]:
    cost = record.cost
    if cost is None:
        return []
    return [
        f"At {cost.context} tokens its cache takes {cost.cache.dynamic.ratio:.2%} of the baseline's bytes; its times "
        f"against the baseline's: first token {judged(cost.ttft)}, further tokens {judged(cost.tpot_dynamic)}."
    ]


def _group_words(row: ScoreRow) -> str:
    over = f"{len(row.tasks)} tasks" if row.weighting == "tasks" else f"{row.items:,} items of {len(row.tasks)} tasks"
    verdict = UNKNOWN if row.paired is None else row.paired.verdict
    scores = f"{score(row, row.baseline)} → {score(row, row.candidate)}, {difference(row)} points"
    return f"{row.title}, mean over {over}: {scores}: {verdict}."


def _row_words(rows: Sequence[ScoreRow]) -> list[str]:
    """Return a sentence for each verdict, which names its rows, and how many are wrong by chance."""
    paired = [(row, row.paired.verdict) for row in rows if row.paired is not None]
    words = []
    for verdict, begin, end in (
        ("better", "Better than the baseline", ""),
        ("worse", "Worse than the baseline", ""),
        ("no difference seen", "No difference seen", " The table says how many items 1 point needs."),
    ):
        found = [f"{row.title} {difference(row)}" for row, said in paired if said == verdict]
        more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
        words += [f"{begin}: {'; '.join(found[:NAMED])}{more}.{end}"] if found else []
    lone = [row.title for row in rows if row.paired is None]
    if lone:
        words.append(f"Not compared, since their scores are no means over items: {', '.join(lone)}.")
    if len(paired) > 1:
        chance = f"{len(paired) / 20:.{1 if len(paired) < 200 else 0}f}"
        words.append(
            f"Of {len(paired)} comparisons of equal models at most about {chance} would show a difference by chance."
        )
    return words


def _sample_words(record: Evaluation) -> list[str]:
    limit, shots = record.settings.limit, record.settings.num_fewshot
    words = [] if limit is None else [f"Only the first {limit} items of each task were asked."]
    for side in (record.models.candidate, record.models.baseline):
        if side is not None and side.shortened:
            words.append(f"{side.shortened:,} requests to {side.name} lost their beginning: they exceed its positions.")
    fixed = {row.name: row.shots for row in record.rows if shots is not None and row.shots != shots}
    if fixed:
        named = ", ".join(f"{task} ({own})" for task, own in fixed.items())
        words.append(f"Not asked with {shots} examples, since lm-eval fixes their number: {named}.")
    return words
