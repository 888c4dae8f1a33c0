"""A retrofit's card, as it lies in the folder and after `hf upload`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard, parse_eval_result_entries

import crosslayer
from crosslayer.output.manifest import check_files
from crosslayer.verbs.retrofit.card import model_card
from tests.helpers.hub import TOKEN, running_hub
from tests.helpers.text import tokenizer
from tests.helpers.tiny import VOCABULARY, tiny

LENGTH = 16


def ids(seed):
    return torch.randint(3, VOCABULARY, (80, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def report():
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=6)
    texts = {"notes": ids(0), "org/wiki/en/test": ids(1)}
    options = {"calibration_text": {"docs": ids(2)}, "calibration": 16, "windows": 32, "length": LENGTH}
    return crosslayer.retrofit(model, texts, tokenizer(), method="cla", layers="2-3,4-5", **options)


@pytest.fixture(scope="module")
def small(report, tmp_path_factory):
    """The folder of a retrofit."""
    folder = tmp_path_factory.mktemp("card") / "small"
    report.save(folder)
    return folder


def test_an_uploaded_folder_is_the_folder(small, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with running_hub() as hub:
        api = HfApi(hub.address, TOKEN)
        api.create_repo("me/tiny-cla", private=True)
        api.upload_folder(repo_id="me/tiny-cla", folder_path=small)  # as `hf upload me/tiny-cla small` does
        files = hub.repos["me/tiny-cla"]
    assert "model.safetensors" in files and ".eval_results/crosslayer.yaml" in files
    clone = tmp_path / "clone"
    for name, content in {**files, ".gitattributes": b"*.safetensors filter=lfs"}.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(content)
    assert check_files(clone) == []  # as `crosslayer verify` would find it
    assert crosslayer.load_result(clone) == crosslayer.load_result(small)


def test_the_card_tells_what_it_costs_and_how_it_came_about(small, report):
    card = (small / "README.md").read_text()
    assert 'from_pretrained("FOLDER")' in card and "OWNER/NAME" in card and "crosslayer.retrofit(" in card
    worst = report.domains[0]
    row = next(line for line in card.splitlines() if line.startswith(f"| {worst} (unseen) |"))
    perplexity = report.row("retrofit", "perplexity", worst)
    assert f"→ {perplexity.value:.2f}, {perplexity.change_text()} | " in row
    assert report.plan.diagram() in card
    data = ModelCard(card).data
    assert data.tags == ["crosslayer", "cla"] and data.base_model is None
    found = {result.dataset_name: result.metric_value for result in data.eval_results}
    assert found == {domain: round(report.row("retrofit", "perplexity", domain).value, 4) for domain in report.domains}


@pytest.mark.slow
def test_the_card_says_what_the_original_is_and_how_the_model_is_used(small, report):
    card = (small / "README.md").read_text()
    assert ModelCard(card).data.pipeline_tag == "text-generation"
    use = card.partition("## Use\n\n")[2].partition("\n## ")[0]
    assert "```sh\npip install .  #" in use and "\ncrosslayer serve FOLDER\n" in use
    python = use.partition("```python\n")[2].partition("```")[0]
    assert python.splitlines()[0].startswith("import crosslayer")
    assert 'AutoTokenizer.from_pretrained("FOLDER")' in python
    program = python.replace("FOLDER", str(small)).replace("Call me", "w5 w7")
    environment = {**os.environ, "PYTHONPATH": str(Path(crosslayer.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "AutoTokenizer" not in model_card(report, tokenizer=False)


def test_datasets_of_the_hub_get_evaluation_results(small, report):
    (entry,) = parse_eval_result_entries(yaml.safe_load((small / ".eval_results" / "crosslayer.yaml").read_text()))
    row = report.row("retrofit", "perplexity", "org/wiki/en/test")
    assert (entry.dataset_id, entry.task_id, entry.value) == ("org/wiki", "en", round(row.value, 4))
    assert f"perplexity of {row.change.n} windows of {LENGTH} tokens of the split test" in entry.notes
