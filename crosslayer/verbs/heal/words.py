"""A recovery in sentences, from its record alone."""

from statistics import fmean

from crosslayer.verbs.heal.record import Arm, Estimate, Place, Standing, State
from crosslayer.verbs.heal.result import Recovery
from crosslayer.verbs.needles.lookup import count_found, lookup_words
from crosslayer.verbs.retrofit.words import with_interval

LOSSES = {
    "text": "the loss of all tokens",
    "response": "the loss of responses",
    "distill": "the KL to the original's predictions",
}
PARAMETERS = {"compensation": "W_c alone", "all": "all parameters", "lora": "adapters of low rank, merged"}


def sentences(record: Recovery) -> list[str]:
    """Return what each retrofit was and became, and what that rests on."""
    said = [_arm(record, arm) for arm in record.arms]
    if len(record.arms) > 1:
        said.append(_order(record))
    return [*said, *_stops(record), *_baseline(record), _held_out(record), _rests_on(record)]


def estimate(figure: Estimate | None, digits: int = 3) -> str:
    """Return a figure with its interval, a dash where there is none."""
    return "–" if figure is None else with_interval(figure.value, figure.ci95, digits)


def percent(figure: Estimate | None) -> str:
    """Return a share with its interval, in per cent."""
    if figure is None:
        return "–"
    low, high = figure.ci95
    return f"{figure.value:.0%} ({low:.0%} to {high:.0%})"


def kind_of(record: Recovery, domain: Standing) -> str:
    """Return whether a domain was seen; "seen: fitted" where its very windows may hold text that was fitted to."""
    if domain.name in record.overlapping:
        return "seen: fitted"
    return "seen" if domain.seen else "unseen"


def stage_words(state: State) -> str:
    """Return what a state is, in a line of a table."""
    if state.skipped is not None:
        return f"{state.name}: skipped, {state.skipped}"
    if state.stopped is not None:
        return f"{state.name}: stopped, as before it"
    if state.run is None:
        return state.name
    early = f" of {state.run.planned:,}, ended early" if state.run.steps < state.run.planned else ""
    return f"{state.name}: {PARAMETERS[state.run.parameters]}, {state.run.steps:,} steps{early}"


def _arm(record: Recovery, arm: Arm) -> str:
    before, after = arm.states[0].domains[0], arm.states[-1].domains[0]
    kls = " → ".join(with_interval(state.domains[0].damage.kl, state.domains[0].damage.kl_ci95) for state in arm.states)
    kind = kind_of(record, before)
    return (
        f"{arm.name} ({arm.title}; {arm.cache_share:.0%} of the cache): on {before.name} ({kind}) the KL to the "
        f"original goes {kls} nats a token, the perplexity ratio {before.damage.ratio:.3f} → {after.damage.ratio:.3f}. "
        + _gap(record, after)
        + _needles(record, arm)
    )


def _needles(record: Recovery, arm: Arm) -> str:
    if not arm.states[-1].needles:
        return ""
    earlier = ", then ".join(found_of(state) for state in arm.states[:-1])
    return (
        f" Before: {earlier} hidden numbers. {lookup_words(arm.states[-1].needles, record.untrained_original.needles)}"
    )


def found_of(state: State) -> str:
    """Return how many hidden numbers are found, a dash where none were asked for."""
    asked = sum(len(lookup.found) for lookup in state.needles)
    return f"{count_found(state.needles)} of {asked}" if asked else "–"


def _gap(record: Recovery, after: Standing) -> str:
    if after.closed is None:
        return f"Before training its loss was not seen above the {record.reference}'s: there is no gap to close."
    ratio = estimate(after.to_reference)
    return (
        f"Of its gap to the {record.reference} {percent(after.closed)} is closed; its perplexity is {ratio} times that "
        "model's."
    )


def _order(record: Recovery) -> str:
    """Say the retrofits from the lowest KL to the highest, on the first domain at the end."""
    domain, places = next(iter(record.order.items()))
    listed = "; ".join(f"{place.arm} {place_words(place)}" for place in places)
    return (
        f"At the end, by KL on {domain}, each with what it has over the one before: {listed}. One run of each: no "
        "interval here holds the spread over seeds."
    )


def place_words(place: Place) -> str:
    """Return the KL of a retrofit at its place, and how far it is above the one before it."""
    if place.over_previous is None:
        return f"{place.kl:.3f}"
    low, high = place.over_previous.ci95
    return f"{place.kl:.3f}, {place.over_previous.value:+.3f} ({low:+.3f} to {high:+.3f})".replace("-", "−")


def _stops(record: Recovery) -> list[str]:
    """Say which models stopped; their figures from then on are those of the state before."""
    stops = [(f"{arm.name}, {state.name}", state.stopped) for arm in record.arms for state in arm.states]
    stops.append((f"{record.original}, which was to be trained as well", record.original_stopped))
    return [f"Stopped: {place}: {why}." for place, why in stops if why is not None]


def as_the_last_stage(record: Recovery) -> str:
    """Return how the original was trained."""
    assert record.trained_original is not None and record.trained_original.run is not None
    return f"trained as the last stage, {record.trained_original.run.tokens:,} tokens"


def _baseline(record: Recovery) -> list[str]:
    if record.trained_original is None:
        return []
    read = ", ".join(f"{arm.name} {sum(tokens_read(arm)):,}" for arm in record.arms)
    return [
        f"The reference is {record.original} {as_the_last_stage(record)}, to the last step; the retrofits read, over "
        f"all stages: {read}."
    ]


def tokens_read(arm: Arm) -> list[int]:
    """Return how many tokens each stage of a retrofit read."""
    return [0 if state.run is None else state.run.tokens for state in arm.states[1:]]


def _held_out(record: Recovery) -> str:
    """Say the loss of what is held out of the text to train on, of every state, mean over its domains."""
    models = [(arm.name, arm.states) for arm in record.arms]
    states = (record.untrained_original, record.trained_original)
    models.append((record.original, tuple(state for state in states if state is not None)))
    means = {name: [fmean(state.held_out.values()) for state in states] for name, states in models}
    listed = "; ".join(f"{name} {' → '.join(f'{mean:.3f}' for mean in values)}" for name, values in means.items())
    kind = "Responses" if record.objective == "response" else "Text"
    return f"{kind} held out of the training, loss stage by stage, mean over its domains: {listed}."


def _rests_on(record: Recovery) -> str:
    domains = record.arms[0].states[0].domains
    seen = ", ".join(domain.name for domain in domains if domain.seen) or "none"
    return (
        f"{record.windows} windows of {record.length} tokens; domains that were trained on, or that a W_c was fitted "
        f"to: {seen}. Trained on {LOSSES[record.objective]}; 95 % paired bootstrap over windows: conditional on these "
        "texts and on this run."
    )
