"""The result of a verification."""

from typing import Any

from crosslayer.output.page import Page
from crosslayer.output.result import Result
from crosslayer.output.shown import Table
from crosslayer.verbs.verify.page import layout, tables, words
from crosslayer.verbs.verify.record import VerificationRecord


class Verification(VerificationRecord, Result):
    """What `crosslayer.verify` returns: a row for each check, typed, with its page."""

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        """1 where a check failed, of the command line."""
        return 0 if self.passed else 1

    def layout(self) -> Page:
        """Return the parts of the page."""
        return layout(self)

    def sentences(self) -> list[str]:
        """Return what was found, in sentences."""
        return words(self)

    def tables(self) -> list[Table]:
        """Return the checks that ran, and what was skipped and why."""
        return tables(self)

    def headline(self) -> dict[str, Any]:
        """Return the model's name, how many checks passed, failed or do not apply, and the seconds."""
        return {
            "model": self.model,
            "passed": len(self.applicable) - len(self.failed),
            "failed": len(self.failed),
            "not_applicable": len(self.skipped),
            "seconds": self.seconds,
        }
