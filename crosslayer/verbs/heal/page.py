"""A recovery as sentences and as a page, from its record alone."""

import math
from collections.abc import Iterator
from typing import Any

from crosslayer.judge.retrieval import retrieval_sentence, retrieved_of
from crosslayer.output.chart import same_scale
from crosslayer.output.formatting import UNKNOWN, plural
from crosslayer.output.page import Page, Table
from crosslayer.output.panel import COLORS, QUIET, Line, Panel
from crosslayer.stats.estimate import Estimate, band
from crosslayer.training.callbacks import averages
from crosslayer.verbs.heal.result import DomainResult, Recovery, State, Variant

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


def seen_label(record: Recovery, domain: DomainResult) -> str:
    """Return whether a domain was trained or calibrated on, and whether the windows may hold calibration text."""
    if domain.name in record.overlapping:
        return "seen, may overlap calibration text"
    return "seen" if domain.seen else "unseen"


def as_the_last_stage(record: Recovery) -> str:
    """Return how the original was trained."""
    assert record.trained_original is not None and record.trained_original.run is not None
    return f"trained with the last stage's settings, without early stop ({record.trained_original.run.tokens:,} tokens)"


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
        counts = " → ".join(retrieved_of(state.needles) for state in variant.states)
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
    """Yield every state with its model's name and its number; the original's states come last."""
    for variant in record.variants:
        for number, state in enumerate(variant.states):
            yield variant.name, number, state
    for state in (record.untrained_original, record.trained_original):
        if state is not None:
            yield record.original, 0, state


def _cards(record: Recovery) -> list[tuple[str, str, str]]:
    """Return the cards of the retrofit with the lowest final KL on the first domain."""
    before, after = record.best.states[0].domains[0], record.best.states[-1].domains[0]
    reference = "original" if record.trained_original is None else f"original {as_the_last_stage(record)}"
    return [
        ("Lowest KL", after.damage.kl.text(), f"nats/token, 95% CI, {record.best.name} on {after.name}"),
        ("Before training", before.damage.kl.text(), "the same retrofit"),
        ("Gap closed", share(after.closed), f"of its loss gap to the {reference}"),
    ]


def tables(record: Recovery) -> list[Table]:
    """Return every state on the first domain and on all windows, and the ranking if there are several retrofits."""
    first, asked = record.domains[0], bool(record.untrained_original.needles)
    figures = [f"KL, {first}", f"perplexity ratio, {first}", "KL, all windows", f"gap closed, {first}"]
    rows = []
    for name, number, state in _states(record):
        if not (asked or name != record.original or state.run):  # of the original itself there is nothing to say
            continue
        domain = state.domains[0]
        closed = share(domain.closed) if number else UNKNOWN
        measured = [figure.text() for figure in (domain.damage.kl, domain.damage.ratio, state.all.damage.kl)]
        rows.append([name, _stage_words(state), *measured, closed, *([retrieved_of(state.needles)] if asked else [])])
    head = ["retrofit", "state", *figures, *(["hidden numbers retrieved"] if asked else [])]
    stages: Table = ("Stage by stage (compared with the untrained original; 95% CI)", head, rows)
    return [stages, _order(record)] if len(record.variants) > 1 else [stages]


def _stage_words(state: State) -> str:
    if state.skipped is not None:
        return f"{state.name}: skipped, {state.skipped}"
    if state.stopped is not None:
        return f"{state.name}: stopped; same as the state before"
    if state.run is None:
        return state.name
    early = f" of {state.run.planned:,}, ended early" if state.run.steps < state.run.planned else ""
    return f"{state.name}: {PARAMETERS[state.run.parameters]}, {state.run.steps:,} steps{early}"


def _order(record: Recovery) -> Table:
    """Return the retrofits by final KL, lowest first, with a column for each domain."""
    rows = []
    for number, ranks in enumerate(zip(*record.order.values(), strict=True), 1):
        cells = [str(number)]
        for rank in ranks:
            over = "" if rank.over_previous is None else f", {rank.over_previous.text(signed=True)}"
            cells.append(f"{rank.variant} {rank.kl:.3f}{over}")
        rows.append(cells)
    return "Final KL (with the difference to the retrofit above, paired by window)", ["rank", *record.order], rows


def _domains(record: Recovery) -> Table:
    """Return each retrofit on each domain, before and after training."""
    rows = []
    for variant in record.variants:
        for first, last in zip(variant.states[0].domains, variant.states[-1].domains, strict=True):
            cells = [variant.name, f"{first.name} ({seen_label(record, first)}, {first.damage.kl.n} windows)"]
            for before, after in ((first.damage.kl, last.damage.kl), (first.damage.ratio, last.damage.ratio)):
                cells.append(f"{before.value:.3f} → {after.text()}")
            rows.append([*cells, share(last.closed)])
    head = ["retrofit", "domain", "KL, nats/token", "perplexity ratio", f"gap to the {record.reference} closed"]
    return "By domain (before training → after all stages; 95% CI)", head, rows


def _training(record: Recovery) -> Table:
    """Return what each stage trained, and the loss of every state on held-out text."""
    domains, rows = list(record.untrained_original.held_out), []
    for name, _, state in _states(record):
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
    seen = [domain.seen for domain in record.untrained_original.domains]
    caption = "KL to the untrained original. Bands: 95% CI over windows."
    if record.trained_original is not None:
        caption += f" Dotted: the original {as_the_last_stage(record)}."
    ticks = {float(number): state.name for number, state in enumerate(record.variants[0].states)}
    panels = []
    for label in ("unseen", "seen"):
        if (label == "seen") not in seen:
            continue
        number, lines = seen.index(label == "seen"), []
        for variant in record.variants:
            kls = [one.domains[number].damage.kl for one in variant.states]
            lines.append(Line(variant.name, [*ticks], *band(kls), **_look(record, variant.name)))
        if record.trained_original is not None:
            value = record.trained_original.domains[number].damage.kl.value
            ends = [min(ticks), max(ticks)]
            lines.append(Line(f"{record.original}, trained", ends, [value] * 2, color=QUIET, dashed=True))
        title, scale = f"KL by stage on {record.domains[number]} ({label})", {"bounds": (0, math.inf), "x_ticks": ticks}
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
