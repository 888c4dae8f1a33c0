"""The page of a verification, from its record alone: what was checked, how far off it was, and what was skipped."""

from crosslayer.output.page import Mark, Page, Table
from crosslayer.verbs.verify.record import Check
from crosslayer.verbs.verify.result import Verification

UNITS = "Differences are in standard deviations of the logits: the largest; below float32 the root mean square."
KINDS = {"PASS": "pass", "FAIL": "fail", "NOT APPLICABLE": "skip"}


def layout(record: Verification) -> Page:
    """Return the parts of the page."""
    versions = record.environment.versions
    packages = ", ".join(f"{package} {versions.get(package)}" for package in ("torch", "transformers"))
    command = [] if record.command is None else [record.command]
    return Page(
        title=f"Verification of {record.model}",
        subtitle=" · ".join([*command, f"{record.seconds:.0f} s", packages]),
        cards=cards(record),
        words=sentences(record),
        panels=[],
        tables=[*tables(record)],
    )


def sentences(record: Verification) -> list[str]:
    """Return the outcome, the failures first."""
    said = [f"{_title(check)} failed: {check.reason or _distance(check)}." for check in record.failed]
    if record.applicable and record.passed:
        said.append(f"All {len(record.applicable)} checks that apply passed.")
    skipped = len(record.skipped)
    if skipped:
        subject = f"{skipped} checks do" if skipped > 1 else "One check does"
        said.append(f"{subject} not apply, and nothing was verified by them; the second table says why.")
    return [*said, UNITS]


def cards(record: Verification) -> list[tuple[str, str, str]]:
    """Return the counts, and the check that came closest to its tolerance."""
    applicable, failed = len(record.applicable), len(record.failed)
    shown = [
        ("Passed", f"{applicable - failed} of {applicable}", "checks that apply"),
        ("Failed", str(failed), "checks"),
        ("Skipped", str(len(record.skipped)), "checks that do not apply"),
    ]
    farthest, largest = None, -1.0
    for check in record.applicable:
        if check.difference is not None and check.tolerance and check.difference / check.tolerance > largest:
            farthest, largest = check, check.difference / check.tolerance
    if farthest is not None:
        shown.append(("Farthest", f"{largest:.2g}×", f"its tolerance: {_title(farthest)}"))
    return shown


def tables(record: Verification) -> list[Table]:
    """Return the checks that ran, and what was skipped and why."""
    shown: list[Table] = []
    if record.applicable:
        head = ["check", "dtype", "result", "difference", "tolerance", "reason"]
        shown.append(("Checks", head, [_cells(check) for check in record.applicable]))
    if record.skipped:
        rows = [[check.name, check.dtype or "", check.reason] for check in record.skipped]
        shown.append(("Not applicable: what was skipped, and why", ["check", "dtype", "reason"], rows))
    return shown


def numbers(check: Check) -> list[str]:
    """Return difference and tolerance with two digits, empty where there is none."""
    return ["" if number is None else f"{number:.2g}" for number in (check.difference, check.tolerance)]


def _cells(check: Check) -> list:
    return [check.name, check.dtype or "", Mark(check.status, KINDS[check.status]), *numbers(check), check.reason]


def _title(check: Check) -> str:
    return f"{check.name} ({check.dtype})" if check.dtype else check.name


def _distance(check: Check) -> str:
    difference, tolerance = numbers(check)
    return f"a difference of {difference}, the tolerance is {tolerance}"
