"""The page of pairs is what the code says, and a pair that breaks its cache cannot be called one that works."""

from pathlib import Path

import pytest

from crosslayer.verbs.methods import compositions

PAGE = Path(__file__).parents[3] / "docs" / "methods" / "combinations.md"


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == compositions.page(), "run python -m crosslayer.verbs.methods.compositions"


def test_a_collision_names_both_methods():
    message = compositions.collision("attnres", "hyper_connections")
    assert message == "attnres and hyper_connections both replace the residual stream; only one method may"
    assert compositions.collision("attnres", "cla") is None


def test_a_cache_that_changes_the_logits_is_no_composition(monkeypatch):
    logits = compositions.steps
    monkeypatch.setattr(compositions, "steps", lambda *args: (logits(*args)[0] + 1e-3, None))
    with pytest.raises(AssertionError, match="attnres, cla: cached: differs by 1.00e-03"):
        compositions.collision("attnres", "cla")
