"""A tiny original, retrofits of it, and the recipe by which they recover."""

import json

import torch
import yaml

import crosslayer
from crosslayer.corpus.domains import embedded_domains
from crosslayer.training.tokenizers import make_tokenizer
from tests.helpers.tiny import tiny

RECIPE = {
    "data": {"length": 32, "domains": [{"name": "web"}, {"name": "speeches", "weight": 2}]},
    "train": {"per_device_train_batch_size": 4, "use_cpu": True, "save_steps": 2, "weight_decay": 0},
    "stages": [
        {
            "parameters": "compensation",
            "schedule": {"steps": 4, "minimum": 0},
            "train": {"learning_rate": 1e-2},
            "stop": {"smoothing": 0.5, "patience": 50},
        },
        {"parameters": "all", "schedule": {"steps": 5, "warmup": 1, "minimum": 0}, "train": {"learning_rate": 1e-3}},
    ],
    "judge": {"domains": ["web", "code"], "windows": 32, "length": 24, "held_out": 2},
}
RETROFITS = {
    "fitted": {"method": "uniattn", "layers": "2-3", "compensation": "lstsq", "calibration": 32},
    "zero": {"method": "uniattn", "layers": "2-3", "compensation": "zero"},
    "without": {"method": "cla", "layers": "2-3", "compensation": "none"},
    "shorter": {"method": "drop", "layers": "2", "part": "layer", "compensation": "none"},
}


def original_in(folder, seed_shift=0.0, name="original", **sizes):
    """Save a tiny Llama of bytes, and return its folder."""
    model = tiny("llama", vocab_size=258, num_hidden_layers=4, dtype=torch.float32, **sizes)
    for parameter in model.parameters():
        parameter.data += seed_shift
    model.save_pretrained(folder / name)
    make_tokenizer("bytes", list).save_pretrained(folder / name)
    return folder / name


def retrofit_in(folder, original, name):
    """Save a retrofit of `RETROFITS`, judged and fitted on code."""
    text = {"code": list(embedded_domains(["code"])["code"])}
    report = crosslayer.retrofit(original, text, windows=16, length=24, **RETROFITS[name])
    report.save(folder / name)
    return folder / name


def recipe_in(folder, **changes):
    """Save the recipe with other parts."""
    path = folder / "little.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **changes}))
    return path


def healed(base, names, folder, recipe=None, **options):
    """Heal retrofits of the original in `base`, by default by the recipe above, into `out` in a folder."""
    retrofits = [base / name for name in names.split()]
    recipe = recipe_in(folder) if recipe is None else recipe
    return crosslayer.heal(retrofits, recipe, folder / "out", original=str(base / "original"), **options)


def instructions_in(folder, count=60):
    """Save a table of instructions."""
    rows = [{"instruction": f"Say {k}.", "response": f"{k}" * (1 + k % 4)} for k in range(count)]
    path = folder / "instructions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
