"""The page of a verification, from its record alone: what was checked, how far off it was, and what was skipped."""

from pathlib import Path
from typing import Any

from crosslayer.output.folder import whole_folder
from crosslayer.output.page import Mark, Table, page, save_page
from crosslayer.verification.record import CheckRow, VerifyRecord

UNITS = "Differences are in standard deviations of the logits: the largest; below float32 the root mean square."
KINDS = {"PASS": "pass", "FAIL": "fail", "NOT APPLICABLE": "skip"}


def write_verification(record: dict[str, Any], out: Path, force: bool = False) -> Path:
    """Write a verification to `out`, whole or not at all; return the page's path."""
    checked = VerifyRecord.model_validate(record)
    versions = (f"{name} {checked.environment['versions'][name]}" for name in ("torch", "transformers"))
    subtitle = f"{checked.command} · {checked.seconds:.0f} s · {', '.join(versions)}"
    with whole_folder(out, force) as folder:
        title = f"Verification of {checked.model}"
        text = page(title, subtitle, cards(checked), words(checked), [], tables(checked))
        save_page(folder, text, record, [])
    return out / "report.html"


def words(record: VerifyRecord) -> list[str]:
    """Return the outcome, the failures first."""
    ran, skipped = _ran(record), _skipped(record)
    failed = [row for row in ran if row.status == "FAIL"]
    made = [f"{_name(row)} failed: {row.reason or _figures(row)}." for row in failed]
    if ran and not failed:
        made.append(f"All {len(ran)} checks that apply passed.")
    if skipped:
        plural = f"{len(skipped)} checks do" if len(skipped) > 1 else "One check does"
        made.append(f"{plural} not apply, and nothing was verified by them; the second table says why.")
    return [*made, UNITS]


def cards(record: VerifyRecord) -> list[tuple[str, str, str]]:
    """Return the counts, and the check that came closest to its tolerance."""
    ran, skipped = _ran(record), _skipped(record)
    passed = sum(row.status == "PASS" for row in ran)
    made = [
        ("Passed", f"{passed} of {len(ran)}", "checks that apply"),
        ("Failed", str(len(ran) - passed), "checks"),
        ("Skipped", str(len(skipped)), "checks that do not apply"),
    ]
    shares = [(row.difference / row.tolerance, row) for row in ran if row.difference is not None and row.tolerance]
    if shares:
        share, row = max(shares, key=lambda pair: pair[0])
        made.append(("Farthest", f"{share:.2g}×", f"its tolerance: {_name(row)}"))
    return made


def tables(record: VerifyRecord) -> list[Table]:
    """Return the checks that ran, what was skipped and why, and the versions."""
    head = ["check", "dtype", "result", "difference", "tolerance", "reason"]
    ran = [
        [row.name, row.dtype or "", Mark(row.status, KINDS[row.status]), *_numbers(row), row.reason]
        for row in _ran(record)
    ]
    made: list[Table] = [("Checks", head, ran)] if ran else []
    skipped = [[row.name, row.dtype or "", row.reason] for row in _skipped(record)]
    made += [("Not applicable: what was skipped, and why", ["check", "dtype", "reason"], skipped)] if skipped else []
    settings = {"command": record.command, **record.environment["versions"], **record.environment["machine"]}
    return [*made, ("Made with", ["setting", "value"], [[key, str(value)] for key, value in settings.items()])]


def _ran(record: VerifyRecord) -> list[CheckRow]:
    return [row for row in record.checks if row.status != "NOT APPLICABLE"]


def _skipped(record: VerifyRecord) -> list[CheckRow]:
    return [row for row in record.checks if row.status == "NOT APPLICABLE"]


def _name(row: CheckRow) -> str:
    return f"{row.name} ({row.dtype})" if row.dtype else row.name


def _numbers(row: CheckRow) -> list[str]:
    return ["" if number is None else f"{number:.2g}" for number in (row.difference, row.tolerance)]


def _figures(row: CheckRow) -> str:
    difference, tolerance = _numbers(row)
    return f"a difference of {difference}, the tolerance is {tolerance}"
