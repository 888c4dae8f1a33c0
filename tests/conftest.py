"""What pytest must know before it collects, and what all tests share."""

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


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium with the network off, the same for all tests; skipped where there is none."""
    yield from offline_browser()
