"""Fixtures of the tests of a recovery: a cache folder, an original, and its retrofits."""

import pytest

from tests.helpers.recovery import original_in, retrofit_in


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSLAYER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with the original and its retrofits, of which `fitted` was calibrated and evaluated on code."""
    folder = tmp_path_factory.mktemp("models")
    original = original_in(folder)
    for name in ("fitted", "without", "shorter"):
        retrofit_in(folder, original, name)
    return folder
