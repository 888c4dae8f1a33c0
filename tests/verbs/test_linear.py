"""The two longest verbs tell in a few statements what they do, and read config, layer shapes and windows once."""

import ast
import inspect
from collections import Counter

import pytest
import torch

import crosslayer
from crosslayer.verbs.fit_codec import run as fit_codec_run
from crosslayer.verbs.retrofit import original, texts
from crosslayer.verbs.retrofit import run as retrofit_run
from tests.helpers.text import tokenizer
from tests.helpers.tiny import VOCABULARY, tiny


@pytest.mark.parametrize("verb", [retrofit_run.retrofit, fit_codec_run.fit_codec])
def test_a_verb_has_at_most_fifteen_statements(verb):
    (function,) = ast.parse(inspect.getsource(verb)).body
    docstring, *body = function.body
    nodes = [node for statement in body for node in ast.walk(statement)]
    assert sum(isinstance(node, ast.stmt) for node in nodes) <= 15


@pytest.fixture
def calls(monkeypatch):
    """Return a function that counts the calls of functions of modules, by name."""
    counts: Counter[str] = Counter()

    def count(module, name):
        function = getattr(module, name)

        def counted(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(module, name, counted)

    def watch(*functions):
        for module, name in functions:
            count(module, name)
        return counts

    return watch


def ids(count, length):
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


def test_a_retrofit_reads_everything_once(calls, tmp_path):
    tiny("llama", dtype=torch.float32, num_hidden_layers=8).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    counts = calls(
        (retrofit_run, "load_config"),
        (retrofit_run, "ready_model"),
        (original, "find_sublayers"),
        (texts, "split_domains"),
    )
    options = {"layers": "4-7", "windows": 16, "calibration": 48, "length": 16}
    crosslayer.retrofit(str(tmp_path / "model"), {"web": ids(80, 16)}, method="cla", **options)
    assert counts == dict.fromkeys(("load_config", "ready_model", "find_sublayers", "split_domains"), 1)


def test_a_codec_reads_everything_once(calls):
    counts = calls((fit_codec_run, "ready_model"), (fit_codec_run, "read_shapes"), (fit_codec_run, "split_domains"))
    options = {"calibration": 8, "length": 60, "windows": 4, "prompt": 40, "continued": 12, "repeats": 1}
    text = {"calibration_text": {"web": ids(8, 60)}, "text": {"code": ids(6, 52)}}
    crosslayer.fit_codec(tiny("llama").float(), share=0.5, **options, **text)
    assert counts == {"ready_model": 1, "read_shapes": 1, "split_domains": 2}  # text to fit to, and text to measure on
