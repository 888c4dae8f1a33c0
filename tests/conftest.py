"""What pytest must know before it collects, and what all tests share."""

import gc
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.browser import offline_browser

# a machine that is busy with other things draws examples slowly
settings.register_profile("default", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("default")

# of transformers' own tests, which tests/core/decoder/test_transformers.py runs where they are
MARKS = """accelerate_tests executorch_export_test flash_attn_3_test flash_attn_4_test flash_attn_test generate
is_expert_parallel_test is_fsdp_test is_pipeline_test is_tensor_parallel_test is_training_test onnx_export_test order
timeout torch_compile_test torch_export_test"""


def pytest_configure(config):
    for mark in MARKS.split():
        config.addinivalue_line("markers", f"{mark}: of transformers' own tests")


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_is_collected():
    """Leave what earlier modules imported out of garbage collection, which Trainer runs before every training.

    Libraries are hundreds of thousands of objects: without this, a collection takes longer than most tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # Python's own thresholds took 2.5% more time, measured once


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium with the network off, the same for all tests; skipped where there is none."""
    yield from offline_browser()


def global_state() -> dict:
    """Return what a test may change for those behind it, of libraries that are imported already."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch, transformers = sys.modules.get("torch"), sys.modules.get("transformers.modeling_utils")
    if torch is not None:
        found |= {"dtype": torch.get_default_dtype(), "threads": torch.get_num_threads()}
        found |= {"gradients": torch.is_grad_enabled()}
    if transformers is not None:
        found |= transformers.AttentionInterface._global_mapping | {"attention": True}
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Fail the test that leaves a signal handler, a setting of torch or an attention function, not a later one."""
    before = global_state()
    yield
    after = global_state()
    changed = [name for name in before if after.get(name) is not before[name] and after.get(name) != before[name]]
    if "attention" in before:  # else transformers was imported just now
        changed += sorted(set(after) - set(before) - {"sdpa_within_documents"})  # training's own name, which stays
    assert not changed, f"the test leaves other values of {changed} behind"
