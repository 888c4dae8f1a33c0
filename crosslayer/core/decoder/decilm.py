"""The config of a DeciLM (vLLM's model type "nemotron-nas"), as `crosslayer export --to deci` writes it, read as ours.

A DeciLM is a Llama some of whose layers lack attention or MLP; its weights have our names. transformers has no class
for it, and the class in its folder is code, which never runs.
"""

from collections.abc import Mapping
from typing import Any

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import SHARED
from crosslayer.core.methods import dropping, to_entry

MODEL_TYPE = "nemotron-nas"


def config_of(values: Mapping[str, Any]) -> CrossLayerConfig:
    """Return our config of a DeciLM's config.json.

    Raises:
        ValueError: its layers have linear maps instead of sublayers, or differ in heads or in the size of MLPs.
    """
    blocks = values.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != values.get("num_hidden_layers"):
        raise ValueError("a DeciLM's config must have block_configs with an entry for each layer")
    missing: dict[str, list[int]] = {"attention": [], "ffn": []}
    for layer, block in enumerate(blocks):
        for sublayer, absent in missing.items():
            facts = block[sublayer]
            if facts.get("no_op"):
                absent.append(layer)
            elif facts.get("replace_with_linear"):
                raise ValueError(f"layer {layer} has a linear map instead of its {sublayer}, which cannot be loaded")
    group, width = values["num_attention_heads"] // values["num_key_value_heads"], values["intermediate_size"]
    for layer, block in enumerate(blocks):
        # a sublayer that is missing has no sizes
        heads_in_group = block["attention"].get("n_heads_in_group") or group
        if (heads_in_group, block["ffn"].get("intermediate_size") or width) != (group, width):
            raise ValueError(f"layer {layer} has other heads or another MLP than the model, which cannot be loaded")
    methods = dropping(missing["attention"], missing["ffn"])
    shared = {name: values[name] for name in SHARED if name in values}
    # the name `attention_bias` is there that of W_o's bias alone
    biases = {"attention_bias": values["qkv_bias"], "attention_output_bias": values["attention_bias"]}
    rest: dict[str, Any] = {"mlp_bias": values["mlp_bias"], "dtype": values.get("dtype")}
    return CrossLayerConfig(
        **(shared | biases | rest),
        cross_layer=[to_entry(method) for method in methods],
        architectures=["CrossLayerForCausalLM"],
    )
