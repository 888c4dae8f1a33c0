"""Which cases of a test `make test` runs, where `make test-slow` runs all."""

from collections.abc import Iterable
from typing import Any

import pytest


def daily(cases: Iterable[Any], *chosen: Any) -> list:
    """The parameters of a test over cases, those that are not chosen marked as slow."""
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.slow) for case in cases]
