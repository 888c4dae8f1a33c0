"""What `record.json` of a verification holds."""

from typing import Literal

from pydantic import Field

from crosslayer.output.record import Environment, Frozen, typed_command

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


class VerificationRecord(Frozen):
    """What `record.json` of a verification holds."""

    schema_: Literal["crosslayer/verify/2"] = Field(default="crosslayer/verify/2", alias="schema")
    model: str = Field(description="name of the model without folders above it, or its class")
    command: str | None = typed_command()
    checks: tuple[Check, ...]
    seconds: float
    environment: Environment

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
