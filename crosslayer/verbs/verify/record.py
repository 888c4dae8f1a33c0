"""What `record.json` of a verification holds."""

from typing import Literal

from crosslayer.output.record import Frozen

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
