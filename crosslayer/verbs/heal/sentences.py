"""A recovery as sentences, from its record alone."""

from crosslayer.judge.retrieval import count_retrieved, retrieval_sentence
from crosslayer.output.formatting import UNKNOWN
from crosslayer.stats.estimate import Estimate
from crosslayer.verbs.heal.record import DomainResult, Rank, State, Variant
from crosslayer.verbs.heal.result import Recovery

LOSSES = {
    "next-token": "the loss of all tokens",
    "response": "the loss of response tokens",
    "distill": "the KL to the original's predictions",
}
PARAMETERS = {"compensation": "W_c only", "all": "all parameters", "lora": "LoRA adapters, merged"}


def sentences(record: Recovery) -> list[str]:
    """Return how much each retrofit recovered, and what was measured."""
    lines = [_variant(record, variant) for variant in record.variants]
    if len(record.variants) > 1:
        domain, ranks = next(iter(record.order.items()))
        listing = "; ".join(f"{rank.variant} {rank_words(rank)}" for rank in ranks)
        lines.append(
            f"Final KL on {domain}, lowest first, each with the difference to the one before: {listing}. "
            "One training run each: these intervals do not include the spread over seeds."
        )
    stops = [
        (f"{variant.name}, {state.name}", state.stopped) for variant in record.variants for state in variant.states
    ]
    stops.append((f"{record.original}, trained as the reference", record.original_stopped))
    lines += [f"Stopped: {run}: {reason}." for run, reason in stops if reason is not None]
    if record.trained_original is not None:
        tokens = ", ".join(f"{variant.name} {sum(tokens_read(variant)):,}" for variant in record.variants)
        lines.append(
            f"Reference: {record.original} {as_the_last_stage(record)}. Tokens that the retrofits trained on, over all "
            f"stages: {tokens}."
        )
    return [*lines, _measured(record)]


def estimate(figure: Estimate | None, before: str = "") -> str:
    """Return a figure with its interval, or a dash."""
    return UNKNOWN if figure is None else f"{before}{figure.text()}"


def share(figure: Estimate | None) -> str:
    """Return a share with its interval, in percent, or a dash."""
    return UNKNOWN if figure is None else figure.text(0, percent=True)


def seen_label(record: Recovery, domain: DomainResult) -> str:
    """Return whether a domain was trained or calibrated on, and whether the windows may hold calibration text."""
    if domain.name in record.overlapping:
        return "seen, may overlap calibration text"
    return "seen" if domain.seen else "unseen"


def retrieved_of(state: State) -> str:
    """Return how many hidden numbers the model retrieves, or a dash if this was not measured."""
    total = sum(len(result.found) for result in state.needles)
    return f"{count_retrieved(state.needles)} of {total}" if total else UNKNOWN


def rank_words(rank: Rank) -> str:
    """Return the KL of a retrofit, and its difference to the one ranked before it."""
    over = rank.over_previous
    difference = "" if over is None else f", {over.text(signed=True)}"
    return f"{rank.kl:.3f}{difference}"


def as_the_last_stage(record: Recovery) -> str:
    """Return how the original was trained."""
    assert record.trained_original is not None and record.trained_original.run is not None
    return f"trained with the last stage's settings, without early stop ({record.trained_original.run.tokens:,} tokens)"


def tokens_read(variant: Variant) -> list[int]:
    """Return how many tokens each stage of a retrofit trained on."""
    return [0 if state.run is None else state.run.tokens for state in variant.states[1:]]


def _variant(record: Recovery, variant: Variant) -> str:
    first, last = variant.states[0], variant.states[-1]
    before, after = first.domains[0], last.domains[0]
    kls = " → ".join(state.domains[0].damage.kl.text() for state in variant.states)
    gap = f"There is no gap to close: before training, its loss was already at the {record.reference}'s level."
    if after.closed is not None:
        gap = (
            f"Training closed {share(after.closed)} of its loss gap to the {record.reference}; its perplexity is "
            f"{estimate(after.to_reference)} times that model's."
        )
    needles = ""
    if last.needles:
        counts = " → ".join(retrieved_of(state) for state in variant.states)
        comparison = retrieval_sentence(last.needles, record.untrained_original.needles)
        needles = f" Hidden numbers retrieved, stage by stage: {counts}. {comparison}"
    return (
        f"{variant.name} ({variant.title}; {variant.cache_share:.0%} of the 16-bit cache), on {before.name} "
        f"({seen_label(record, before)}): KL to the original {kls} nats/token, perplexity ratio "
        f"{before.damage.ratio.value:.3f} → {after.damage.ratio.value:.3f}. {gap}{needles}"
    )


def _measured(record: Recovery) -> str:
    domains = record.variants[0].states[0].domains
    seen = ", ".join(domain.name for domain in domains if domain.seen) or "none"
    return (
        f"Measured on {record.windows} windows of {record.length} tokens; domains that a model was trained or "
        f"calibrated on: {seen}. Trained on {LOSSES[record.objective]}. 95% CI: paired bootstrap over windows, "
        "conditional on these texts and on this run."
    )
