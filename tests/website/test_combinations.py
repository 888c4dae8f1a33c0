"""The table of pairs is what the code says, and a pair that breaks its cache cannot be called one that works."""

from types import SimpleNamespace

import pytest

from website import combinations


@pytest.mark.parametrize("run", [pytest.param(True, marks=pytest.mark.slow), False], ids=["run", "built"])
def test_the_section_is_what_the_code_says(monkeypatch, run):
    if not run:  # what is refused is refused by configurations; half of the time is that of the models
        monkeypatch.setattr(combinations, "build", lambda config: lambda *_, **__: SimpleNamespace(logits=None))
        monkeypatch.setattr(combinations, "steps", lambda *_: (None, None))
        monkeypatch.setattr(combinations, "close", lambda *_: None)
    (written,) = combinations.SECTION.findall(combinations.PAGE.read_text())
    assert written == combinations.section(), "run make tables"


def test_a_collision_names_both_methods():
    message = combinations.collision("attnres", "hyper_connections")
    assert message is not None and "attnres" in message and "hyper_connections" in message
    assert combinations.collision("attnres", "cla") is None


@pytest.mark.parametrize(
    ("first", "second", "letter"),
    [
        ("attnres", "mudd", "A"),
        ("cla", "yoco", "B"),
        ("cross_attention", "fusedkv", "B"),
        ("cla", "drop", "C"),
        ("resformer", "svformer", "D"),
    ],
)
def test_a_reason_is_what_the_plans_and_modules_say(first, second, letter):
    assert combinations.reason(first, second) == letter == combinations.reason(second, first)


def test_a_cache_that_changes_the_logits_is_no_composition(monkeypatch):
    logits = combinations.steps
    monkeypatch.setattr(combinations, "steps", lambda *args: (logits(*args)[0] + 1e-3, None))
    with pytest.raises(AssertionError, match="1.00e-03"):
        combinations.collision("attnres", "cla")
