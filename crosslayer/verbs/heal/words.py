"""A recovery in sentences, from its record alone."""

from statistics import fmean

from crosslayer.output.formatting import UNKNOWN, percent, percent_interval, signed, signed_interval
from crosslayer.stats.bootstrap import Estimate
from crosslayer.verbs.heal.record import DomainResult, Rank, State, Variant
from crosslayer.verbs.heal.result import Recovery
from crosslayer.verbs.needles.lookup import count_found, lookup_words
from crosslayer.verbs.retrofit.words import kl, with_interval

LOSSES = {
    "text": "the loss of all tokens",
    "response": "the loss of responses",
    "distill": "the KL to the original's predictions",
}
PARAMETERS = {"compensation": "W_c alone", "all": "all parameters", "lora": "adapters of low rank, merged"}


def sentences(record: Recovery) -> list[str]:
    """Return what each retrofit was and became, and what that rests on."""
    said = [_variant(record, variant) for variant in record.variants]
    if len(record.variants) > 1:
        domain, places = next(iter(record.order.items()))
        listed = "; ".join(f"{place.variant} {rank_words(place)}" for place in places)
        said.append(
            f"At the end, by KL on {domain}, each with what it has over the one before: {listed}. One run of each: no "
            "interval here holds the spread over seeds."
        )
    stops = [
        (f"{variant.name}, {state.name}", state.stopped) for variant in record.variants for state in variant.states
    ]
    stops.append((f"{record.original}, which was to be trained as well", record.original_stopped))
    said += [f"Stopped: {place}: {why}." for place, why in stops if why is not None]
    if record.trained_original is not None:
        read = ", ".join(f"{variant.name} {sum(tokens_read(variant)):,}" for variant in record.variants)
        said.append(
            f"The reference is {record.original} {as_the_last_stage(record)}, to the last step; the retrofits read, "
            f"over all stages: {read}."
        )
    return [*said, _held_out(record), _rests_on(record)]


def estimate(figure: Estimate | None, before: str = "") -> str:
    """Return a figure with its interval, a dash where there is none."""
    return UNKNOWN if figure is None else f"{before}{with_interval(figure.value, figure.ci95)}"


def share(figure: Estimate | None) -> str:
    """Return a share with its interval, in per cent."""
    return UNKNOWN if figure is None else f"{percent(figure.value)} ({percent_interval(figure.ci95)})"


def seen_label(record: Recovery, domain: DomainResult) -> str:
    """Return whether a domain was seen; "seen: fitted" where its very windows may hold text that was fitted to."""
    if domain.name in record.overlapping:
        return "seen: fitted"
    return "seen" if domain.seen else "unseen"


def retrieved_of(state: State) -> str:
    """Return how many hidden numbers are found, a dash where none were asked for."""
    asked = sum(len(lookup.found) for lookup in state.needles)
    return f"{count_found(state.needles)} of {asked}" if asked else UNKNOWN


def rank_words(place: Rank) -> str:
    """Return the KL of a retrofit at its place, and how far it is above the one before it."""
    over = place.over_previous
    more = "" if over is None else f", {signed(over.value, 3)} ({signed_interval(over.ci95, 3)})"
    return f"{place.kl:.3f}{more}"


def as_the_last_stage(record: Recovery) -> str:
    """Return how the original was trained."""
    assert record.trained_original is not None and record.trained_original.run is not None
    return f"trained as the last stage, {record.trained_original.run.tokens:,} tokens"


def tokens_read(variant: Variant) -> list[int]:
    """Return how many tokens each stage of a retrofit read."""
    return [0 if state.run is None else state.run.tokens for state in variant.states[1:]]


def _variant(record: Recovery, variant: Variant) -> str:
    first, last = variant.states[0], variant.states[-1]
    before, after = first.domains[0], last.domains[0]
    kls = " → ".join(kl(state.domains[0].damage) for state in variant.states)
    gap = f"Before training its loss was not seen above the {record.reference}'s: there is no gap to close."
    if after.closed is not None:
        gap = (
            f"Of its gap to the {record.reference} {share(after.closed)} is closed; its perplexity is "
            f"{estimate(after.to_reference)} times that model's."
        )
    needles = ""
    if last.needles:
        earlier = ", then ".join(retrieved_of(state) for state in variant.states[:-1])
        found = lookup_words(last.needles, record.untrained_original.needles)
        needles = f" Before: {earlier} hidden numbers. {found}"
    return (
        f"{variant.name} ({variant.title}; {variant.cache_share:.0%} of the cache): "
        f"on {before.name} ({seen_label(record, before)}) "
        f"the KL to the original goes {kls} nats a token, the perplexity ratio {before.damage.ratio:.3f} → "
        f"{after.damage.ratio:.3f}. {gap}{needles}"
    )


def _held_out(record: Recovery) -> str:
    """Say the loss of what is held out of the text to train on, of every state, mean over its domains."""
    models = {variant.name: variant.states for variant in record.variants}
    original = tuple(state for state in (record.untrained_original, record.trained_original) if state is not None)
    listed = []
    for name, states in (*models.items(), (record.original, original)):
        means = " → ".join(f"{fmean(state.held_out.values()):.3f}" for state in states)
        listed.append(f"{name} {means}")
    kind = "Responses" if record.objective == "response" else "Text"
    return f"{kind} held out of the training, loss stage by stage, mean over its domains: {'; '.join(listed)}."


def _rests_on(record: Recovery) -> str:
    domains = record.variants[0].states[0].domains
    seen = ", ".join(domain.name for domain in domains if domain.seen) or "none"
    return (
        f"{record.windows} windows of {record.length} tokens; domains that were trained on, or that a W_c was fitted "
        f"to: {seen}. Trained on {LOSSES[record.objective]}; 95 % paired bootstrap over windows: conditional on these "
        "texts and on this run."
    )
