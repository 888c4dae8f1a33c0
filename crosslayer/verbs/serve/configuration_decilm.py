"""The config of a DeciLM: Llama's with `block_configs`, a block for each layer, accessed by attribute.

`export` copies this file into the folder of a model, where a vLLM without crosslayer runs it. So it imports nothing of
this package.
"""

from typing import Any

from transformers import LlamaConfig


class Block(dict):
    """The description of a layer, its attention or its MLP: a dict whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        """Return an entry."""
        if name not in self:
            raise AttributeError(name)
        return self[name]


class DeciLMConfig(LlamaConfig):
    """The config that vLLM's `DeciLMForCausalLM` reads."""

    model_type = "nemotron-nas"

    def __setattr__(self, key: str, value: Any) -> None:
        """Convert blocks so that their entries are attributes."""
        if key == "block_configs":
            value = [Block({sublayer: Block(facts) for sublayer, facts in block.items()}) for block in value]
        super().__setattr__(key, value)
