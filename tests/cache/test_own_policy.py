"""A policy of your own: the module on the page, and the error for a module without one."""

import re
import sys
from pathlib import Path

import pytest
import torch

import crosslayer
from crosslayer.cache.eviction import parse_eviction
from crosslayer.core import methods
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import build, config_of, tokens
from tests.cli.test_cli import run
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "measure.md"


@pytest.fixture
def beginning(tmp_path, monkeypatch):
    """The page's policy as a module on the path."""
    (block,) = re.findall(r"```python\n(# beginning.py.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "beginning.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(methods, "_allowed", set())
    yield tmp_path
    sys.modules.pop("beginning", None)


def test_it_keeps_what_it_ranks_highest(beginning):
    with pytest.raises(ValueError, match="'beginning'.*--allow-methods"):
        parse_eviction("beginning:32")
    assert "beginning" not in sys.modules
    crosslayer.allow_methods("beginning")
    model, ids = build(config_of("cla")), tokens(1, 48)
    with torch.no_grad(), crosslayer.smaller_cache(model, "beginning:32") as new_cache:
        cache = new_cache()
        model(ids, **{CACHE: cache})
    kept = sorted(position for position in cache.groups[0].positions[0, 0].tolist() if position >= 0)
    assert kept == list(range(16))  # and space for 16 more


def test_the_command_line_takes_it(beginning, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    tiny("llama", dtype=torch.float32, vocab_size=len(WORDS)).save_pretrained(model)
    tokenizer().save_pretrained(model)
    words = ["bench", model, "--baseline", model, "--contexts", 48, "--new-tokens", 2, "--repeats", 1]
    assert run(monkeypatch, *words, "--evict", "beginning:0.5") == 2
    assert "--allow-methods beginning" in capsys.readouterr().err
    assert run(monkeypatch, *words, "--evict", "beginning:0.5", "--allow-methods", "beginning") == 0


def test_a_module_without_a_policy_is_no_policy(beginning):
    (beginning / "empty_policy.py").write_text("")
    crosslayer.allow_methods("empty_policy")
    with pytest.raises(ValueError, match="'empty_policy' must define .* got 0"):
        parse_eviction("empty_policy:0.5")
    sys.modules.pop("empty_policy", None)
