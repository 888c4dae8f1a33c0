"""kvpress keeps the same tokens: run by `make test-kvpress`, which makes its environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from crosslayer.cache.running import smaller_cache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.load import load_model

PYTHON = os.environ.get("CROSSLAYER_KVPRESS")
SCRIPT = Path(__file__).with_name("by_kvpress.py")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="CROSSLAYER_KVPRESS names no Python with kvpress; `make test-kvpress` does")
def test_kvpress_keeps_the_same_tokens_of_smollm2(tmp_path):
    model, words = load_model("smollm2")
    text = Path(__file__).parents[2].joinpath("docs", "evidence", "README.md").read_text(encoding="utf-8")
    ids = words(text)["input_ids"]
    texts = [ids[:160], ids[500:1012]]  # multiples of a block, where streaming has just evicted
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "ids.json").write_text(json.dumps(texts), encoding="utf-8")
    command = [PYTHON, str(SCRIPT), "model", "ids.json", "kept.json"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": ""})
    expected = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    for text, layers in zip(texts, expected, strict=True):
        with smaller_cache(model, "streaming:0.5") as new_cache:
            cache = new_cache()
            model(torch.tensor([text]), **{CACHE: cache})
        assert [[sorted(head) for head in group.positions[0].tolist()] for group in cache.groups] == layers
