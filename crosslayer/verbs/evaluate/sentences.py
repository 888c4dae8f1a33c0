"""The sentences and table cells of an evaluation; gains and losses are worded alike."""

from collections.abc import Sequence

from crosslayer.eviction.running import SmallerCache
from crosslayer.output.formatting import UNKNOWN
from crosslayer.stats.shares import in_points
from crosslayer.verbs.evaluate.record import Score, ScoreRow
from crosslayer.verbs.evaluate.result import Evaluation

NAMED = 6  # rows that a sentence names at most


def sentences(record: Evaluation) -> list[str]:
    """Return the results in sentences, groups first."""
    if record.models.baseline is None:
        results = ["Scores of one model, with lm-eval's standard errors; add --baseline for paired differences."]
    else:
        results = [*_cost_sentences(record), *map(_group_sentence, record.groups), *_row_sentences(record.rows)]
    return [*results, *_cache_sentences(record), *_caveats(record)]


def score(row: ScoreRow, of: Score | None) -> str:
    """Format a score of a row: a share in percent, with its standard error if known."""
    if of is None:
        return UNKNOWN
    share = row.kind == "share"
    value = f"{of.value:.2%}" if share else f"{of.value:.4g}"
    if of.stderr is None:
        return value
    return f"{value}\n± {of.stderr:.2%}" if share else f"{value}\n± {of.stderr:.2g}"


def difference(row: ScoreRow) -> str:
    """Format a difference with its interval: in points for shares, as a ratio for perplexities."""
    if row.paired is None:
        return UNKNOWN
    change = row.paired.change
    if row.kind == "share":
        return in_points(change).text(2, signed=True)
    return change.text(4, unit="x") if row.kind == "perplexity" else change.text(4, signed=True)


def _cache_sentences(record: Evaluation) -> list[str]:
    settings, candidate = record.settings, record.models.candidate
    lines = SmallerCache(settings.evict, settings.kv_bits).sentences()
    if settings.evict is None:
        return lines
    if candidate.reduced:
        return [*lines, f"Tokens were evicted in {candidate.reduced:,} of {candidate.requests:,} requests."]
    return [
        *lines,
        f"No tokens were evicted: all {candidate.requests:,} requests fit in the budget, so this run says nothing "
        "about eviction.",
    ]


def _cost_sentences(record: Evaluation) -> list[str]:
    cost = record.cost
    if cost is None:
        return []
    return [
        f"At {cost.context} tokens the KV cache is {cost.cache.dynamic.share:.2%} of the baseline's 16-bit cache; time "
        f"to first token {cost.ttft.text()}, per further token {cost.tpot_dynamic.text()} (candidate ÷ baseline)."
    ]


def _group_sentence(row: ScoreRow) -> str:
    over = f"{len(row.tasks)} tasks" if row.weighting == "tasks" else f"{row.items:,} items of {len(row.tasks)} tasks"
    verdict = UNKNOWN if row.paired is None else row.paired.change.verdict
    scores = f"{score(row, row.baseline)} → {score(row, row.candidate)}, {difference(row)} points"
    return f"{row.title}, mean over {over}: {scores}: {verdict}."


def _row_sentences(rows: Sequence[ScoreRow]) -> list[str]:
    """Return a sentence for each verdict, which names its rows, and how many differences chance alone would give."""
    paired = [row for row in rows if row.paired is not None]
    written = []
    for better, begin, end in (
        (True, "Better than the baseline", ""),
        (False, "Worse than the baseline", ""),
        (None, "No difference seen", " The table lists how many items a 1-point difference needs."),
    ):
        named = [f"{row.title} {difference(row)}" for row in paired if row.is_better is better]
        more = f"; and {len(named) - NAMED} more" if len(named) > NAMED else ""
        written += [f"{begin}: {'; '.join(named[:NAMED])}{more}.{end}"] if named else []
    lone = [row.title for row in rows if row.paired is None]
    if lone:
        written.append(f"Not compared, because their scores are not means over items: {', '.join(lone)}.")
    if len(paired) > 1:
        chance = f"{len(paired) / 20:.{1 if len(paired) < 200 else 0}f}"
        written.append(
            f"Even between equal models, {len(paired)} comparisons show up to about {chance} differences by chance."
        )
    return written


def _caveats(record: Evaluation) -> list[str]:
    limit, shots = record.settings.limit, record.settings.num_fewshot
    written = ["Scored with vLLM."] if record.settings.engine == "vllm" else []
    written += [] if limit is None else [f"Only the first {limit} items of each task were evaluated."]
    for model in (record.models.candidate, record.models.baseline):
        if model is not None and model.shortened:
            written.append(
                f"{model.shortened:,} requests to {model.name} were truncated on the left to fit its positions."
            )
    fixed = {row.name: row.shots for row in record.rows if shots is not None and row.shots != shots}
    if fixed:
        named = ", ".join(f"{task} ({own})" for task, own in fixed.items())
        written.append(f"lm-eval fixes the number of examples of {named}: --num-fewshot {shots} does not apply.")
    return written
