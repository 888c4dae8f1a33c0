"""A push is a single commit of all that the manifest lists, with a card that names the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants, parse_eval_result_entries

import crosslayer
from crosslayer.output.manifest import check_files
from crosslayer.output.manifest import file_digest as digest
from crosslayer.verbs.push.texts import _card, eval_entries
from tests.cli.test_cli import run
from tests.helpers.hub import TOKEN, running_hub
from tests.helpers.saved import edit_manifest
from tests.helpers.text import tokenizer
from tests.helpers.tiny import VOCABULARY, tiny
from tests.verbs.export.models import ours, words

LENGTH = 16


def ids(seed):
    return torch.randint(3, VOCABULARY, (80, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def report():
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=6)
    texts = {"notes": ids(0), "org/wiki/en/test": ids(1)}
    options = {"calibration_text": {"docs": ids(2)}, "calibration": 16, "windows": 32, "length": LENGTH}
    return crosslayer.retrofit(model, texts, tokenizer(), method="cla", layers="2-3,4-5", **options)


@pytest.fixture
def small(report, tmp_path):
    """The folder of a retrofit."""
    report.save(tmp_path / "small")
    return tmp_path / "small"


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_the_repository_holds_the_folder(hub, small, tmp_path):
    pushed = crosslayer.push(small, "me/tiny-cla")
    assert pushed.repo == "me/tiny-cla" and pushed.url == f"{hub.address}/me/tiny-cla"
    files = hub.repos["me/tiny-cla"]
    assert {name: len(content) for name, content in files.items()} == pushed.files
    for name in ("model.safetensors", "config.json", "tokenizer.json", "record.json", "report.html"):
        assert files[name] == (small / name).read_bytes(), name
    unknown = {path for _, path, token in hub.asked if token != f"Bearer {TOKEN}"}
    assert unknown <= {"/api/agent-harnesses"}  # which the client asks for by itself
    assert sum(path.endswith("/commit/main") for _, path, _ in hub.asked) == 1
    clone = tmp_path / "clone"
    for name, content in {**files, ".gitattributes": b"*.safetensors filter=lfs"}.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(content)
    assert check_files(clone) == []  # as `crosslayer verify` would find it
    assert crosslayer.load_result(clone) == crosslayer.load_result(small)


def test_the_card_tells_what_it_costs_and_how_it_came_about(hub, small, report):
    card = crosslayer.push(small, "me/tiny-cla").card
    assert hub.repos["me/tiny-cla"]["README.md"].decode() == card
    assert 'from_pretrained("me/tiny-cla")' in card and "FOLDER" not in card and "crosslayer.retrofit(" in card
    worst = report.damage.domains[0]
    row = next(line for line in card.splitlines() if line.startswith(f"| {worst.name} | no |"))
    assert f"{worst.perplexity_after:.2f} | {worst.ratio.text()} | " in row
    assert report.plan.diagram() in card
    data = ModelCard(card).data
    assert data.tags == ["crosslayer", "cla"] and data.base_model is None
    found = {result.dataset_name: result.metric_value for result in data.eval_results}
    assert found == {domain.name: round(domain.perplexity_after, 4) for domain in report.damage.domains}


@pytest.mark.slow
def test_the_card_says_what_the_original_is_and_how_the_model_is_used(hub, small, report):
    card = crosslayer.push(small, "me/tiny-cla").card
    assert ModelCard(card).data.pipeline_tag == "text-generation"
    use = card.partition("## Use\n\n")[2].partition("\n## ")[0]
    assert use.startswith("```sh\npip install .  #") and "\ncrosslayer serve me/tiny-cla\n" in use
    python = use.partition("```python\n")[2].partition("```")[0]
    assert python.splitlines()[0].startswith("import crosslayer")
    assert 'AutoTokenizer.from_pretrained("me/tiny-cla")' in python
    program = python.replace("me/tiny-cla", str(small)).replace("Call me", "w5 w7")
    environment = {**os.environ, "PYTHONPATH": str(Path(crosslayer.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    (small / "tokenizer.json").unlink()
    assert "AutoTokenizer" not in _card(small, "me/tiny-cla", report, digest(small / "README.md"))


def test_datasets_of_the_hub_get_evaluation_results(hub, small, report):
    crosslayer.push(small, "me/tiny-cla")
    text = hub.repos["me/tiny-cla"][".eval_results/crosslayer.yaml"].decode()
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    domain = next(domain for domain in report.damage.domains if domain.name == "org/wiki/en/test")
    assert (entry.dataset_id, entry.task_id, entry.value) == ("org/wiki", "en", round(domain.perplexity_after, 4))
    assert f"perplexity of {domain.kl.n} windows of {LENGTH} tokens of the split test" in entry.notes
    assert eval_entries(report) == [entry]


def test_a_dry_run_asks_nobody(hub, small, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    before = sorted(small.rglob("*"))
    assert run(monkeypatch, "push", small, "me/tiny-cla", "--dry-run") == 0
    *card, line = capsys.readouterr().out.strip().splitlines()
    assert card[0] == "---" and "# " in "\n".join(card) and 'from_pretrained("me/tiny-cla")' in "\n".join(card)
    headline = json.loads(line)
    assert headline["repo"] == "me/tiny-cla" and headline["url"] is None and headline["files"] > 8
    assert not hub.asked and sorted(small.rglob("*")) == before


def test_a_card_that_was_edited_goes_up_as_it_is(hub, small):
    (small / "README.md").write_text("---\nlicense: mit\n---\n\nMine.\n")
    assert crosslayer.push(small, "tiny-cla").card == "---\nlicense: mit\n---\n\nMine.\n"
    assert hub.repos["me/tiny-cla"]["README.md"].endswith(b"Mine.\n")  # of the user who the token belongs to


def test_an_export_goes_up_with_its_own_card(hub, tmp_path):
    crosslayer.export(ours("without attention"), tmp_path / "out", words(), to="gguf")
    card = crosslayer.push(tmp_path / "out", "me/tiny-gguf").card
    assert "llama-cli -m me/tiny-gguf/model.gguf" in card and "## What it costs" not in card
    assert set(hub.repos["me/tiny-gguf"]) == {"README.md", "manifest.json", "model.gguf"}


def test_private_is_private_or_refused(hub, small):
    crosslayer.push(small, "me/hidden", private=True)
    assert hub.private["me/hidden"] is True
    crosslayer.push(small, "me/open")
    files = dict(hub.repos["me/open"])
    with pytest.raises(ValueError, match="'me/open'"):
        crosslayer.push(small, "me/open", private=True)
    assert hub.repos["me/open"] == files


def test_what_cannot_be_pushed_is_one_line(hub, small, monkeypatch, capsys):
    def refused(repo="me/tiny-cla"):
        assert run(monkeypatch, "push", small, repo) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    answer = refused("others/tiny-cla")
    assert answer.startswith("crosslayer: error: the Hugging Face hub rejected 'others/tiny-cla': 403, You don't have")
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    assert "'me/tiny-cla': 401, Invalid" in refused()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(small / "no_token"))
    assert "HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (small / "notes.txt").write_text("private")
    assert "notes.txt" in refused()
    (small / "notes.txt").unlink()
    (small / "config.json").write_text((small / "config.json").read_text() + " ")
    assert "config.json" in refused()
    assert not hub.repos.get("me/tiny-cla")


def test_a_hub_that_is_away_is_one_line(small, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run(monkeypatch, "push", small, "me/tiny-cla") == 2
    assert "Hugging Face" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_command_takes_the_server_from_the_environment(small):
    with running_hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        root = str(Path(crosslayer.__file__).parents[1])
        words = [sys.executable, "-m", "crosslayer", "push", str(small), "me/tiny-cla", "--private"]
        done = subprocess.run(words, capture_output=True, text=True, env={**environment, "PYTHONPATH": root})
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0] == f"uploaded: {hub.address}/me/tiny-cla"
        assert "model.safetensors" in hub.repos["me/tiny-cla"] and hub.private["me/tiny-cla"] is True


def test_a_healed_models_folder_keeps_its_note(hub, small, report):
    """Its report lies there under another name, and its card says that the figures are older than the training."""
    (small / "record.json").rename(small / "retrofit.json")
    card = (small / "README.md").read_text()
    (small / "README.md").write_text(card.replace("\n\n# ", "\n\n> trained since.\n\n# ", 1))

    def change(manifest):
        manifest["files"]["retrofit.json"] = manifest["files"].pop("record.json")
        return ["README.md"]

    edit_manifest(small, change)
    card = crosslayer.push(small, "me/healed").card
    assert "> trained since." in card and 'from_pretrained("me/healed")' in card
