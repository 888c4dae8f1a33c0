"""The page of a verification, from its record alone: what was checked, how far off it was, and what was skipped."""

from crosslayer.output.page import Mark, Page, Table
from crosslayer.verbs.verify.result import Check, Verification

UNITS = "Differences are in standard deviations of the logits: the largest; below float32 the root mean square."
KINDS = {"PASS": "pass", "FAIL": "fail", "NOT APPLICABLE": "skip"}


def layout(record: Verification) -> Page:
    """Return the parts of the page."""
    return Page(
        title=f"Verification of {record.model}",
        subtitle=f"{len(record.applicable)} checks in {record.seconds:.0f} s",
        cards=_cards(record),
        words=sentences(record),
        panels=[],
        tables=tables(record),
    )


def sentences(record: Verification) -> list[str]:
    """Return the outcome, the failures first."""
    said = []
    for check in record.failed:
        difference, tolerance = _numbers(check)
        reason = check.reason or f"a difference of {difference}, the tolerance is {tolerance}"
        said.append(f"{_title(check)} failed: {reason}.")
    if record.applicable and record.passed:
        said.append(f"All {len(record.applicable)} checks that apply passed.")
    skipped = len(record.skipped)
    if skipped:
        subject = f"{skipped} checks do" if skipped > 1 else "One check does"
        said.append(f"{subject} not apply, and nothing was verified by them; the second table says why.")
    return [*said, UNITS]


def _cards(record: Verification) -> list[tuple[str, str, str]]:
    """Return the counts, and the check that came closest to its tolerance."""
    applicable, failed = len(record.applicable), len(record.failed)
    shown = [
        ("Passed", f"{applicable - failed} of {applicable}", "checks that apply"),
        ("Failed", str(failed), "checks"),
        ("Skipped", str(len(record.skipped)), "checks that do not apply"),
    ]
    shares = {}  # of its tolerance
    for check in record.applicable:
        if check.difference is not None and check.tolerance:
            shares[_title(check)] = check.difference / check.tolerance
    if shares:
        farthest = max(shares, key=lambda title: shares[title])
        shown.append(("Farthest", f"{shares[farthest]:.2g}×", f"its tolerance: {farthest}"))
    return shown


def tables(record: Verification) -> list[Table]:
    """Return the checks that ran, and what was skipped and why."""
    shown: list[Table] = []
    if record.applicable:
        head = ["check", "dtype", "result", "difference", "tolerance", "reason"]
        rows = []
        for check in record.applicable:
            mark = Mark(check.status, KINDS[check.status])
            rows.append([check.name, check.dtype or "", mark, *_numbers(check), check.reason])
        shown.append(("Checks", head, rows))
    if record.skipped:
        rows = [[check.name, check.dtype or "", check.reason] for check in record.skipped]
        shown.append(("Not applicable: what was skipped, and why", ["check", "dtype", "reason"], rows))
    return shown


def _numbers(check: Check) -> list[str]:
    """Return difference and tolerance with two digits, empty where there is none."""
    return ["" if number is None else f"{number:.2g}" for number in (check.difference, check.tolerance)]


def _title(check: Check) -> str:
    return f"{check.name} ({check.dtype})" if check.dtype else check.name
