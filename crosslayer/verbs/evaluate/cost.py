"""What the candidate's cache and time are beside the baseline's, so that they stand beside its scores."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from transformers import PreTrainedModel

from crosslayer.models.load import load_config
from crosslayer.output.progress import Meter
from crosslayer.output.record import Frozen
from crosslayer.verbs.bench.record import CacheBytes, Comparison
from crosslayer.verbs.bench.run import in_turns
from crosslayer.verbs.bench.settings import Settings
from crosslayer.wiring.fields import field

CONTEXT, NEW_TOKENS, PAIRS = 512, 16, 5


class Cost(Frozen):
    """A row of `bench`: a prompt of `context` tokens, and further ones from a dynamic cache, or one that evicts."""

    context: int
    cache: CacheBytes = Field(description="allocated, with what an eviction knows of its tokens")
    ttft: Comparison = Field(description="time to first token")
    tpot: Comparison = Field(description="time per further token")
    interval_coverage: float = Field(ge=0, le=1)


def measure_cost(
    candidate: PreTrainedModel,
    baseline: PreTrainedModel,
    evict: str | None,
    progress: Meter,
) -> Cost:
    """Return what the candidate costs beside the baseline."""
    context = min(CONTEXT, *(_positions(side) - NEW_TOKENS for side in (candidate, baseline)))
    asked = {"contexts": (context,), "batches": (1,), "new_tokens": NEW_TOKENS, "repeats": PAIRS, "attention": "sdpa"}
    settings = Settings.model_validate({**asked, "evict": evict, "seed": 0})
    benchmark = in_turns(candidate, baseline, settings, None, None, progress)
    row = benchmark.rows[0]
    return Cost(
        context=context,
        cache=row.cache.dynamic,
        ttft=row.ttft,
        tpot=row.tpot_dynamic,
        interval_coverage=benchmark.interval_coverage,
    )


def check_positions(sides: Sequence[PreTrainedModel | str | Path]) -> None:
    """Refuse models in which a prompt and what follows it have no place, before anything is evaluated."""
    for side in sides:
        if _positions(side) <= NEW_TOKENS:
            raise ValueError(
                f"a cost is measured over {NEW_TOKENS} new tokens; a model has {_positions(side)} positions"
            )


def _positions(model: PreTrainedModel | str | Path) -> int:
    """Return how many positions a model has, from its config; `CONTEXT` and what follows where it has no limit."""
    config = model.config if isinstance(model, PreTrainedModel) else load_config(str(model))
    return field(config.get_text_config(), "max_position_embeddings", default=CONTEXT + NEW_TOKENS)
