"""A recovery as sentences and as a page, from its record alone."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from crosslayer.judge.page import found, grid, listing, retrieval_sentence
from crosslayer.judge.report import ALL, Against, Row
from crosslayer.judge.rows import RETRIEVAL
from crosslayer.output.chart import same_scale
from crosslayer.output.formatting import UNKNOWN, plural
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Line, Panel
from crosslayer.stats.estimate import Estimate, band
from crosslayer.training.callbacks import averages
from crosslayer.verbs.heal.result import CLOSED, ORIGINAL, Recovery, State, Variant

LOSSES = {
    "next-token": "the loss of all tokens",
    "response": "the loss of response tokens",
    "distill": "the KL to the original's predictions",
}
PARAMETERS = {"compensation": "W_c only", "all": "all parameters", "lora": "LoRA adapters, merged"}
SMOOTHING = 0.95


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
        tokens = []
        for variant in record.variants:
            read = sum(state.run.tokens for state in variant.states if state.run is not None)
            tokens.append(f"{variant.name} {read:,}")
        lines.append(
            f"Reference: {record.original} {as_the_last_stage(record)}. Tokens that the retrofits trained on, over all "
            f"stages: {', '.join(tokens)}."
        )
    return [*lines, _measured(record)]


def share(figure: Estimate | None) -> str:
    """Return a share with its interval, in percent, or a dash."""
    return UNKNOWN if figure is None else figure.text(0, percent=True)


def seen_label(record: Recovery, domain: str) -> str:
    """Return whether a domain was trained or calibrated on, and whether the windows may hold calibration text."""
    if domain in record.overlapping:
        return "seen, may overlap calibration text"
    return "seen" if domain in record.seen else "unseen"


def as_the_last_stage(record: Recovery) -> str:
    """Return how the original was trained."""
    assert record.trained_original is not None and record.trained_original.run is not None
    return f"trained with the last stage's settings, without early stop ({record.trained_original.run.tokens:,} tokens)"


def _recovered(record: Recovery, variant: Variant) -> list[str]:
    first, last, domain = variant.states[0], variant.states[-1], record.domains[0]
    closed = record.closed(variant.name, last)
    gap = f"{variant.name} had no loss gap to the {record.reference} before training"
    if closed is not None:
        gap = f"Training closed {share(closed)} of {variant.name}'s loss gap to the {record.reference}"
    kl, ratio = (changes(record, variant.name, (first, last), quantity) for quantity in ("KL", "perplexity"))
    lines = [
        f"{gap}, on {domain} ({seen_label(record, domain)}): KL to the original {kl[0].value:.3f} → {kl[1].text()} "
        f"nats/token, perplexity ratio {ratio[0].value:.3f} → {ratio[1].value:.3f}.",
        f"{variant.name} is {variant.title}, with {variant.cache_share:.0%} of the 16-bit cache.",
    ]
    if rows := record.numbers(variant.name, last):
        counts = " → ".join(numbers_found(record, variant.name, state) for state in variant.states)
        lines.append(f"Hidden numbers retrieved, stage by stage: {counts}. {' '.join(retrieval_sentence(rows))}")
    return lines


def changes(
    record: Recovery, name: str, states: Sequence[State], quantity: str, domain: str | None = None
) -> list[Estimate]:
    """Return the change of a quantity to the original in each state, by default on the first domain."""
    found = [record.of(name, state, quantity, domain) for state in states]
    return [one for one in found if one is not None]  # the record has all


def numbers_found(record: Recovery, name: str, state: State) -> str:
    """Return how many hidden numbers a state finds, or a dash."""
    rows = record.numbers(name, state)
    return rows[0].count(rows[0].value) if rows else UNKNOWN


def _measured(record: Recovery) -> str:
    return (
        f"Measured on {record.windows} windows of {record.length} tokens; domains that a model was trained or "
        f"calibrated on: {', '.join(record.seen) or 'none'}. Trained on {LOSSES[record.objective]}. 95% CI: paired "
        "bootstrap over windows, conditional on these texts and on this run."
    )


def layout(record: Recovery) -> Page:
    """Return the content of the page."""
    retrofits = plural(len(record.variants), "retrofit")
    return Page(
        title=f"Recovery of {record.original}",
        subtitle=f"{record.name} · {retrofits} · trained on {LOSSES[record.objective]}",
        cards=_cards(record),
        panels=[*_kl_panels(record), *_loss_panels(record)],
        tables=[_domains(record), _training(record)],
    )


def _states(record: Recovery) -> Iterator[tuple[str, int, State]]:
    """Yield every state that has rows with its model's name and its number; the trained original comes last."""
    for variant in record.variants:
        for number, state in enumerate(variant.states):
            yield variant.name, number, state
    if record.trained_original is not None:
        yield ORIGINAL, 0, record.trained_original


def _cards(record: Recovery) -> list[tuple[str, str, str]]:
    """Return the cards of the retrofit with the lowest final KL on the first domain."""
    best = record.best
    before, after = changes(record, best.name, (best.states[0], best.states[-1]), "KL")
    reference = "original" if record.trained_original is None else f"original {as_the_last_stage(record)}"
    closed = share(record.closed(best.name, best.states[-1]))
    return [
        ("Lowest KL", after.text(), f"nats/token, 95% CI, {best.name} on {record.domains[0]}"),
        ("Before training", before.text(), "the same retrofit"),
        ("Gap closed", closed, f"of its loss gap to the {reference}"),
    ]


