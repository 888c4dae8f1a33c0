"""The config of a DeciLM ("nemotron-nas"): Llama's, with a description of each layer in `block_configs`."""

from typing import Any

from crosslayer.wiring.plain_config import PlainConfig, plain_config

DECILM = "nemotron-nas"
READ = ("no_op", "replace_with_linear", "n_heads_in_group")


def block_config(values: dict[str, Any]) -> PlainConfig:
    """Return the config of a DeciLM; a layer without attention, or with a linear map instead, stores nothing.

    Raises:
        ValueError: the blocks are not those of the layers, or say something else about their attention.

    """
    own = {name: value for name, value in values.items() if name not in ("block_configs", "num_key_value_heads")}
    llama = plain_config({**own, "model_type": "llama"})
    blocks = values.get("block_configs")
    if llama is None or not isinstance(blocks, list) or len(blocks) != llama.num_hidden_layers:
        raise ValueError(
            f"{DECILM}: the config must have Llama's fields, and block_configs with an entry for each layer"
        )
    heads, layers, layer_types = vars(llama)["num_attention_heads"], [], []
    for layer, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise ValueError(f"{DECILM}: layer {layer}: block_configs must describe its attention, got {attention}")
        beside = sorted(name for name, value in attention.items() if name not in READ and value not in (None, False))
        if beside:
            raise ValueError(f"{DECILM}: layer {layer}: attention with {', '.join(beside)} is not counted")
        attends = not attention.get("no_op") and not attention.get("replace_with_linear")
        group = attention.get("n_heads_in_group")
        if attends and (not isinstance(group, int) or group < 1 or heads % group):
            raise ValueError(f"{DECILM}: layer {layer}: n_heads_in_group must divide {heads} heads, got {group}")
        layer_types.append("full_attention" if attends else "mlp")
        layers.append(PlainConfig({**vars(llama), "num_key_value_heads": heads // group if attends else None}))
    shared = {**vars(llama), "model_type": DECILM, "layer_types": layer_types}
    return PlainConfig(shared, layers=layers)
