"""Our samples against those of the RULER tasks of the LM Evaluation Harness."""

import ast
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from crosslayer.judge import hidden as text
from crosslayer.judge.hidden import Drawn, is_retrieved, written

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (extra eval)"),
    pytest.mark.filterwarnings("ignore"),  # lm-eval's own
]


def ruler():
    """The folder of lm-eval's RULER tasks."""
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks" / "ruler"


def constant(file, name):
    """A text that a module of lm-eval assigns at its top, without running it: its extra `ruler` may be missing."""
    for node in ast.parse((ruler() / file).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no {name}")


@pytest.fixture
def generator(monkeypatch):
    """lm-eval's generator; of its extra `ruler` words that are drawn and the data of nltk are stood in for."""
    pytest.importorskip("nltk", reason="nltk is not installed (lm-eval's extra ruler)")
    import nltk

    if importlib.util.find_spec("wonderwords") is None:
        stand_in = types.ModuleType("wonderwords")
        words = {"nouns": [*text.NOUNS], "adjectives": [*text.ADJECTIVES], "verbs": []}
        stand_in.RandomWord = lambda: types.SimpleNamespace(_categories=words)
        monkeypatch.setitem(sys.modules, "wonderwords", stand_in)
    monkeypatch.setattr(nltk.data, "find", lambda name: name)  # else it is downloaded
    prepare_niah = importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
    monkeypatch.setattr(prepare_niah, "cached_sent_tokenize", text.sentences_of)
    yield prepare_niah
    del sys.modules["lm_eval.tasks.ruler.prepare_niah"]  # with what stood in


@pytest.mark.parametrize("keys", [1, 4])
def test_the_words_are_those_of_rulers_own_generator(generator, keys):
    """Its text, with our needles in its places, is ours but for where the needles stand."""
    source = " ".join(text.haystack()[:40])
    prompt, answers, key = generator.generate_input_output(
        10_000,
        source.split(" "),
        type_haystack="essay",
        num_needle_k=keys,
        type_needle_k="words",
        num_needle_v=1,
        type_needle_v="numbers",
        template=constant("niah_utils.py", "TEMPLATE"),
    )
    lines = text.sentences_of(prompt.split("\n")[1])
    told = [line for line in lines if line.startswith("One of the special magic")]
    assert len(told) == keys and text.RULER.needle.format(key=key, value=answers[0]) in told
    drawn = Drawn([key], answers, [], 0)
    ours, _ = written(drawn, [line for line in lines if answers[0] not in line], 0)
    assert [*ours.split("\n")[::2]] == [*prompt.split("\n")[::2]]  # introduction and question
    assert sorted(text.sentences_of(ours.split("\n")[1])) == sorted(lines)


def test_the_answer_begins_as_rulers_does():
    source = (ruler() / "prepare_niah.py").read_text()
    assert constant("prepare_niah.py", "NEEDLE").replace("{type_needle_v}", "numbers") == text.RULER.needle
    assert text.RULER.prefix.replace("number", "{type_needle_v[:-1]}", 1).replace("{key}", "{query}") in source


@pytest.mark.parametrize("said", ["It is 1234567.", "1234567\x01 and 7654321", " 123456", "", "ABC is 7654321"])
def test_the_score_is_rulers(said):
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    assert is_retrieved(said, "1234567") == string_match_all(postprocess_pred([said]), [["1234567"]])
