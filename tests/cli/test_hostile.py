"""A downloaded model folder that holds Python files: none of them ever runs, however the folder is opened."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from crosslayer import CrossLayerConfig, CrossLayerForCausalLM, _path
from crosslayer.core import methods
from tests.cli.test_bad_input import type_in
from tests.helpers.daily import daily
from tests.helpers.text import WORDS, tokenizer

ROOT = Path(__file__).parent.parent.parent
NAMES = ("torch", "yaml", "numpy", "transformers", "typer", "json", "typing", "signal", "pathlib", "sitecustomize")
VERBS = {
    "diagnose": "diagnose . --sequences 2 --length 16 --out {out}",
    "intervene": "intervene . --waiver 5 --sequences 2 --length 16 --out {out}",
    "retrofit": "retrofit . --method cla --out {out}",
    "bench": "bench . --baseline . --contexts 8 --out {out}",
    "verify": "verify .",
    "generate": "generate . w1",
    "export": "export . --to gguf --out {out}",
}


def trap(mark):
    """Return a module that leaves a mark when it is imported, and looks like a method."""
    return (
        f"from pathlib import Path\nPath({str(mark)!r}).write_text(__name__)\n"
        "from dataclasses import dataclass\nfrom crosslayer.core.method import Method\n"
        "@dataclass(frozen=True)\nclass Hostile(Method):\n    pass\n"
    )


@pytest.fixture(scope="module", params=["hostile.method", "hostile_method", {"name": "hostile.method"}], ids=str)
def folder(request, tmp_path_factory):
    """A sound model of ours whose config names a method that lies beside it, with modules of well-known names."""
    place = tmp_path_factory.mktemp("downloads") / "model"
    torch.manual_seed(0)
    config = CrossLayerConfig(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=3)
    config.update({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64})
    CrossLayerForCausalLM(config).save_pretrained(place)
    tokenizer().save_pretrained(place)
    changed = json.loads((place / "config.json").read_text()) | {"cross_layer": request.param}
    (place / "config.json").write_text(json.dumps(changed))
    (place / "hostile").mkdir()
    for name in ("hostile/__init__", "hostile/method", "hostile_method", *NAMES):
        (place / f"{name}.py").write_text(trap(place.parent / "ran"))
    return place


def ran(folder):
    return (folder.parent / "ran").exists() or any(name.startswith("hostile") for name in sys.modules)


@pytest.mark.parametrize("auto", [AutoConfig, AutoModel, AutoModelForCausalLM], ids=lambda cls: cls.__name__)
def test_auto_classes_run_nothing(monkeypatch, folder, auto):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as where Python is run in the folder: even then it is not imported
    for place in (".", str(folder)):
        with pytest.raises(ValueError, match="hostile"):
            auto.from_pretrained(place)
    assert not ran(folder)


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_run_nothing(monkeypatch, tmp_path, capsys, folder, verb):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    status = type_in(monkeypatch, VERBS[verb].format(out=tmp_path / "out").split())
    output = capsys.readouterr()
    assert status == (1 if verb == "verify" else 2) and "hostile" in output.out + output.err
    assert "Traceback" not in output.err and not ran(folder) and not list(tmp_path.iterdir())


def test_code_that_a_config_maps_to_is_not_run(monkeypatch, tmp_path, capsys, folder):
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    config = {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile_method.Hostile"}}
    (place / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(place)
    assert type_in(monkeypatch, ["generate", ".", "w1"]) == 2
    assert "never run" in capsys.readouterr().err and not ran(folder)


def test_a_method_that_is_allowed_is_imported(monkeypatch, folder):
    """The trap works: allowed by name, and with its folder on the path, it runs."""
    monkeypatch.setattr(methods, "_allowed", set())
    monkeypatch.syspath_prepend(str(folder))
    name = "hostile" if (folder / "config.json").read_text().count("hostile.") else "hostile_method"
    try:
        words = ["generate", str(folder), "w1", "--max-new-tokens", "2", "--allow-methods", name]
        assert type_in(monkeypatch, words) == 0 and ran(folder)
    finally:
        (folder.parent / "ran").unlink()
        for module in [module for module in sys.modules if module.startswith("hostile")]:
            del sys.modules[module]


def in_a_process(folder, tmp_path, verb, words):
    """Run a verb in the folder in a process of its own; return what it printed on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*words, *VERBS[verb].format(out=tmp_path / "out").split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode in (1, 2) and "hostile" in done.stdout + done.stderr, done.stderr[-1000:]
    assert not ran(folder) and "Traceback" not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "is_command"),
    [
        (["python", "-m", "crosslayer", "verify", "."], True),
        (["python", "-um", "crosslayer"], True),
        (["python", "-W", "error", "-Bsm", "crosslayer"], True),
        (["python", "-mcrosslayer", "--version"], True),
        (["python", "-X", "importtime", "-m", "crosslayer.cli"], False),
        (["python", "-m", "pytest", "-m", "crosslayer"], False),
        (["python", "script.py"], False),
    ],
)
def test_the_module_that_python_runs_is_known_however_it_is_written(monkeypatch, words, is_command):
    monkeypatch.setattr(sys, "argv", ["-m"])  # as it is while Python searches the module
    monkeypatch.setattr(sys, "orig_argv", words)
    assert _path._is_command() == is_command


SCRIPT, MODULE = [str(Path(sys.executable).with_name("crosslayer"))], [sys.executable, "-m", "crosslayer"]


@pytest.mark.parametrize("folder", ["hostile.method"], indirect=True)
@pytest.mark.parametrize(
    "words", daily([SCRIPT, [sys.executable, "-um", "crosslayer"]], SCRIPT), ids=["script", "module"]
)
def test_a_process_in_the_folder_runs_nothing(folder, tmp_path, words):
    in_a_process(folder, tmp_path, "generate", words)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["hostile.method", "hostile_method"], indirect=True)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("words", [SCRIPT, MODULE], ids=["script", "module"])
def test_no_verb_runs_anything(folder, tmp_path, words, verb):
    in_a_process(folder, tmp_path, verb, words)
