"""Remote code that lets tools which load a model with `trust_remote_code=True` find the installed package."""

import json
from pathlib import Path

SHIM_FILE = "modeling_shim.py"
SHIM = '''"""Lets `trust_remote_code=True` find crosslayer, which must be installed."""

import crosslayer


class CrossLayerConfig(crosslayer.CrossLayerConfig):
    pass


class CrossLayerForCausalLM(crosslayer.CrossLayerForCausalLM):
    config_class = CrossLayerConfig
'''
AUTO_MAP = {
    "AutoConfig": "modeling_shim.CrossLayerConfig",
    "AutoModelForCausalLM": "modeling_shim.CrossLayerForCausalLM",
}


def write_shim(folder: Path) -> None:
    """Add the remote code to the folder of a saved model, and to its config where to find it."""
    (folder / SHIM_FILE).write_text(SHIM, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = AUTO_MAP
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
