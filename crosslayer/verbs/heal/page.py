"""The page of a recovery, from its record alone."""

import math
from collections.abc import Iterator

from crosslayer.output.page import Page, Table
from crosslayer.output.panel import QUIET, Line, Panel, same_scale
from crosslayer.verbs.heal.early_stop import averages
from crosslayer.verbs.heal.record import Arm, Standing, State
from crosslayer.verbs.heal.result import Recovery
from crosslayer.verbs.heal.words import (
    LOSSES,
    as_the_last_stage,
    estimate,
    found_of,
    kind_of,
    percent,
    place_words,
    sentences,
    stage_words,
    tokens_read,
)
from crosslayer.verbs.retrofit.words import kl, ratio

SMOOTHING = 0.95


def layout(record: Recovery) -> Page:
    """Return the parts of the page."""
    count = len(record.arms)
    return Page(
        title=f"Recovery of {record.original}",
        subtitle=f"{record.name} · {count} retrofit{'s' if count > 1 else ''} · trained on {LOSSES[record.objective]}",
        cards=_cards(record),
        words=sentences(record),
        panels=[*_courses(record), *_losses(record)],
        lead=[_overview(record)],
        tables=[
            *([_order(record)] if count > 1 else []),
            *(_domain(record, place) for place in range(len(record.arms[0].states[0].domains))),
            _held_out(record),
            _tokens(record),
            _stages(record),
        ],
    )


def _cards(record: Recovery) -> list[tuple[str, str, str]]:
    """Return the best retrofit at the end, on the first domain."""
    best = min(record.arms, key=lambda arm: arm.states[-1].domains[0].damage.kl)
    before, after = best.states[0].domains[0], best.states[-1].domains[0]
    low, high = after.damage.kl_ci95
    reference = "original"
    if record.trained_original is not None:
        reference += f" {as_the_last_stage(record)}"
    share = "—" if after.closed is None else f"{after.closed.value:.0%}"
    return [
        ("KL, lowest", f"{after.damage.kl:.3f}", f"95 %: {low:.3f} to {high:.3f}, {best.name} on {after.name}"),
        ("Before training", f"{before.damage.kl:.3f}", "the same retrofit"),
        ("Gap closed", share, f"of its loss to the {reference}"),
    ]


def _overview(record: Recovery) -> Table:
    """Return every state on all windows, and on the first domain."""
    first = record.arms[0].states[0].domains[0].name
    head = [
        "retrofit",
        "state",
        f"KL, {first}",
        f"perplexity ratio, {first}",
        "KL, all windows",
        f"gap closed, {first}",
        "hidden numbers found",
    ]
    rows = [
        [
            name,
            stage_words(state),
            kl(state.domains[0].damage),
            ratio(state.domains[0].damage),
            kl(state.all.damage),
            percent(state.domains[0].closed) if number else "–",
            found_of(state),
        ]
        for name, number, state in _states(record)
    ]
    return "Stage by stage (against the original as it was; 95 % intervals)", head, rows


def _order(record: Recovery) -> Table:
    """Return the retrofits at the end, from the lowest KL to the highest, a column for each domain."""
    head = ["place", *record.order]
    rows = [
        [f"{number + 1}", *(f"{places[number].arm} {place_words(places[number])}" for places in record.order.values())]
        for number in range(len(record.arms))
    ]
    return "By KL at the end (what each has over the one before it, paired by window)", head, rows


def _domain(record: Recovery, place: int) -> Table:
    named = record.arms[0].states[0].domains[place]
    head = [
        "state",
        "perplexity",
        "ratio to the original",
        "KL",
        "KL, change",
        "perplexity, change",
        f"to the {record.reference}",
        "gap closed",
    ]
    rows = [
        [f"{name}, {state.name}", *_figures(state.domains[place], number)] for name, number, state in _states(record)
    ]
    return f"{named.name} ({kind_of(record, named)}, {named.damage.windows} windows)", head, rows


def _figures(domain: Standing, number: int) -> list[str]:
    return [
        f"{domain.damage.perplexity_after:.2f}",
        ratio(domain.damage),
        kl(domain.damage),
        estimate(domain.kl_change),
        f"× {estimate(domain.ratio_change)}" if domain.ratio_change is not None else "–",
        f"× {estimate(domain.to_reference)}" if domain.to_reference is not None else "–",
        percent(domain.closed) if number else "–",
    ]


def _states(record: Recovery) -> Iterator[tuple[str, int, State]]:
    """Yield every state with its model's name and its number, the trained original's last."""
    for arm in record.arms:
        for number, state in enumerate(arm.states):
            yield arm.name, number, state
    for state in (record.untrained_original, record.trained_original):
        if state is not None:
            yield record.original, 0, state


