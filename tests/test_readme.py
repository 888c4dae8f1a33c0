"""The Python of README.md and of the tour runs as it stands there, on a model that is small enough for a test."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import crosslayer
from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans, method_class, method_names
from crosslayer.testing import CHECKS, config_of
from tests.helpers.text import WORDS, tokenizer, words
from tests.helpers.tiny import tiny

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
SMALL = 'crosslayer.TextSource("notes.txt"), sequences=2, length='
SMALLER = {  # what the tour says → the same for a model of 8 layers, in less time
    'diagnose("smollm2")': f'diagnose("tiny", {SMALL}32)',
    'intervene("smollm2", ': f'intervene("tiny", {SMALL}16, ',
    "waiver(255)": "waiver(5)",
    'retrofit("smollm2"': 'retrofit("tiny", windows=96',
    '"smollm2"': '"tiny"',
    "Config(num_hidden_layers=8": "Config(num_hidden_layers=8, hidden_size=32, num_attention_heads=4",
    '"26-29"': '"4-7"',
    "[[26, 27, 28, 29]]": "[[4, 5, 6, 7]]",
    "the attention of a token": "w1 w2 w3 w4 w5",
    'verify("small")': 'verify("small", dtypes=["float32"], compile_backend="eager")',
    "length=256": "length=32",
    "contexts=[128], new_tokens=16": "contexts=[16], new_tokens=2, repeats=1",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the model and the text that the tour speaks of."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": len(WORDS), "num_hidden_layers": 8, "max_position_embeddings": 512}
    tiny("llama", dtype=torch.float32, **sizes).save_pretrained("tiny")
    tokenizer(unk_token="[UNK]").save_pretrained("tiny")
    Path("notes.txt").write_text(words(0, 500))
    return tmp_path


def test_the_python_of_the_tour_runs(folder):
    text = (ROOT / "docs" / "start" / "tour.md").read_text()
    for said, smaller in SMALLER.items():
        assert said in text, said
        text = text.replace(said, smaller)
    blocks = BLOCK.findall(text)
    assert len(blocks) == 4
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "TOUR.md", "exec"), namespace)
    assert namespace["config"].plan.cached_fraction() == 0.5
    assert namespace["diagnosis"].hidden_norm_ratio.shape == (8,)
    assert namespace["effect"].attention_received.shape == (2, 8)
    assert isinstance(crosslayer.load_result(folder / "small"), crosslayer.RetrofitReport)


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    build, method = BLOCK.findall((ROOT / "README.md").read_text())
    small = "num_hidden_layers=8, hidden_size=32, num_attention_heads=4"
    exec(compile(build.replace("num_hidden_layers=8", small), "README.md", "exec"), {})
    (tmp_path / "one_cache.py").write_text(method)
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(importlib.import_module("one_cache").OneCache())
    assert config.plan.cached_fraction() == 0.5  # layers 0, 1 and 2 of 6
    for check in CHECKS[:3]:
        check(config)


def test_the_table_of_the_readme_has_every_method_and_its_cache():
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|[^|]*\| (\d+) % \|( yes | )\|", (ROOT / "README.md").read_text(), re.M
    )
    cells = {name: (int(share), bool(yes.strip())) for names, share, yes in rows for name in re.findall(r"\w+", names)}
    assert sorted(cells) == method_names()
    for name, (share, pretrained) in cells.items():
        method = method_class(name)
        assert round(100 * merge_plans([method.example(32)], 32).cached_fraction()) == share, name
        assert pretrained == (method.from_groups.__func__ is not Method.from_groups.__func__), name
