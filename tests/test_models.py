"""Loading by name, and what is refused."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import crosslayer
from crosslayer.models import resolve_dtype
from tests.tiny import tiny


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama saved with the tokenizer of the embedded model."""
    _, tokenizer = crosslayer.load_model("minilm")
    model = tiny("llama", dtype=torch.float32, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_embedded_models_load_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = crosslayer.load_model("smollm2")
    started = time.perf_counter()
    model, tokenizer = crosslayer.load_model("smollm2")
    assert time.perf_counter() - started < 2  # 0.3 s when quiet; the promise is 2
    assert model.config.num_hidden_layers == 30 and model.dtype == torch.float32 and not model.training
    assert tokenizer.decode(tokenizer("Hello world").input_ids) == "Hello world"
    encoder, _ = crosslayer.load_model("minilm")
    assert type(encoder).__name__ == "BertModel"


def test_a_local_folder(folder):
    model, _ = crosslayer.load_model(str(folder), dtype="bfloat16", device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.bfloat16


def test_unknown_models_are_one_line(tmp_path, folder):
    cases = {
        str(tmp_path / "missing"): "does not exist",
        str(folder / "config.json"): "is a file",
        str(tmp_path): "no config.json",
        "nobody/nothing-at-all": "not on the Hugging Face hub, or the hub cannot be reached",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            crosslayer.load_model(name)
        assert "\n" not in str(error.value)


def test_weights_must_be_safetensors(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        crosslayer.load_model(str(folder))
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only pickled weights"):
        crosslayer.load_model(str(folder))


def test_nan_in_the_weights_is_named(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 weights hold NaN or infinity, the first is model.layers.1.mlp.up_proj.weight"
    ):
        crosslayer.load_model(str(folder))


def test_missing_weights_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing .* model.layers.1.mlp.up_proj.weight"):
        crosslayer.load_model(str(folder))


def test_a_bad_config_is_one_line(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "abc"}))
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        crosslayer.load_model(str(folder))
    assert "\n" not in str(error.value)


def test_damaged_weights_are_one_line(folder):
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        crosslayer.load_model(str(folder))
    assert "\n" not in str(error.value)


def test_dtypes():
    assert resolve_dtype(None, torch.device("cpu")) == torch.float32
    assert resolve_dtype(None, torch.device("cuda")) == "auto"
    with pytest.raises(ValueError, match="float32, float64, bfloat16, float16"):
        resolve_dtype("int4", torch.device("cpu"))
