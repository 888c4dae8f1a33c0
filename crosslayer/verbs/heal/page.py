"""A recovery as sentences and as a page, from its record alone."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from crosslayer.judge.page import found, grid, listing, retrieval_sentence
from crosslayer.judge.report import ALL, Against
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
# As an early stop smooths by default, so that a curve shows what ended its stage.
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
            total = sum(state.run.tokens for state in variant.states if state.run is not None)
            tokens.append(f"{variant.name} {total:,}")
        lines.append(
            f"Reference: {record.original} {as_the_last_stage(record)}. Tokens that the retrofits trained on, over all "
            f"stages: {', '.join(tokens)}."
        )
    lines.append(
        f"Measured on {record.windows} windows of {record.length} tokens; domains that a model was trained or "
        f"calibrated on: {', '.join(record.seen) or 'none'}. Trained on {LOSSES[record.objective]}. 95% CI: paired "
        "bootstrap over windows, conditional on these texts and on this run."
    )
    return lines


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
    """Return what training gave a retrofit: its share of the gap, KL and perplexity, and hidden numbers."""
    first, last = variant.states[0], variant.states[-1]
    domain = record.domains[0]
    closed = record.closed(variant.name, last)
    # A retrofit as good as the reference has no gap, of which no share can be closed.
    gap = f"{variant.name} had no loss gap to the {record.reference} before training"
    if closed is not None:
        share = closed.text(0, percent=True)
        gap = f"Training closed {share} of {variant.name}'s loss gap to the {record.reference}"
    kl, ratio = (changes(record, variant.name, (first, last), quantity) for quantity in ("KL", "perplexity"))
    lines = [
        f"{gap}, on {domain} ({seen_label(record, domain)}): KL to the original {kl[0].value:.3f} → {kl[1].text()} "
        f"nats/token, perplexity ratio {ratio[0].value:.3f} → {ratio[1].value:.3f}.",
        f"{variant.name} is {variant.title}, with {variant.cache_share:.0%} of the 16-bit cache.",
    ]
    if rows := record.numbers(variant.name, last):
        by_state = []
        for state in variant.states:
            of_state = record.numbers(variant.name, state)
            by_state.append(of_state[0].count(of_state[0].value) if of_state else UNKNOWN)
        counts = " → ".join(by_state)
        lines.append(f"Hidden numbers retrieved, stage by stage: {counts}. {' '.join(retrieval_sentence(rows))}")
    return lines


def changes(
    record: Recovery, name: str, states: Sequence[State], quantity: str, domain: str | None = None
) -> list[Estimate]:
    """Return the change of a quantity to the original in each state, by default on the first domain."""
    # A record without one of them is refused when it is made.
    by_state = [record.of(name, state, quantity, domain) for state in states]
    return [change for change in by_state if change is not None]


def layout(record: Recovery) -> Page:
    """Return the content of the page."""
    retrofits = plural(len(record.variants), "retrofit")
    # The cards are those of the retrofit with the lowest final KL on the first domain.
    best = record.best
    before, after = changes(record, best.name, (best.states[0], best.states[-1]), "KL")
    closed = record.closed(best.name, best.states[-1])
    share = UNKNOWN if closed is None else closed.text(0, percent=True)
    reference = "original" if record.trained_original is None else f"original {as_the_last_stage(record)}"
    # A model looks the same in every figure.
    looks: dict[str, dict[str, Any]] = {}
    for index, variant in enumerate(record.variants):
        looks[variant.name] = {"color": COLORS[index % len(COLORS)], "dashed": index >= len(COLORS)}
    return Page(
        title=f"Recovery of {record.original}",
        subtitle=f"{record.name} · {retrofits} · trained on {LOSSES[record.objective]}",
        cards=[
            ("Lowest KL", after.text(), f"nats/token, 95% CI, {best.name} on {record.domains[0]}"),
            ("Before training", before.text(), "the same retrofit"),
            ("Gap closed", share, f"of its loss gap to the {reference}"),
        ],
        panels=[*_kl_panels(record, looks), *_loss_panels(record, looks)],
        tables=[_domains(record), _training(record)],
    )


def _states(record: Recovery) -> Iterator[tuple[str, State]]:
    """Yield every state that has rows with its model's name; the trained original comes last."""
    for variant in record.variants:
        for state in variant.states:
            yield variant.name, state
    if record.trained_original is not None:
        yield ORIGINAL, record.trained_original


