"""The config of a DeciLM: Llama's, with `block_configs`, a block for each layer, read by attribute."""

from typing import Any

from transformers import LlamaConfig


class Block(dict):
    """What a layer or a part of it is: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        """Return an entry."""
        if name not in self:
            raise AttributeError(name)
        return self[name]


class DeciLMConfig(LlamaConfig):
    """The config that vLLM's `DeciLMForCausalLM` reads."""

    model_type = "nemotron-nas"

    def __setattr__(self, name: str, value: Any) -> None:
        """Let blocks be read by attribute."""
        if name == "block_configs":
            value = [Block({part: Block(facts) for part, facts in block.items()}) for block in value]
        super().__setattr__(name, value)
