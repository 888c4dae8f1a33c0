"""Tiny models of ours with a method each, a tokenizer for them, and folders that hold both with a manifest."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from crosslayer.output import manifest
from crosslayer.testing.tiny import build, config_of
from tests.helpers.tiny import VOCABULARY

METHODS = {
    "uniattn": {"name": "uniattn", "superblocks": [[1, 2], [3, 4, 5]]},
    "cla": {"name": "cla", "group": 3, "start": 1, "end": 5},
    "svformer": {"name": "svformer", "anchors": [0, 3]},
    "drop": {"name": "drop", "attention": [2], "mlp": [1], "layers": [4]},
}


def ours(method):
    """Return a model of 6 layers in float32."""
    return build(config_of([METHODS[method]])).float()


def tokenizer():
    """Return a tokenizer whose ids are those of the tiny models."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "the": 3, "whale": 4} | {f"w{i}": i for i in range(5, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save(model, folder):
    """Write a model, its tokenizer, a page, a figure and the manifest of all that; return the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("a model")
    (folder / "figures").mkdir()
    (folder / "figures" / "loss.svg").write_text("<svg/>")
    manifest.write_manifest(folder, model)
    return folder


def edit_manifest(folder, change):
    """Change the manifest in place, and make the hashes right again where `change` returns names."""
    path = folder / "manifest.json"
    record = json.loads(path.read_text())
    for name in change(record) or ():
        record["files"][name] = manifest.file_digest(folder / name)
    path.write_text(json.dumps(record))
