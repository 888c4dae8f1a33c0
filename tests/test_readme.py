"""The Python of README.md runs as it stands there, on a model that is small enough for a test."""

import re
from pathlib import Path

import pytest
import torch

import crosslayer
from tests.helpers.text import WORDS, tokenizer, words
from tests.helpers.tiny import tiny

README = Path(__file__).parent.parent / "README.md"
SMALL = 'crosslayer.TextSource("notes.txt"), sequences=2, length='
SMALLER = {  # what README says → the same for a model of 8 layers, in less time
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
    """A working directory with the model and the text that README speaks of."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": len(WORDS), "num_hidden_layers": 8, "max_position_embeddings": 512}
    tiny("llama", dtype=torch.float32, **sizes).save_pretrained("tiny")
    tokenizer(unk_token="[UNK]").save_pretrained("tiny")
    Path("notes.txt").write_text(words(0, 500))
    return tmp_path


def test_the_python_of_the_readme_runs(folder):
    text = README.read_text()
    for said, smaller in SMALLER.items():
        assert said in text, said
        text = text.replace(said, smaller)
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["config"].plan.cached_fraction() == 0.5
    assert namespace["diagnosis"].hidden_norm_ratio.shape == (8,)
    assert namespace["effect"].attention_received.shape == (2, 8)
    assert isinstance(crosslayer.load_result(folder / "small"), crosslayer.Receipt)
