"""What the tests of verification share."""

from crosslayer.verbs.verify import run as module
from crosslayer.verbs.verify.checks import CHECKS


def only(monkeypatch, *names):
    """Run no other checks of a model than these."""
    monkeypatch.setattr(module, "CHECKS", {name: CHECKS[name] for name in CHECKS if name in names})


def by_name(verification):
    return {check.name: check for check in verification.checks}


def statuses(verification):
    return [(check.name, check.status) for check in verification.checks]
