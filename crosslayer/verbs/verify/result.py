"""The result of a verification: what `record.json` holds."""

from typing import Any, Literal

from pydantic import Field

from crosslayer.output.record import Frozen
from crosslayer.output.result import Result

Status = Literal["PASS", "FAIL", "NOT APPLICABLE"]
PASS: Status = "PASS"
FAIL: Status = "FAIL"
NOT_APPLICABLE: Status = "NOT APPLICABLE"


class Check(Frozen):
    """A row: `difference` and `tolerance` are in standard deviations of the logits unless `reason` says otherwise.

    The difference is the largest in float32 and float64, and the root mean square in lower precisions; it is None where
    nothing was measured. `dtype` is None for checks of files.
    """

    name: str
    dtype: str | None
    status: Status
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""


class Verification(Result):
    """What `crosslayer.verify` returns: a row for each check, typed, with its page."""

    schema_: Literal["crosslayer/verify/3"] = Field(default="crosslayer/verify/3", alias="schema")
    model: str = Field(description="name of the model without folders above it, or its class")
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
        """The checks that do not apply; each says why."""
        return tuple(check for check in self.checks if check.status == NOT_APPLICABLE)

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        """1 where a check failed, of the command line."""
        return 0 if self.passed else 1

    def headline(self) -> dict[str, Any]:
        """Return the model's name, how many checks passed, failed or do not apply, and the seconds."""
        return {
            "model": self.model,
            "passed": len(self.applicable) - len(self.failed),
            "failed": len(self.failed),
            "not_applicable": len(self.skipped),
            "seconds": self.seconds,
        }