def tables(record: Recovery) -> list[Table]:
    """Return every state on the first domain and on all windows, and the ranking if there are several retrofits."""
    labels = {}
    for name, state in _states(record):
        label = state.name
        if state.skipped is not None:
            label += f": skipped, {state.skipped}"
        elif state.stopped is not None:
            label += ": stopped; same as the state before"
        elif state.run is not None:
            early = f" of {state.run.planned:,}, ended early" if state.run.steps < state.run.planned else ""
            label += f": {PARAMETERS[state.run.parameters]}, {state.run.steps:,} steps{early}"
        labels[f"{name}, {state.name}"] = f"{name}, {label}"

    first = record.domains[0]
    shown = {("KL", first), ("perplexity", first), ("KL", ALL), ("changed tokens", ALL), (RETRIEVAL, ALL)}
    rows = [row for row in record.rows if (row.quantity, row.scope) in shown and row.against == Against.ORIGINAL]
    rows += [row for row in record.rows if (row.quantity, row.scope) == (CLOSED, first)]
    title = "Stage by stage (compared with the untrained original; 95% CI)"
    cells = []
    for row in rows:
        where = "all windows" if row.scope == ALL else row.scope
        cells.append((labels[row.candidate], f"{row.quantity}, {where}", found(row)))
    printed = [grid(title, "state", cells)]
    ranking = record.rows_of("KL", Against.ABOVE)
    if ranking:
        printed.append(listing("Final KL, against the retrofit that is above in the ranking", ranking, of="domain"))
    return printed


def _domains(record: Recovery) -> Table:
    """Return each retrofit on each domain, before and after training."""
    times = {}
    for variant in record.variants:
        times[f"{variant.name}, {variant.states[0].name}"] = "before"
        times[f"{variant.name}, {variant.states[-1].name}"] = "after"
    rows = [row for row in record.rows if row.candidate in times and row.scope in record.domains]
    cells = []
    for row in rows:
        if row.against == Against.ORIGINAL or row.quantity == CLOSED:
            line = f"{row.candidate.rpartition(', ')[0]} on {row.scope} ({seen_label(record, row.scope)})"
            column = row.quantity if row.quantity == CLOSED else f"{row.quantity}, {times[row.candidate]}"
            cells.append((line, column, row.change_text()))
    return grid("By domain (before training and after all stages; 95% CI)", "retrofit", cells)


def _training(record: Recovery) -> Table:
    """Return what each stage trained, and the loss of every state on held-out text."""
    domains = list(record.untrained_original.held_out)
    rows = []
    for name, state in [*_states(record), (ORIGINAL, record.untrained_original)]:
        run = state.run
        cells = [UNKNOWN] * 4
        if run is not None:
            steps = f"{run.steps:,} of {run.planned:,}"
            cells = [f"{run.trained:,}", steps, f"{run.tokens:,}", f"{run.seconds / 60:.1f}"]
        rows.append([name, state.name, *cells, *(f"{state.held_out[domain]:.4f}" for domain in domains)])
    text = "responses" if record.objective == "response" else "text"
    head = ["retrofit", "state", "parameters", "steps", "tokens", "minutes"]
    head += [f"held-out {text}, {domain}" for domain in domains]
    return "Training (losses on held-out text in nats/token)", head, rows


def _kl_panels(record: Recovery, looks: dict[str, dict[str, Any]]) -> list[Panel]:
    """Return the KL by stage, on the first unseen domain and on the first seen one."""
    seen = [domain in record.seen for domain in record.domains]
    caption = "KL to the untrained original. Bands: 95% CI over windows."
    if record.trained_original is not None:
        caption += f" Dotted: the original {as_the_last_stage(record)}."
    ticks = {float(stage): state.name for stage, state in enumerate(record.variants[0].states)}
    panels = []
    for label in ("unseen", "seen"):
        if (label == "seen") not in seen:
            continue
        # The worst of its group, since domains come in this order.
        domain = record.domains[seen.index(label == "seen")]
        lines = []
        for variant in record.variants:
            kls = changes(record, variant.name, variant.states, "KL", domain)
            lines.append(Line(variant.name, [*ticks], *band(kls), **looks[variant.name]))
        if record.trained_original is not None:
            (kl,) = changes(record, ORIGINAL, [record.trained_original], "KL", domain)
            ends = [min(ticks), max(ticks)]
            lines.append(Line(f"{record.original}, trained", ends, [kl.value] * 2, color=QUIET, dashed=True))
        title, scale = f"KL by stage on {domain} ({label})", {"bounds": (0, math.inf), "x_ticks": ticks}
        panels.append(Panel(f"kl_{label}", title, caption, "", "nats/token", lines, log_y=True, **scale))
    return same_scale(panels)


def _loss_panels(record: Recovery, looks: dict[str, dict[str, Any]]) -> list[Panel]:
    """Return a figure of the training losses of each stage that trained for more than one entry of the log."""
    loss = LOSSES[record.objective]
    last = len(record.variants[0].states) - 1
    caption = f"{loss[0].upper()}{loss[1:]}; exponential moving average, β = {SMOOTHING}."
    panels = []
    for stage in range(1, last + 1):
        runs: list[Any] = [(variant.name, variant.states[stage].run) for variant in record.variants]
        # The original is trained with the last stage's settings.
        if stage == last and record.trained_original is not None:
            runs.append((f"{record.original}, trained", record.trained_original.run))
        lines = []
        for name, run in runs:
            if run is not None:
                losses = averages(run.curve.losses, SMOOTHING)
                look = looks.get(name, {"color": QUIET})  # gray: the trained original
                lines.append(Line(name, [*map(float, run.curve.steps)], losses, **look))
        if any(len(line.x) > 1 for line in lines):
            title = f"Training loss of stage {stage}"
            panels.append(Panel(f"loss_{stage}", title, caption, "step", "nats/token", lines, log_y=True))
    return panels
