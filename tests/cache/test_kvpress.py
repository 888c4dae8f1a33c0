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
    text = Path(__file__).parents[2].joinpath("docs", "evidence", "retrofits.md").read_text(encoding="utf-8")
    ids = words(text)["input_ids"]
    texts = [ids[:160], ids[500:1012]]  # multiples of a block, where streaming has just evicted
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "ids.json").write_text(json.dumps(texts), encoding="utf-8")
    command = [PYTHON, str(SCRIPT), "model", "ids.json", "kept.json"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": ""})
    expected = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    for policy, by_text in expected.items():
        for number, layers in enumerate(by_text):
            with smaller_cache(model, f"{policy}:0.5") as new_cache:
                cache = new_cache()
                model(torch.tensor([texts[number]]), **{CACHE: cache})
            ours = [[sorted(head) for head in group.positions[0].tolist()] for group in cache.groups]
            if policy == "streaming":
                assert ours == layers  # by position alone
            else:
                _same_but_for_ties(ours, layers)


def _same_but_for_ties(ours, expected):
    """SnapKV in layers that have read the whole prompt in both: the same, but where float32 leaves the order open."""
    heads = [(mine, other) for layer in zip(ours, expected, strict=True) for mine, other in zip(*layer, strict=True)]
    wrong = sum(len(set(mine) ^ set(other)) for mine, other in heads)
    kept = sum(len(mine) for mine, _ in heads)
    assert wrong <= 0.001 * kept, f"{wrong} of {kept} differ"
