"""What tests of evaluations share: a folder of local tasks, made once."""

import functools

import pytest
from lm_eval.api import metrics
from torch.utils import collect_env

from tests.helpers import evaluations


@pytest.fixture(scope="session", autouse=True)
def _short_bootstrap():
    """A hundredth of lm-eval's draws, and the machine described once: these are most of the time of a score."""
    draw = metrics._bootstrap_internal_no_mp
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DISABLE_MULTIPROC", "1")
        patched.setattr(metrics, "_bootstrap_internal_no_mp", lambda f, xs, iters: draw(f, xs, iters // 100))
        patched.setattr(collect_env, "get_pretty_env_info", functools.cache(collect_env.get_pretty_env_info))
        yield


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    return evaluations.local_tasks(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folders of a candidate and of a baseline."""
    folder = tmp_path_factory.mktemp("models")
    return evaluations.saved(folder / "candidate", 1), evaluations.saved(folder / "baseline", 2)