def _courses(record: Recovery) -> list[Panel]:
    """Return the KL by stage, of the first domain that nothing saw and of the first that was seen."""
    domains = record.arms[0].states[0].domains
    places = [next((place for place, d in enumerate(domains) if d.seen == seen), None) for seen in (False, True)]
    panels = []
    for place, kind in zip(places, ("unseen", "seen"), strict=True):
        if place is None:
            continue
        title = f"KL by stage on {domains[place].name} ({kind})"
        sentence = "To the original as it was. Bands: 95 %, over windows."
        if record.trained_original is not None:
            sentence += f" Dotted: the original {as_the_last_stage(record)}."
        ticks = {float(number): state.name for number, state in enumerate(record.arms[0].states)}
        lines = [_course(arm, place) for arm in record.arms]
        if record.trained_original is not None:
            value = record.trained_original.domains[place].damage.kl
            ends = [min(ticks), max(ticks)]
            lines.append(Line(f"{record.original}, trained", ends, [value] * 2, color=QUIET, dashed=True))
        panels.append(
            Panel(f"kl_{kind}", title, sentence, "", "nats a token", lines, bounds=(0, math.inf), x_ticks=ticks)
        )
    return same_scale(panels)


def _course(arm: Arm, place: int) -> Line:
    measured = [state.domains[place].damage for state in arm.states]
    numbers = [float(number) for number in range(len(measured))]
    low, high = [damage.kl_ci95[0] for damage in measured], [damage.kl_ci95[1] for damage in measured]
    return Line(arm.name, numbers, [damage.kl for damage in measured], low, high)


def _losses(record: Recovery) -> list[Panel]:
    panels = []
    for number in range(1, len(record.arms[0].states)):
        lines = []
        for name, state in [(arm.name, arm.states[number]) for arm in record.arms]:
            if state.run is not None:
                lines.append(_curve(name, state))
        final = number == len(record.arms[0].states) - 1
        if final and record.trained_original is not None and record.trained_original.run is not None:
            lines.append(_curve(f"{record.original}, trained", record.trained_original, QUIET))
        if any(len(line.x) > 1 for line in lines):
            said = LOSSES[record.objective]
            sentence = f"{said[0].upper()}{said[1:]}; exponential moving average, β = {SMOOTHING}."
            title = f"Training loss of stage {number}"
            panels.append(Panel(f"loss_{number}", title, sentence, "step", "nats a token", lines))
    return panels


def _curve(name: str, state: State, color: str | None = None) -> Line:
    assert state.run is not None
    curve = state.run.curve
    return Line(name, [float(step) for step in curve.steps], averages(curve.losses, SMOOTHING), color=color)


def _stages(record: Recovery) -> Table:
    head = ["retrofit", "state", "trained", "steps", "tokens", "minutes", "loss, first", "loss, last"]
    rows = []
    for name, _, state in _states(record):
        run = state.run
        if run is None:
            continue
        smooth = averages(run.curve.losses, SMOOTHING)
        rows.append(
            [
                name,
                state.name,
                f"{run.trained:,}",
                f"{run.steps:,} of {run.planned:,}",
                f"{run.tokens:,}",
                f"{run.seconds / 60:.1f}",
                f"{smooth[0]:.3f}",
                f"{smooth[-1]:.3f}",
            ]
        )
    return "Training (losses as in the figures)", head, rows


def _tokens(record: Recovery) -> Table:
    """Return how many tokens each model read; the trained original those of the last stage alone."""
    stages = [state.name for state in record.arms[0].states[1:]]
    counts = [(arm.name, tokens_read(arm)) for arm in record.arms]
    trained = record.trained_original
    if trained is not None and trained.run is not None:
        counts.append((f"{record.original}, trained", [0] * (len(stages) - 1) + [trained.run.tokens]))
    rows = [[name, *(f"{count:,}" if count else "–" for count in read), f"{sum(read):,}"] for name, read in counts]
    return "Tokens read", ["model", *stages, "in all"], rows


def _held_out(record: Recovery) -> Table:
    """Return the losses of what is held out of the text that was trained on."""
    domains = list(record.untrained_original.held_out)
    rows = [
        [name, state.name, *(f"{state.held_out[domain]:.4f}" for domain in domains)]
        for name, _, state in _states(record)
    ]
    kind = "responses that are" if record.objective == "response" else "text that is"
    return f"Loss of {kind} held out of the training, nats a token", ["retrofit", "state", *domains], rows
