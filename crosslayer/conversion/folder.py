"""Write a retrofit as a model folder with its receipt, whole or not at all."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosslayer.conversion.job import Outcome
from crosslayer.conversion.page import cards, methods, model_card, panels, tables, words
from crosslayer.conversion.record import RetrofitRecord
from crosslayer.environment import quiet_transformers
from crosslayer.output.folder import whole_folder
from crosslayer.output.manifest import write_manifest
from crosslayer.output.page import page, save_page
from crosslayer.output.record import dumps

SHIM = """\"\"\"Lets `trust_remote_code=True` find the installed package: pip install crosslayer.\"\"\"

import crosslayer


class CrossLayerConfig(crosslayer.CrossLayerConfig):
    pass


class CrossLayerForCausalLM(crosslayer.CrossLayerForCausalLM):
    config_class = CrossLayerConfig
"""


def write_retrofit(
    outcome: Outcome, tokenizer: PreTrainedTokenizerBase, out: Path, *, force: bool = False, shim: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Write model, tokenizer, manifest, model card, record, page and figures; return the words and the headline.

    `shim` adds an `auto_map` to the config and the file it names, for tools that load by remote code.
    """
    record = RetrofitRecord.model_validate(json.loads(dumps(outcome.record)))
    name, command = record.settings["model"], record.settings["command"]
    settings, classes = record.settings, f"{record.model['class']} → {record.model['retrofit_class']}"
    measured = f"{settings['windows']} windows of {settings['length']} tokens, {settings['text']}"
    subtitle = f"{methods(record)} · {classes} · {measured}"
    drawn = panels(record)
    with whole_folder(out, force) as folder:
        with quiet_transformers():
            outcome.made.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        if shim:
            _add_shim(folder, record.model["retrofit_class"])
        title = f"Retrofit of {name}"
        text = page(title, subtitle, cards(record), words(record), drawn, tables(record))
        save_page(folder, text, outcome.record, drawn)
        (folder / "README.md").write_text(model_card(record, name, command), encoding="utf-8")
        write_manifest(folder, outcome.made.model)
    return words(record), headline(record)


def headline(record: RetrofitRecord) -> dict[str, Any]:
    """Return the figures of the last line."""
    worst = record.damage["domains"][0]
    borrows = [
        i
        for i in range(record.model["layers"])
        if any(record.plan[state][i] != i for state in ("queries", "keys", "values", "mlps"))
    ]
    return {
        "method": "+".join(entry["name"] for entry in record.methods),
        "layers": borrows,
        "kv_share": round(record.cache["share"], 6),
        "worst_domain": worst["name"],
        "seen": worst["seen"],
        "perplexity_before": round(worst["perplexity_before"], 4),
        "perplexity_after": round(worst["perplexity_after"], 4),
        "perplexity_ratio_ci95": [round(end, 4) for end in worst["ratio_ci95"]],
        "kl": round(worst["kl"], 5),
        "seconds": round(record.seconds["all"], 1),
    }


def _add_shim(folder: Path, cls: str) -> None:
    if cls != "CrossLayerForCausalLM":
        raise ValueError(f"--remote-code-shim is for models of crosslayer; this one is a stock {cls} and needs none")
    (folder / "modeling_shim.py").write_text(SHIM, encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {
        "AutoConfig": "modeling_shim.CrossLayerConfig",
        "AutoModelForCausalLM": "modeling_shim.CrossLayerForCausalLM",
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
