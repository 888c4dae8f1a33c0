"""What makes tests of whole benches cheap: rates of the machine over small buffers."""

import pytest

from crosslayer.verbs.bench import machine


@pytest.fixture(scope="package", autouse=True)
def small_buffers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "BUFFER", 2**20)
        yield
