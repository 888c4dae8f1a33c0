"""A folder of models, texts and lists of interventions that are broken in one way each, beside sound ones."""

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, AlbertModel, T5Config, T5ForConditionalGeneration, ViTConfig, ViTModel

from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny


def models(folder: Path) -> None:
    """Write sound and broken model folders."""
    _save(folder / "model", "llama", num_hidden_layers=8)
    _save(folder / "gpt2", "gpt2")
    _save(folder / "bert", "bert")
    _save(folder / "bloom", "bloom", n_head=4, n_layer=3)
    _save(folder / "small_vocabulary", "llama", vocab_size=64)
    for name, cls, config in (
        ("vit", ViTModel, ViTConfig(image_size=32, num_hidden_layers=2, hidden_size=32, num_attention_heads=4)),
        ("albert", AlbertModel, AlbertConfig(vocab_size=len(WORDS), hidden_size=32, embedding_size=16)),
        ("t5", T5ForConditionalGeneration, T5Config(vocab_size=len(WORDS), d_model=32, num_layers=1)),
    ):
        small = {"intermediate_size": 32, "d_ff": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
        config.update({key: value for key, value in small.items() if key in config.to_dict()})
        cls(config).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    for name in (
        *("no_config", "no_weights", "pickled", "nan", "missing", "misshapen", "truncated", "zeros", "no_tokenizer"),
        *("broken_tokenizer", "config_no_json", "config_list", "config_empty", "unknown_type", "bad_size", "no_type"),
        *("unknown_method", "own_method", "wrong_option"),
    ):
        shutil.copytree(folder / "bloom" if name == "" else folder / "model", folder / name)
    (folder / "empty").mkdir()
    (folder / "no_config" / "config.json").unlink()
    (folder / "no_weights" / "model.safetensors").unlink()
    torch.save({}, folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    _weights(folder / "nan", lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    _weights(folder / "missing", lambda weights: weights.pop("model.norm.weight"))
    _weights(folder / "misshapen", lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    data = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "truncated" / "model.safetensors").write_bytes(data[: len(data) // 2])
    (folder / "zeros" / "model.safetensors").write_bytes(b"\0" * 100)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "no_tokenizer" / file).unlink()
    (folder / "broken_tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "config_no_json" / "config.json").write_text("{'model_type': llama}")
    (folder / "config_list" / "config.json").write_text("[1, 2]")
    (folder / "config_empty" / "config.json").write_text("")
    _config(folder / "unknown_type", model_type="perceptron")
    _config(folder / "bad_size", hidden_size="abc")
    _config(folder / "no_type", model_type=None)
    ours = {"model_type": "crosslayer", "architectures": ["CrossLayerForCausalLM"]}
    _config(folder / "unknown_method", **ours, cross_layer="telepathy")
    _config(folder / "own_method", **ours, cross_layer="my_methods.best")
    _config(folder / "wrong_option", **ours, cross_layer={"name": "cla", "groop": 2})


def texts(folder: Path) -> None:
    """Write sound and broken texts."""
    draw = random.Random(0)
    documents = [" ".join(f"w{draw.randrange(500)}" for _ in range(900)) for _ in range(4)]
    (folder / "text.txt").write_text("\n<|doc|>\n".join(documents))
    (folder / "short.txt").write_text("w1 w2 w3")
    (folder / "empty.txt").write_bytes(b" \n")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\0")
    (folder / "text.pdf").write_bytes(b"%PDF")
    (folder / "a.jsonl").write_text('{"body": "w1"}\n')
    (folder / "broken.jsonl").write_text('{"text": "w1"}\n{"text": \n')
    (folder / "digits.jsonl").write_text('{"text": ' + "9" * 5000 + "}\n")
    (folder / "nulls.jsonl").write_text('{"text": null}\n')
    (folder / "surrogate.jsonl").write_text('{"text": "\\ud800"}\n')
    (folder / "broken.parquet").write_bytes(b"PAR1")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": documents * 20, "number": list(range(80))})
    pyarrow.parquet.write_table(table, folder / "table.parquet", compression="snappy")
    data = bytearray((folder / "table.parquet").read_bytes())
    data[200:2000] = bytes(1800)
    (folder / "page.parquet").write_bytes(data)


def _save(folder: Path, family: str, **changes) -> None:
    tiny(family, dtype=torch.float32, **{"vocab_size": len(WORDS), **changes}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
