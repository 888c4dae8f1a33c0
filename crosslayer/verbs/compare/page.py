"""The page of a comparison, from its record alone."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from crosslayer.output.formatting import UNKNOWN, listed, percent, percent_interval, signed, signed_interval
from crosslayer.output.page import Page
from crosslayer.output.shown import Table
from crosslayer.verbs.compare.figures import drawn_panels
from crosslayer.verbs.compare.record import COSTS, ComparedRun, Law
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.compare.words import in_words, inside, sentences, titled, with_values

Read = Callable[[ComparedRun], float | None]
COLUMNS: tuple[tuple[str, Read, float, str], ...] = (  # what, how it is read, its unit, and the unit's name
    ("parameters", lambda run: run.parameters, 1e6, "M"),
    ("FLOPs a token", lambda run: run.flops_per_token, 1e6, "M"),
    ("tokens", lambda run: run.tokens, 1e6, "M"),
    ("time a step", lambda run: run.step_seconds, 1e-3, "ms"),
    ("peak memory", lambda run: run.peak_bytes, 1e6, "MB"),
    ("KV bytes stored", lambda run: run.kv_bytes_per_token, 1, ""),
    ("KV bytes read", lambda run: run.kv_read_bytes_per_token, 1, ""),
)


def layout(record: Comparison) -> Page:
    """Return the parts of the page; tables that would be empty are left out."""
    tables = [
        *(_costs(record, setting.label) for setting in record.settings),
        *(_domains(record, setting.label) for setting in record.settings),
        _insides(record),
        _critical(record),
        *_laws(record),
    ]
    return Page(
        title=f"Comparison: {record.name}",
        subtitle=_subtitle(record),
        cards=_cards(record),
        sentences=sentences(record),
        panels=drawn_panels(record),
        tables=[table for table in tables if table[2]],
        lead=[_finals(record, setting.label) for setting in record.settings],
    )


def _subtitle(record: Comparison) -> str:
    seeds = len({seed for result in record.outcomes for seed in result.seeds})
    machines = {run.machine.gpu or run.machine.processor for run in record.runs}
    tokens = " to ".join(dict.fromkeys(f"{end(run.tokens for run in record.runs):,}" for end in (min, max)))
    parts = [
        f"{len(record.variants) - 1} beside {record.baseline}",
        *([f"{len(record.settings)} settings"] if len(record.settings) > 1 else []),
        f"{seeds} seed{'' if seeds == 1 else 's'}, paired",
        f"{len(record.runs)} runs of {tokens} tokens",
        *(machines if len(machines) == 1 else ()),
    ]
    return " · ".join(parts)


def _cards(record: Comparison) -> list[tuple[str, str, str]]:
    paired = [result for result in record.outcomes if result.final is not None]
    verdicts = [result.verdict for result in paired]
    cards = [
        (f"{kind} than {record.baseline}", str(verdicts.count(kind.lower())), f"of {len(paired)}, at the end")
        for kind in ("Lower", "Higher")
    ]
    cards.append(("Undecided", str(verdicts.count("undecided")), "no verdict from these seeds"))
    finals = [(result.final, result.variant) for result in paired if result.final is not None]
    if finals:
        best, variant = min(finals, key=lambda final: final[0].mean)
        cards.append((f"Lowest: {variant}", signed(best.mean), f"nats a token, {signed_interval(best.interval)}"))
    return cards


def _finals(record: Comparison, setting: str) -> Table:
    head = ["variant", "seeds", "loss", f"less {record.baseline}", "95 % interval", "p (Holm)", "lower or higher?"]
    rows = []
    losses = [run.final_loss for run in record.of(setting, record.baseline)]
    if losses:
        rows.append([record.baseline, f"{len(losses)}", f"{statistics.fmean(losses):.4f}", "", "", "", "the baseline"])
    results = [result for result in record.outcomes if result.setting == setting]
    for result in sorted(results, key=lambda result: result.loss):
        mean = interval = UNKNOWN
        if result.final is not None:
            pairs = listed([signed(value) for value in result.final.values])
            mean = signed(result.final.mean)
            interval = pairs if result.final.interval is None else signed_interval(result.final.interval)
        adjusted = UNKNOWN if result.adjusted is None else f"{result.adjusted:.3f}"
        cells = [f"{len(result.seeds)}", f"{result.loss:.4f}", mean, interval, adjusted, in_words(result)]
        rows.append([result.variant, *cells])
    return titled("Final loss, held-out text, nats a token", setting), head, rows


def _costs(record: Comparison, setting: str) -> Table:
    sides = {variant: record.of(setting, variant) for variant in record.ordered}
    rows = [
        [variant, *(_cost_cell(runs, sides[record.baseline], column) for column in COLUMNS)]
        for variant, runs in sides.items()
        if runs
    ]
    dtypes = ", ".join(sorted({run.dtype for run in record.runs}))
    title = f"What it costs, and × {record.baseline} (KV bytes a token in {dtypes})"
    return titled(title, setting), ["variant", *(name for name, *_ in COLUMNS)], rows


def _cost_cell(
    runs: Sequence[ComparedRun], reference: Sequence[ComparedRun], column: tuple[str, Read, float, str]
) -> str:
    name, read, unit, word = column
    own, other = _median(runs, read), _median(reference, read)
    if own is None:
        return UNKNOWN
    ratio = f" (× {own / other:.2f})" if other and runs is not reference else ""
    if name == "time a step" and any(run.machine != runs[0].machine for run in reference):
        ratio = " (another machine)"
    number = own / unit
    digits = 0 if number >= 100 or not word else 1 if number >= 10 else 2
    return f"{number:,.{digits}f} {word}".strip() + ratio


def _median(runs: Sequence[ComparedRun], read: Read) -> float | None:
    values = [value for value in map(read, runs) if value is not None]
    return statistics.median(values) if values and len(values) == len(runs) else None


def _domains(record: Comparison, setting: str) -> Table:
    rows = []
    for result in record.outcomes:
        if result.setting == setting and result.domains:
            parts = [result.domains.get(name) for name in record.domains]
            rows.append([result.variant, *(UNKNOWN if part is None else with_values(part) for part in parts)])
    title = f"Difference to {record.baseline} by domain, each taken alone"
    return titled(title, setting), ["variant", *record.domains], rows


def _insides(record: Comparison) -> Table:
    """Return what was seen inside of the models at the end, where the recipe asks for snapshots."""
    rows = []
    for setting in record.settings:
        for variant in record.ordered:
            share, rate, growth = inside(record.of(setting.label, variant))
            if share is not None and rate is not None and growth is not None:
                rows.append([setting.label, variant, f"{share:.1%}", f"{rate:.1%}", f"× {growth:.2f}"])
    head = ["variant", "attention on the first token", "sink rate", "growth of the stream"]
    return _with_settings("Inside at the end, means over layers", head, rows)


def _critical(record: Comparison) -> Table:
    """Return the critical points of the pairs of variants that are overtaken, or ahead and expected to be."""
    rows = []
    for result in record.outcomes:
        points = result.critical
        if points is None or not (result.overtaken or result.losing):
            continue
        mean = UNKNOWN if points.mean is None else f"{points.mean:,.0f}"
        if points.interval is not None:
            mean += f" ({points.interval[0]:,.0f} to {points.interval[1]:,.0f})"
        pairs = []
        for reached, expected in zip(points.reached, points.expected, strict=True):
            later = UNKNOWN if expected is None else f"expected {expected:,.0f}"
            pairs.append(later if reached is None else f"{reached:,.0f}")
        rows.append([result.setting, result.variant, mean, ", ".join(pairs)])
    title = f"Critical points: from where on the training loss of {record.baseline} is lower"
    return _with_settings(title, ["variant", "mean step (95 %)", "by pair of runs"], rows)


def _with_settings(title: str, head: list[str], rows: list[list[str]]) -> Table:
    """Return a table whose rows begin with a setting; without that column where there is a single one."""
    if any(row[0] for row in rows):
        return title, ["setting", *head], rows
    return title, head, [row[1:] for row in rows]


def _laws(record: Comparison) -> Iterator[Table]:
    head = ["variant", "L = A · C^−α", "α over seeds (95 %)", "α by scatter (95 %)", "C saved at the largest", "95 %"]
    for (where, cost), group in record.law_groups().items():
        title = f"Power laws of the final loss, C {COSTS[cost]}, {len(group[0].costs)} points"
        yield titled(title, where), head, [_law_row(law, record.baseline) for law in group]


def _law_row(law: Law, baseline: str) -> list[str]:
    saved, interval = UNKNOWN, "no interval"
    if law.variant == baseline:
        saved = interval = ""
    elif law.fewer is not None:
        saved = percent(law.fewer, 1) + (" (extrapolated)" if law.extrapolated else "")
    if law.variant != baseline and law.fewer_interval is not None:
        interval = percent_interval(law.fewer_interval, 1)
    exponents = [signed_interval(ends) for ends in (law.exponent_over_seeds, law.exponent_interval)]
    return [law.variant, f"{law.scale:.4g} · C^{signed(-law.exponent)}", *exponents, saved, interval]
