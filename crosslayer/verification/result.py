"""The result of a verification."""

from typing import Any

from crosslayer.output.page import Page
from crosslayer.output.result import Result
from crosslayer.verification.page import layout
from crosslayer.verification.record import VerificationRecord


class Verification(VerificationRecord, Result):
    """What `crosslayer.verify` returns: a row for each check, typed, with its page."""

    def layout(self) -> Page:
        """Return the parts of the page."""
        return layout(self)

    def headline(self) -> dict[str, Any]:
        """Return the model's name, how many checks passed, failed or do not apply, and the seconds."""
        return {
            "model": self.model,
            "passed": len(self.applicable) - len(self.failed),
            "failed": len(self.failed),
            "not_applicable": len(self.skipped),
            "seconds": self.seconds,
        }
