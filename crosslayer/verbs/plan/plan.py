"""What `crosslayer.plan` returns."""

from pathlib import Path
from typing import TYPE_CHECKING

from crosslayer.wiring.result import ModelPlan

if TYPE_CHECKING:
    from crosslayer.verbs.plan.result import PlanReport


class Plan(ModelPlan):
    """The wiring of a model and the bytes of its cache, which can be saved as a page."""

    def report(self) -> "PlanReport":
        """Return the plan as a record with a page."""
        from crosslayer.verbs.plan.result import report_of  # imports torch, which takes seconds

        return report_of(self)

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write record.json, report.html and figures into a folder; return the page's path.

        Raises:
            ValueError: the folder exists and `force` is not set, or it cannot be written.

        """
        return self.report().save(folder, force)