def tables(record: Recovery) -> list[Table]:
    """Return every state on the first domain and on all windows, and the ranking if there are several retrofits."""
    words = {f"{name}, {state.name}": f"{name}, {_stage_words(state)}" for name, _, state in _states(record)}
    first = record.domains[0]
    shown = {("KL", first), ("perplexity", first), ("KL", ALL), ("changed tokens", ALL), (RETRIEVAL, ALL)}
    rows = [row for row in record.rows if (row.quantity, row.scope) in shown and row.against == Against.ORIGINAL]
    rows += [row for row in record.rows if (row.quantity, row.scope) == (CLOSED, first)]
    title = "Stage by stage (compared with the untrained original; 95% CI)"

    def column(row: Row) -> str:
        return f"{row.quantity}, {'all windows' if row.scope == ALL else row.scope}"

    printed = [grid(title, rows, "state", lambda row: words[row.candidate], column, found)]
    ranking = record.rows_of("KL", Against.ABOVE)
    if ranking:
        printed.append(listing("Final KL, against the retrofit that is above in the ranking", ranking, of="domain"))
    return printed


def _stage_words(state: State) -> str:
    if state.skipped is not None:
        return f"{state.name}: skipped, {state.skipped}"
    if state.stopped is not None:
        return f"{state.name}: stopped; same as the state before"
    if state.run is None:
        return state.name
    early = f" of {state.run.planned:,}, ended early" if state.run.steps < state.run.planned else ""
    return f"{state.name}: {PARAMETERS[state.run.parameters]}, {state.run.steps:,} steps{early}"


def _domains(record: Recovery) -> Table:
    """Return each retrofit on each domain, before and after training."""
    ends = {
        f"{variant.name}, {variant.states[number].name}": number for variant in record.variants for number in (0, -1)
    }
    rows = [row for row in record.rows if row.candidate in ends and row.scope in record.domains]
    rows = [row for row in rows if row.against == Against.ORIGINAL or row.quantity == CLOSED]

    def line(row: Row) -> str:
        return f"{row.candidate.rpartition(', ')[0]} on {row.scope} ({seen_label(record, row.scope)})"

    def column(row: Row) -> str:
        return (
            row.quantity
            if row.quantity == CLOSED
            else f"{row.quantity}, {'after' if ends[row.candidate] else 'before'}"
        )

    return grid("By domain (before training and after all stages; 95% CI)", rows, "retrofit", line, column)


def _training(record: Recovery) -> Table:
    """Return what each stage trained, and the loss of every state on held-out text."""
    domains, rows = list(record.untrained_original.held_out), []
    for name, _, state in [*_states(record), (ORIGINAL, 0, record.untrained_original)]:
        run, cells = state.run, [UNKNOWN] * 4
        if run is not None:
            steps = f"{run.steps:,} of {run.planned:,}"
            cells = [f"{run.trained:,}", steps, f"{run.tokens:,}", f"{run.seconds / 60:.1f}"]
        rows.append([name, state.name, *cells, *(f"{state.held_out[domain]:.4f}" for domain in domains)])
    text = "responses" if record.objective == "response" else "text"
    head = ["retrofit", "state", "parameters", "steps", "tokens", "minutes"]
    head += [f"held-out {text}, {domain}" for domain in domains]
    return "Training (losses on held-out text in nats/token)", head, rows


def _kl_panels(record: Recovery) -> list[Panel]:
    """Return the KL by stage, on the first unseen domain and on the first seen one."""
    seen = [domain in record.seen for domain in record.domains]
    caption = "KL to the untrained original. Bands: 95% CI over windows."
    if record.trained_original is not None:
        caption += f" Dotted: the original {as_the_last_stage(record)}."
    ticks = {float(number): state.name for number, state in enumerate(record.variants[0].states)}
    panels = []
    for label in ("unseen", "seen"):
        if (label == "seen") not in seen:
            continue
        domain, lines = record.domains[seen.index(label == "seen")], []
        for variant in record.variants:
            kls = changes(record, variant.name, variant.states, "KL", domain)
            lines.append(Line(variant.name, [*ticks], *band(kls), **_look(record, variant.name)))
        if record.trained_original is not None:
            (kl,) = changes(record, ORIGINAL, [record.trained_original], "KL", domain)
            ends = [min(ticks), max(ticks)]
            lines.append(Line(f"{record.original}, trained", ends, [kl.value] * 2, color=QUIET, dashed=True))
        title, scale = f"KL by stage on {domain} ({label})", {"bounds": (0, math.inf), "x_ticks": ticks}
        panels.append(Panel(f"kl_{label}", title, caption, "", "nats/token", lines, log_y=True, **scale))
    return same_scale(panels)


def _look(record: Recovery, name: str) -> dict[str, Any]:
    """Return color and dashes of a model, the same in every figure; the trained original is gray."""
    names = [variant.name for variant in record.variants]
    if name not in names:
        return {"color": QUIET}
    return {"color": COLORS[names.index(name) % len(COLORS)], "dashed": names.index(name) >= len(COLORS)}


def _loss_panels(record: Recovery) -> list[Panel]:
    loss, last = LOSSES[record.objective], len(record.variants[0].states) - 1
    caption = f"{loss[0].upper()}{loss[1:]}; exponential moving average, β = {SMOOTHING}."
    panels = []
    for number in range(1, last + 1):
        runs: list[Any] = [(variant.name, variant.states[number].run) for variant in record.variants]
        if number == last and record.trained_original is not None:
            runs.append((f"{record.original}, trained", record.trained_original.run))
        lines = []
        for name, run in runs:
            if run is not None:
                losses = averages(run.curve.losses, SMOOTHING)
                lines.append(Line(name, [*map(float, run.curve.steps)], losses, **_look(record, name)))
        if any(len(line.x) > 1 for line in lines):
            title = f"Training loss of stage {number}"
            panels.append(Panel(f"loss_{number}", title, caption, "step", "nats/token", lines, log_y=True))
    return panels
