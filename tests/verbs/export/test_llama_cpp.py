"""llama.cpp itself opens exported files: its logits and its tokens are ours.

It comes by llama-cpp-python, which has an environment of its own, since it is built from source:

    python -m venv llama && llama/bin/pip install llama-cpp-python
    CROSSLAYER_LLAMA=llama/bin/python pytest -m slow tests/verbs/export
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import crosslayer
from tests.verbs.export.models import SHAPES, ours, words

SCRIPT = Path(__file__).with_name("read_by_llama_cpp.py")
PYTHON = os.environ.get("CROSSLAYER_LLAMA") or (importlib.util.find_spec("llama_cpp") and sys.executable)
IDS = [3, 250, 7, 7, 120, 41, 9, 333, 2, 18, 77, 5]
TEXTS = [
    "Call me Ishmael. Some years ago",
    "  two  spaces,\n\n\ttabs and 1234567 digits; it's 50% of 3.14",
    "déjà vu – 日本語 🐋 naïve",
    "<|im_start|>user\nI'LL sail<|im_end|>\n<tool> x",
    "def whale(n):\r\n    return n+1   # ok",
]
TOLERANCE = 1e-3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="CROSSLAYER_LLAMA names no Python with llama-cpp-python"),
]


def by_llama_cpp(jobs):
    done = subprocess.run([PYTHON, SCRIPT], input=json.dumps(jobs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def gap(answer, model, ids):
    return (torch.tensor(answer["logits"]) - logits(model, ids)).abs().max().item()


def test_logits_are_ours(tmp_path):
    names = [name for name in SHAPES if name != "without MLPs"]
    jobs = []
    for number, name in enumerate(names):
        crosslayer.export(ours(name), tmp_path / str(number), words(), to="gguf")
        jobs.append({"file": str(tmp_path / str(number) / "model.gguf"), "ids": IDS, "texts": []})
    gaps = {name: gap(answer, ours(name), IDS) for name, answer in zip(names, by_llama_cpp(jobs), strict=True)}
    print(gaps)
    assert max(gaps.values()) < TOLERANCE, gaps


def test_tokens_are_those_of_the_tokenizer(tmp_path):
    names = ["gpt-2", "smollm", "llama-bpe", "qwen2"]
    jobs = []
    for name in names:
        crosslayer.export(ours("plain"), tmp_path / name, words(name), to="gguf")
        jobs.append({"file": str(tmp_path / name / "model.gguf"), "ids": IDS, "texts": TEXTS})
    for name, answer in zip(names, by_llama_cpp(jobs), strict=True):
        expected = words(name)(TEXTS).input_ids
        assert answer["ids"] == expected, name
        assert answer["texts"] == [words(name).decode(row) for row in expected] == TEXTS, name


def test_smollm2_without_attention_is_ours(tmp_path):
    """In 30 layers, one with W_c alone in the place of attention, and one without either."""
    model, tokenizer = crosslayer.load_model("smollm2", dtype="float32")
    compensated = {"name": "drop", "attention": [20, 25], "compensation": "attention"}
    converted = crosslayer.convert(model, compensated, fit="zero").model
    weight = converted.model.layers[20].attn_compensation.weight
    with torch.no_grad():
        weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    crosslayer.export(converted, tmp_path / "out", tokenizer, to="gguf")
    ids = tokenizer(TEXTS[1]).input_ids
    (answer,) = by_llama_cpp([{"file": str(tmp_path / "out" / "model.gguf"), "ids": ids, "texts": TEXTS}])
    assert gap(answer, converted, ids) < TOLERANCE
    assert answer["ids"] == tokenizer(TEXTS).input_ids
