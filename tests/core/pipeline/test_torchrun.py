"""The guide's own loop under torchrun: the saved model is that of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import crosslayer

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "train.md"
BLOCK = re.compile(r'(?m)^```python title="needs torchrun[^"]*"\n(.*?)^```$', re.S)
STEPS = 3


def one_process():
    """Train the guide's model without stages, with gradients of the whole batch."""
    torch.manual_seed(0)
    config = crosslayer.CrossLayerConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        cross_layer={"name": "attnres", "block": 2},
    )  # fmt: skip
    model = crosslayer.CrossLayerForCausalLM(config)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        ids = torch.randint(512, (16, 32), generator=torch.Generator().manual_seed(step))
        logits = model(ids, use_cache=False).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, model


@pytest.mark.slow  # two or four processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_guides_loop_saves_the_model_of_one_process(ranks, tmp_path):
    (block,) = BLOCK.findall(GUIDE.read_text())
    (tmp_path / "pipeline.py").write_text(block)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*words, "pipeline.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    files = {path.name for path in (tmp_path / "trained").iterdir()}
    shards = {f"model-{rank + 1:05}-of-{ranks:05}.safetensors" for rank in range(ranks)}
    assert files == shards | {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    first, expected = one_process()
    found = loaded.state_dict()
    assert found.keys() == first.keys()
    for name, value in expected.state_dict().items():
        moved = (value - first[name]).abs().max()
        # Adam divides by the size of a gradient, so rounding shows where one is nearly zero
        gap = (found[name] - value).abs()
        assert gap.max() <= 0.05 * moved and gap.mean() <= 1e-3 * moved and moved > 1e-3, name
    size = sum(value.nbytes for value in found.values())
    assert size <= crosslayer.plan(tmp_path / "trained").weights_bytes < 1.02 * size  # the files have headers


@pytest.mark.slow  # two processes
def test_an_error_on_one_rank_ends_all(tmp_path):
    """A folder that exists is refused on rank 0; the others must not wait for it."""
    (block,) = BLOCK.findall(GUIDE.read_text())
    (tmp_path / "pipeline.py").write_text(block.replace("range(3)", "range(1)"))
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "mine.txt").write_text("mine")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*words, "pipeline.py"], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode != 0 and run.stderr.count("ValueError: rank 0: the folder 'trained' exists") == 2
    assert [path.name for path in (tmp_path / "trained").iterdir()] == ["mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipeline.py", "trained"]
