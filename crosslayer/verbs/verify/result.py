"""The result of a verification and its page: checks, differences, and what was skipped."""

from typing import Any, Literal

from pydantic import Field

from crosslayer.output.formatting import Table, counted
from crosslayer.output.page import Mark, Page
from crosslayer.output.record import Frozen
from crosslayer.output.result import Result

Status = Literal["PASS", "FAIL", "NOT APPLICABLE"]
PASS: Status = "PASS"
FAIL: Status = "FAIL"
NOT_APPLICABLE: Status = "NOT APPLICABLE"
KINDS = {PASS: "pass", FAIL: "fail", NOT_APPLICABLE: "skip"}
UNITS = (
    "Differences are in standard deviations of the logits: the largest in float32, the root mean square in lower "
    "precision."
)


class Check(Frozen):
    """A check: `difference` and `tolerance` are in standard deviations of the logits unless `reason` says otherwise.

    The difference is the largest in float32 and float64, the root mean square in lower precisions, and None if nothing
    was measured. `dtype` is None for checks of files.
    """

    name: str
    dtype: str | None
    status: Status
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        """Its name, with the dtype if it has one."""
        return f"{self.name} ({self.dtype})" if self.dtype else self.name

    def numbers(self) -> list[str]:
        """Return difference and tolerance with two digits; an empty text for None."""
        return ["" if number is None else f"{number:.2g}" for number in (self.difference, self.tolerance)]


class Verification(Result):
    """What `crosslayer.verify` returns: all checks, with a page."""

    schema_: Literal["crosslayer/verify/3"] = Field(default="crosslayer/verify/3", alias="schema")
    model: str = Field(description="name of the model without parent folders, or its class")
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def applicable(self) -> tuple[Check, ...]:
        """The checks that ran."""
        return tuple(check for check in self.checks if check.status != NOT_APPLICABLE)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that ran and failed."""
        return tuple(check for check in self.checks if check.status == FAIL)

    @property
    def skipped(self) -> tuple[Check, ...]:
        """The checks that are not applicable; `reason` says why."""
        return tuple(check for check in self.checks if check.status == NOT_APPLICABLE)

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        """Exit status of the command line: 1 if a check failed, else 0."""
        return 0 if self.passed else 1

    def headline(self) -> dict[str, Any]:
        """Return the name of the model, the numbers of checks by status, and the seconds."""
        return {
            "model": self.model,
            "passed": len(self.applicable) - len(self.failed),
            "failed": len(self.failed),
            "not_applicable": len(self.skipped),
            "seconds": self.seconds,
        }

    def layout(self) -> Page:
        """Return the page; one card has the check that is closest to its tolerance, or furthest above it."""
        applicable = len(self.applicable)
        cards = [
            ("Passed", f"{applicable - len(self.failed)} of {applicable}", "applicable checks"),
            ("Skipped", str(len(self.skipped)), "checks that are not applicable"),
        ]
        # shares of the tolerance; a check that must be exact has a tolerance of 0
        shares = {}
        for check in self.applicable:
            if check.difference is not None and check.tolerance:
                shares[check.title] = check.difference / check.tolerance
        if shares:
            largest = max(shares, key=lambda title: shares[title])
            cards.append(("Largest difference", f"{shares[largest]:.2g}×", f"the tolerance: {largest}"))
        return Page(
            title=f"Verification of {self.model}",
            subtitle=f"{applicable} checks in {self.seconds:.0f} s",
            cards=cards,
        )

    def sentences(self) -> list[str]:
        """Return the outcome, the failures first."""
        lines = []
        for check in self.failed:
            difference, tolerance = check.numbers()
            measured = f"difference {difference}, tolerance {tolerance}" if difference else ""
            reason = "; ".join(text for text in (measured, check.reason) if text)
            lines.append(f"{check.title} failed: {reason}.")
        applicable, skipped = len(self.applicable), len(self.skipped)
        if applicable and self.passed:
            subject = f"All {applicable} applicable checks" if applicable > 1 else "The only applicable check"
            lines.append(f"{subject} passed.")
        if skipped:
            lines.append(f"{counted(skipped, 'check').capitalize()} skipped as not applicable; see the notes.")
        return [*lines, UNITS]

    def tables(self) -> list[Table]:
        """Return the table of checks, those last that are not applicable."""
        rows = []
        for check in (*self.applicable, *self.skipped):
            mark = Mark(check.status, KINDS[check.status])
            rows.append([check.name, check.dtype or "", mark, *check.numbers(), check.reason])
        return [("Checks", ["check", "dtype", "result", "difference", "tolerance", "note"], rows)]
