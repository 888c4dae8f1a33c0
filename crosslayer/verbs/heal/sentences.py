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
    """Return how much the best retrofit recovered, how the others compare, and what was measured."""
    lines = _recovered(record, record.best)
    if len(record.variants) > 1:
        lines[0] = f"{record.best.name} ends with the lowest KL of {len(record.variants)} retrofits. {lines[0]}"
        lines.append("One training run each: these intervals do not include the spread over seeds.")
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


def _recovered(record: Recovery, variant: Variant) -> list[str]:
    before, after, last = variant.states[0].domains[0], variant.states[-1].domains[0], variant.states[-1]
    gap = f"{variant.name} had no loss gap to the {record.reference} before training"
    if after.closed is not None:
        gap = f"Training closed {share(after.closed)} of {variant.name}'s loss gap to the {record.reference}"
    lines = [
        f"{gap}, on {before.name} ({seen_label(record, before)}): KL to the original {before.damage.kl.value:.3f} → "
        f"{after.damage.kl.text()} nats/token, perplexity ratio {before.damage.ratio.value:.3f} → "
        f"{after.damage.ratio.value:.3f}.",
        f"{variant.name} is {variant.title}, with {variant.cache_share:.0%} of the 16-bit cache.",
    ]
    if last.needles:
        counts = " → ".join(retrieved_of(state) for state in variant.states)
        comparison = retrieval_sentence(last.needles, record.untrained_original.needles)
        lines.append(f"Hidden numbers retrieved, stage by stage: {counts}. {comparison}")
    return lines


def _measured(record: Recovery) -> str:
    domains = record.variants[0].states[0].domains
    seen = ", ".join(domain.name for domain in domains if domain.seen) or "none"
    return (
        f"Measured on {record.windows} windows of {record.length} tokens; domains that a model was trained or "
        f"calibrated on: {seen}. Trained on {LOSSES[record.objective]}. 95% CI: paired bootstrap over windows, "
        "conditional on these texts and on this run."
    )
