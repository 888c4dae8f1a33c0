"""The result of a verification: the content of `record.json`."""

from typing import Any, Literal

from pydantic import Field

from crosslayer.output.record import Frozen
from crosslayer.output.result import Result

Status = Literal["PASS", "FAIL", "NOT APPLICABLE"]
PASS: Status = "PASS"
FAIL: Status = "FAIL"
NOT_APPLICABLE: Status = "NOT APPLICABLE"


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
