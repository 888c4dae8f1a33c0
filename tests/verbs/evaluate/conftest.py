"""What tests of evaluations share: a folder of local tasks, made once."""

import pytest

from tests.helpers import evaluations


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    return evaluations.local_tasks(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folders of a candidate and of a baseline."""
    folder = tmp_path_factory.mktemp("models")
    return evaluations.saved(folder / "candidate", 1), evaluations.saved(folder / "baseline", 2)
