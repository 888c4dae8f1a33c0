"""What tests of serving share."""

import pytest
from transformers import CONFIG_MAPPING


@pytest.fixture(autouse=True)
def registered_configs(monkeypatch):
    """Forget a config that a test registers with transformers, such as that of DeciLM."""
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {**CONFIG_MAPPING._extra_content})
