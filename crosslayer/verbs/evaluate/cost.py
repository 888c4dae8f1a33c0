"""What the candidate's cache and time are beside the baseline's, so that they stand beside its scores."""

from collections.abc import Sequence

from pydantic import Field
from transformers import PreTrainedModel

from crosslayer.output.progress import Meter
from crosslayer.output.record import Frozen
from crosslayer.probe.tokens import positions
from crosslayer.verbs.bench.record import BenchSettings, Bytes, Comparison
from crosslayer.verbs.bench.run import in_turns

CONTEXT, NEW_TOKENS, PAIRS = 512, 16, 5


class Cost(Frozen):
    """A row of `bench`: a prompt of `context` tokens, and further ones from a dynamic cache, or one that evicts."""

    context: int
    cache: Bytes = Field(description="allocated, with what an eviction knows of its tokens")
    ttft: Comparison = Field(description="time to first token")
    tpot: Comparison = Field(description="time per further token")
    interval_coverage: float = Field(ge=0, le=1)


def measure_cost(candidate: PreTrainedModel, baseline: PreTrainedModel, evict: str | None, progress: Meter) -> Cost:
    """Return what the candidate costs beside the baseline."""
    context = cost_context([positions(candidate), positions(baseline)])
    settings = BenchSettings(contexts=(context,), new_tokens=NEW_TOKENS, repeats=PAIRS, evict=evict)
    benchmark = in_turns(candidate, baseline, settings, progress=progress)
    row = benchmark.rows[0]
    return Cost(
        context=context,
        cache=row.cache.dynamic,
        ttft=row.ttft,
        tpot=row.tpot_dynamic,
        interval_coverage=benchmark.interval_coverage,
    )


def cost_context(limits: Sequence[int]) -> int:
    """Return how many tokens of a prompt have a place among the positions of all models, with what follows them.

    Raises:
        ValueError: none has.

    """
    if min(limits) <= NEW_TOKENS:
        raise ValueError(f"a cost is measured over {NEW_TOKENS} new tokens; a model has {min(limits)} positions")
    return min(CONTEXT, min(limits) - NEW_TOKENS)
