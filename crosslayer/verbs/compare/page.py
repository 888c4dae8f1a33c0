"""The page of a comparison, from its record alone."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from crosslayer.output.formatting import UNKNOWN, Table, plural, signed
from crosslayer.output.page import Page
from crosslayer.stats.differences import FEWEST
from crosslayer.stats.estimate import NOT_TESTED
from crosslayer.training.record import mean_of_known
from crosslayer.verbs.compare.figures import drawn_panels
from crosslayer.verbs.compare.result import COSTS, ComparedRun, Comparison
from crosslayer.verbs.compare.sentences import sentences, titled, with_values, written_verdict

Read = Callable[[ComparedRun], float | None]
STEP_TIME = "time per step,\nas logged"
RATE = "learning rate"
COLUMNS: tuple[tuple[str, Read, float, str], ...] = (  # title, how it is read from a run, its unit and the unit's name
    ("parameters", lambda run: run.parameters, 1e6, "M"),
    ("FLOPs per token", lambda run: run.flops_per_token, 1e6, "M"),
    ("tokens", lambda run: run.tokens, 1e6, "M"),
    (STEP_TIME, lambda run: run.step_seconds, 1e-3, "ms"),
    ("peak memory", lambda run: run.peak_bytes, 1e6, "MB"),
    ("KV bytes stored", lambda run: run.kv_bytes_per_token, 1, ""),
    ("KV bytes read", lambda run: run.kv_read_bytes_per_token, 1, ""),
    (RATE, lambda run: run.learning_rate, 1, ""),
)
SNAPSHOTS = (  # measure, title, form
    ("first_token_share", "attention on the first token", "{:.1%}"),
    ("sink_rate", "sink rate", "{:.1%}"),
    ("entropy", "entropy of attention\n(nats)", "{:.2f}"),
    ("token_similarity", "token similarity\n(cosine)", "{:.3f}"),
    ("stream_growth", "growth of the residual stream\n(from the embedding on)", "× {:.2f}"),
    ("output_spread", "outputs: largest ÷ smallest\n(from the second layer on)", "{:.2f}"),
    ("gradient_spread", "their gradients: largest ÷ smallest\n(from the second layer on)", "{:.2f}"),
)


def layout(record: Comparison) -> Page:
    """Return the page; empty tables are left out."""
    tables = [
        *(_costs(record, configuration.label) for configuration in record.configurations),
        *(_speedups(record, configuration.label) for configuration in record.configurations),
        *(_domains(record, configuration.label) for configuration in record.configurations),
        _snapshots(record),
        _critical(record),
        *_laws(record),
    ]
    seeds = len({seed for result in record.outcomes for seed in result.seeds})
    machines = {run.machine.gpu or run.machine.processor for run in record.runs}
    tokens = " to ".join(dict.fromkeys(f"{end(run.tokens for run in record.runs):,}" for end in (min, max)))
    subtitle = [
        f"{len(record.variants) - 1} compared with {record.baseline}",
        *([f"{len(record.configurations)} configurations"] if len(record.configurations) > 1 else []),
        f"{plural(seeds, 'seed')}, paired",
        f"{len(record.runs)} runs of {tokens} tokens",
        *(machines if len(machines) == 1 else ()),
    ]
    return Page(
        title=f"Comparison: {record.name}",
        subtitle=" · ".join(subtitle),
        cards=_cards(record),
        sentences=sentences(record),
        panels=drawn_panels(record),
        tables=[table for table in tables if table[2]],
        lead=[_finals(record, configuration.label) for configuration in record.configurations],
    )


def _cards(record: Comparison) -> list[tuple[str, str, str]]:
    paired = [result for result in record.outcomes if result.final is not None]
    verdicts = [result.verdict or NOT_TESTED for result in paired]
    titles = {"lower": f"Lower than {record.baseline}", "higher": f"Higher than {record.baseline}"}
    titles |= {"no difference seen": "No difference seen", NOT_TESTED: "Not tested"}
    of = f"of {len(paired)}, final loss"
    cards = [(title, str(verdicts.count(verdict)), of) for verdict, title in titles.items() if verdict != NOT_TESTED]
    if NOT_TESTED in verdicts:
        cards.append((titles[NOT_TESTED], str(verdicts.count(NOT_TESTED)), f"{of}: fewer than {FEWEST} seeds"))
    finals = [(result.final, result.variant) for result in paired if result.final is not None]
    if finals:
        best, variant = min(finals, key=lambda final: final[0].change.value)
        of = "" if best.change.interval is None else ", 95% CI"
        cards.append((f"Lowest: {variant}", signed(best.change.value), f"nats per token{of}: {with_values(best)}"))
    return cards


def _finals(record: Comparison, configuration: str) -> Table:
    """Return the final losses; an interval stands only where it was computed, else the difference of each seed."""
    head = ["variant", "seeds", "loss", f"difference to {record.baseline}", "p (Holm)", "verdict"]
    rows = []
    results = [result for result in record.outcomes if result.configuration == configuration]
    # The baseline's loss is over seeds that have a pair; its other runs count nowhere.
    paired = {seed for result in results for seed in result.seeds}
    baselines = [run for run in record.runs_of(configuration, record.baseline) if run.seed in paired]
    if baselines:
        mean = statistics.fmean(run.final_loss for run in baselines)
        rows.append([record.baseline, f"{len(baselines)}", f"{mean:.4f}", "", "", "the baseline"])
    for result in sorted(results, key=lambda result: result.rank):
        difference = UNKNOWN if result.final is None else with_values(result.final)
        adjusted = UNKNOWN if result.adjusted is None else f"{result.adjusted:.3f}"
        loss = UNKNOWN if result.loss is None else f"{result.loss:.4f}"
        cells = [f"{len(result.seeds)}", loss, difference, adjusted, written_verdict(result)]
        rows.append([result.variant, *cells])
    return titled("Final loss on held-out text, nats per token", configuration), head, rows


def _costs(record: Comparison, configuration: str) -> Table:
    measured = {variant: record.runs_of(configuration, variant) for variant in record.ordered}
    has_rates = any(variant.learning_rate for variant in record.variants)
    columns = [column for column in COLUMNS if column[0] != RATE or has_rates]
    rows = [
        [variant, *(_cost_cell(runs, measured[record.baseline], column) for column in columns)]
        for variant, runs in measured.items()
        if runs
    ]
    dtypes = ", ".join(sorted({run.dtype for run in record.runs}))
    title = f"Cost, and its ratio to {record.baseline} (KV bytes per token in {dtypes})"
    return titled(title, configuration), ["variant", *(name for name, *_ in columns)], rows


def _cost_cell(
    runs: Sequence[ComparedRun], reference: Sequence[ComparedRun], column: tuple[str, Read, float, str]
) -> str:
    name, read, unit, unit_name = column
    medians = []
    for group in (runs, reference):
        values = [value for value in map(read, group) if value is not None]
        medians.append(statistics.median(values) if values and len(values) == len(group) else None)
    median, baseline = medians
    if median is None:
        return UNKNOWN
    ratio = f" (× {median / baseline:.2f})" if baseline and runs is not reference else ""
    # Runs were timed in different minutes, with other work beside them: only steps timed in turn have a ratio.
    if name == STEP_TIME:
        ratio = ""
    if name == RATE:
        return f"{median:g}"
    value = median / unit
    digits = 0 if value >= 100 or not unit_name else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit_name}".strip() + ratio


def _speedups(record: Comparison, configuration: str) -> Table:
    """Return effective speedups, and step times that were measured in turn."""
    rows = []
    for result in record.outcomes:
        speedup, step = result.speedup, result.step_time
        if result.configuration != configuration or (speedup is None and step is None):
            continue
        ratios = [None] * 3 if speedup is None else [speedup.tokens, speedup.flops, speedup.seconds]
        cells = [UNKNOWN if ratio is None else ratio.text(2) for ratio in ratios]
        seeds = UNKNOWN if speedup is None else ", ".join(f"{value:.2f}" for value in speedup.by_seed)
        clock = [UNKNOWN, UNKNOWN] if step is None else [step.durations(), step.change.text(2)]
        rows.append([result.variant, *cells, seeds, *clock])
    head = [
        "variant",
        "in tokens",
        "in FLOPs",
        "in seconds",
        "tokens, by seed",
        "a step, and the baseline's",
        "ratio of steps",
    ]
    return (
        titled(f"Effective speedup: what {record.baseline} needs over what the variant needs", configuration),
        head,
        rows,
    )


def _domains(record: Comparison, configuration: str) -> Table:
    rows = []
    for result in record.outcomes:
        if result.configuration == configuration and result.domains:
            differences = [result.domains.get(name) for name in record.domains]
            rows.append([result.variant, *(UNKNOWN if each is None else with_values(each) for each in differences)])
    title = f"Difference to {record.baseline} by domain, not corrected for multiple comparisons"
    return titled(title, configuration), ["variant", *record.domains], rows


def _snapshots(record: Comparison) -> Table:
    """Return what snapshots measured at the end, where the recipe asks for them."""
    rows = []
    for configuration in record.configurations:
        for variant in record.ordered:
            ends = [run.snapshots[-1] for run in record.runs_of(configuration.label, variant) if run.snapshots]
            cells = []
            for name, _, form in SNAPSHOTS:
                mean = mean_of_known([getattr(end, name) for end in ends])
                cells.append(UNKNOWN if mean is None else form.format(mean))
            if set(cells) != {UNKNOWN}:
                rows.append([configuration.label, variant, *cells])
    head = ["variant", *(title for _, title, _ in SNAPSHOTS)]
    return _with_configurations("Inside the models at the end of training, means over layers", head, rows)


def _critical(record: Comparison) -> Table:
    """Return the critical points of variants that are overtaken."""
    rows = []
    for result in record.outcomes:
        points = result.critical
        if points is None or points.step is None or not result.overtaken:
            continue
        steps = ", ".join(f"{reached:,.0f}" for reached in points.reached)
        rows.append([result.configuration, result.variant, points.step.text(0), steps])
    title = f"Critical points: the step from which the training loss of {record.baseline} stays lower"
    return _with_configurations(title, ["variant", "mean step (95% CI)", "step by seed"], rows)


def _with_configurations(title: str, head: list[str], rows: list[list[str]]) -> Table:
    """Return a table whose first column is the configuration, without that column if there is a single one."""
    if any(row[0] for row in rows):
        return title, ["configuration", *head], rows
    return title, head, [row[1:] for row in rows]


def _laws(record: Comparison) -> Iterator[Table]:
    head = [
        "variant",
        "L = A · C^−α",
        "α, 95% CI over seeds",
        "α, 95% CI of the fit",
        "C saved at the largest\n(95% CI over seeds)",
    ]
    for (where, cost), group in record.law_groups().items():
        rows = []
        for law in group:
            saved = UNKNOWN
            if law.variant == record.baseline:
                saved = ""
            elif law.fewer is not None:
                saved = law.fewer.text(1, percent=True) + (" (extrapolated)" if law.extrapolated else "")
            exponents = [exponent.text(4) for exponent in (law.exponent_over_seeds, law.exponent)]
            rows.append([law.variant, f"{law.scale:.4g} · C^{signed(-law.exponent.value)}", *exponents, saved])
        title = f"Power laws of the final loss, C {COSTS[cost]}, {len(group[0].costs)} points"
        yield titled(title, where), head, rows
