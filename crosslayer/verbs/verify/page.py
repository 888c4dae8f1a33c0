"""The page of a verification, built from its record alone: checks, differences, and what was skipped."""

from crosslayer.output.formatting import counted
from crosslayer.output.page import Mark, Page, Table
from crosslayer.verbs.verify.result import Check, Verification

UNITS = (
    "Differences are in standard deviations of the logits: the largest in float32, the root mean square in lower "
    "precision."
)
KINDS = {"PASS": "pass", "FAIL": "fail", "NOT APPLICABLE": "skip"}


def layout(record: Verification) -> Page:
    """Return the parts of the page."""
    return Page(
        title=f"Verification of {record.model}",
        subtitle=f"{len(record.applicable)} checks in {record.seconds:.0f} s",
        cards=_cards(record),
        sentences=sentences(record),
        panels=[],
        tables=tables(record),
    )


def sentences(record: Verification) -> list[str]:
    """Return the outcome, the failures first."""
    lines = []
    for check in record.failed:
        difference, tolerance = _numbers(check)
        measured = f"difference {difference}, tolerance {tolerance}" if difference else ""
        reason = "; ".join(text for text in (measured, check.reason) if text)
        lines.append(f"{_title(check)} failed: {reason}.")
    applicable, skipped = len(record.applicable), len(record.skipped)
    if applicable and record.passed:
        subject = f"All {applicable} applicable checks" if applicable > 1 else "The only applicable check"
        lines.append(f"{subject} passed.")
    if skipped:
        lines.append(f"{counted(skipped, 'check').capitalize()} skipped as not applicable; see the notes.")
    return [*lines, UNITS]


def _cards(record: Verification) -> list[tuple[str, str, str]]:
    """Return the counts, and the check that is closest to its tolerance, or furthest above it."""
    applicable = len(record.applicable)
    shown = [
        ("Passed", f"{applicable - len(record.failed)} of {applicable}", "applicable checks"),
        ("Skipped", str(len(record.skipped)), "checks that are not applicable"),
    ]
    shares = {}  # of the tolerance
    for check in record.applicable:
        if check.difference is not None and check.tolerance:
            shares[_title(check)] = check.difference / check.tolerance
    if shares:
        largest = max(shares, key=lambda title: shares[title])
        shown.append(("Largest difference", f"{shares[largest]:.2g}×", f"the tolerance: {largest}"))
    return shown


def tables(record: Verification) -> list[Table]:
    """Return the table of checks, those last that are not applicable."""
    rows = []
    for check in (*record.applicable, *record.skipped):
        rows.append([check.name, check.dtype or "", Mark(check.status, KINDS[check.status])])
        rows[-1] += [*_numbers(check), check.reason]
    return [("Checks", ["check", "dtype", "result", "difference", "tolerance", "note"], rows)]


def _numbers(check: Check) -> list[str]:
    """Return difference and tolerance with two digits; empty if there is none."""
    return ["" if number is None else f"{number:.2g}" for number in (check.difference, check.tolerance)]


def _title(check: Check) -> str:
    return f"{check.name} ({check.dtype})" if check.dtype else check.name
