"""The tables of a comparison."""

import statistics
from collections.abc import Callable, Sequence

from crosslayer.output.page import Table
from crosslayer.verbs.compare.record import COSTS, ComparedRun, Law, Outcome
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.compare.words import in_words, inside, percent, signed, span, with_values

UNKNOWN = "–"
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


def finals(record: Comparison) -> list[Table]:
    """Return the final losses, a table for each setting."""
    head = ["arm", "seeds", "loss", f"less {record.baseline}", "95 % interval", "p (Holm)", "lower or higher?"]
    tables: list[Table] = []
    for setting in record.settings:
        results = [result for result in record.outcomes if result.setting == setting.label]
        results.sort(key=lambda result: result.loss)
        runs = record.of(setting.label, record.baseline)
        rows = [[record.baseline, str(len(runs)), f"{_mean(runs):.4f}", "", "", "", "the baseline"]] if runs else []
        rows += [_final_row(result) for result in results]
        tables.append((f"Final loss, held-out text, nats a token{_place(setting.label)}", head, rows))
    return tables


def matched(record: Comparison) -> list[Table]:
    """Return what each arm costs, with its ratio to the baseline, a table for each setting."""
    tables: list[Table] = []
    dtypes = ", ".join(sorted({run.dtype for run in record.runs}))
    for setting in record.settings:
        sides = {arm: record.of(setting.label, arm) for arm in record.ordered}
        reference = sides[record.baseline]
        rows = [
            [arm, *(_cost_cell(runs, reference, column) for column in COLUMNS)] for arm, runs in sides.items() if runs
        ]
        title = f"What it costs, and × {record.baseline} (KV bytes a token in {dtypes}){_place(setting.label)}"
        tables.append((title, ["arm", *(name for name, *_ in COLUMNS)], rows))
    return tables


def domains(record: Comparison) -> list[Table]:
    """Return the differences by domain, a table for each setting."""
    tables: list[Table] = []
    for setting in record.settings:
        results = [result for result in record.outcomes if result.setting == setting.label and result.domains]
        rows = [
            [
                result.arm,
                *(with_values(part) if (part := result.domains.get(name)) else UNKNOWN for name in record.domains),
            ]
            for result in results
        ]
        title = f"Difference to {record.baseline} by domain, each taken alone{_place(setting.label)}"
        if rows:
            tables.append((title, ["arm", *record.domains], rows))
    return tables


def critical(record: Comparison) -> list[Table]:
    """Return the critical points of the pairs; nothing where no arm is overtaken, or ahead and expected to be."""
    rows = []
    for result in record.outcomes:
        points = result.critical
        if points is None or not (result.overtaken or result.losing):
            continue
        pairs = zip(points.reached, points.expected, strict=True)
        mean = UNKNOWN if points.mean is None else f"{points.mean:,.0f}"
        if points.interval is not None:
            mean += f" ({points.interval[0]:,.0f} to {points.interval[1]:,.0f})"
        rows.append(
            [*([result.setting] if result.setting else []), result.arm, mean, ", ".join(_point(*p) for p in pairs)]
        )
    if not rows:
        return []
    head = ["arm", "mean step (95 %)", "by pair of runs"]
    head = ["setting", *head] if len(rows[0]) > 3 else head
    return [(f"Critical points: from where on the training loss of {record.baseline} is lower", head, rows)]


def insides(record: Comparison) -> list[Table]:
    """Return what was seen inside of the models at the end; nothing where the recipe asks for no looks."""
    rows = []
    for setting in record.settings:
        for arm in record.ordered:
            share, rate, growth = inside(record.of(setting.label, arm))
            if share is not None and rate is not None and growth is not None:
                place = [setting.label] if len(record.settings) > 1 else []
                rows.append([*place, arm, f"{share:.1%}", f"{rate:.1%}", f"× {growth:.2f}"])
    head = [*(["setting"] if len(record.settings) > 1 else []), "arm", "attention on the first token", "sink rate"]
    return [("Inside at the end, means over layers", [*head, "growth of the stream"], rows)] if rows else []


def scaling(record: Comparison) -> list[Table]:
    """Return the power laws, a table for each group of settings."""
    head = ["arm", "L = A · C^−α", "α over seeds (95 %)", "α by scatter (95 %)", "C saved at the largest", "95 %"]
    tables: list[Table] = []
    for where, cost in dict.fromkeys((law.where, law.cost) for law in record.laws):
        group = [law for law in record.laws if (law.where, law.cost) == (where, cost)]
        title = f"Power laws of the final loss, C {COSTS[cost]}, {len(group[0].costs)} points{_place(where)}"
        tables.append((title, head, [_law_row(law, record.baseline) for law in group]))
    return tables


def _law_row(law: Law, baseline: str) -> list[str]:
    formula = f"{law.scale:.4g} · C^{signed(-law.exponent)}"
    cells = [law.arm, formula, span(law.exponent_over_seeds), span(law.exponent_interval)]
    if law.arm == baseline:
        return [*cells, "", ""]
    saved = UNKNOWN if law.fewer is None else f"{percent(law.fewer)}{' (extrapolated)' if law.extrapolated else ''}"
    interval = law.fewer_interval
    ends = "no interval" if interval is None else f"{percent(interval[0])} to {percent(interval[1])}"
    return [*cells, saved, ends]


def _final_row(result: Outcome) -> list[str]:
    final = result.final
    if final is None:
        return [result.arm, "0", f"{result.loss:.4f}", UNKNOWN, UNKNOWN, UNKNOWN, in_words(result)]
    interval = span(final.interval) if final.interval is not None else " and ".join(map(signed, final.values))
    adjusted = UNKNOWN if result.adjusted is None else f"{result.adjusted:.3f}"
    cells = [str(len(result.seeds)), f"{result.loss:.4f}", signed(final.mean), interval, adjusted, in_words(result)]
    return [result.arm, *cells]


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
    return f"{number:,.0f}{ratio}" if not word else f"{number:,.{_digits(number)}f} {word}{ratio}"


def _digits(number: float) -> int:
    return 0 if number >= 100 else 1 if number >= 10 else 2


def _median(runs: Sequence[ComparedRun], read: Read) -> float | None:
    values = [value for value in map(read, runs) if value is not None]
    return statistics.median(values) if values and len(values) == len(runs) else None


def _mean(runs: Sequence[ComparedRun]) -> float:
    return statistics.fmean(run.final_loss for run in runs)


def _point(reached: float | None, expected: float | None) -> str:
    if reached is not None:
        return f"{reached:,.0f}"
    return UNKNOWN if expected is None else f"expected {expected:,.0f}"


def _place(setting: str) -> str:
    return f", {setting}" if setting else ""
