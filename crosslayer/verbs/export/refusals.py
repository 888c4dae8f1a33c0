"""Reasons why a model cannot be exported to a format, which name method and layers."""

from collections.abc import Callable

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.output.formatting import ranges
from crosslayer.verbs.export.layers import culprits, remaining_layers, rope, unlike_llama, unsupported
from crosslayer.verbs.export.stock import stock_config

ROPES = ("default", "linear", "llama3")  # rope types that are written to GGUF files


def no_stock_class(config: CrossLayerConfig) -> str | None:
    """Return why no stock class can hold a crosslayer model, None if one can."""
    reason = unsupported(config)
    if reason is not None:
        return reason
    partial = [layer.number for layer in remaining_layers(config) if not layer.whole]
    if partial:
        return (
            f"layers {ranges(partial)} lack attention or MLP ({culprits(config, partial)}), which every layer of a "
            "stock class has; a retrofit with part layer drops whole layers"
        )
    try:
        stock_config(config)
    except ValueError as error:
        return str(error)
    return None


def no_deci(config: CrossLayerConfig) -> str | None:
    """Return why a model cannot be exported as vLLM's DeciLM, None if it can."""
    reason = unsupported(config) or unlike_llama(config)
    if reason is not None:
        return reason
    if config.hidden_size % config.num_attention_heads:
        return (
            f"hidden_size ({config.hidden_size}) is not a multiple of num_attention_heads "
            f"({config.num_attention_heads})"
        )
    layers = remaining_layers(config)
    linear = [layer.number for layer in layers if layer.attention == "compensation"]
    if linear:
        return (
            f"layers {ranges(linear)} have linear compensation (W_c) instead of attention "
            f"({culprits(config, linear)}); a retrofit with compensation none has no W_c"
        )
    if layers[0].attention is None:
        first = layers[0].number
        return f"layer {first} has no attention ({culprits(config, [first])}), and the first layer of DeciLM must"
    return None


def no_gguf(config: CrossLayerConfig) -> str | None:
    """Return why a model cannot be exported for llama.cpp, None if it can."""
    reason = unsupported(config) or unlike_llama(config)
    if reason is not None:
        return reason
    rope_type = rope(config)["rope_type"]
    if rope_type not in ROPES:
        return f"rope_type is {rope_type!r}, and only {', '.join(ROPES)} are supported"
    layers, biased = remaining_layers(config), config.wiring.compensation_bias
    bare = [layer.number for layer in layers if not layer.mlp]
    if bare:
        return f"layers {ranges(bare)} have no MLP ({culprits(config, bare)})"
    with_bias = [layer.number for layer in layers if layer.attention == "compensation" and biased[layer.number]]
    if with_bias:
        return (
            f"the linear compensation (W_c) of layers {ranges(with_bias)} has a bias ({culprits(config, with_bias)}); "
            "a retrofit without bias has none"
        )
    if layers[0].attention is None:
        first = layers[0].number
        return f"layer {first} has no attention ({culprits(config, [first])}), and the first layer must have heads"
    return None


REFUSALS: dict[str, Callable[[CrossLayerConfig], str | None]] = {"hf": no_stock_class, "deci": no_deci, "gguf": no_gguf}


def check_form(config: CrossLayerConfig, to: str) -> None:
    """Refuse a format to which a model cannot be exported; the message names the possible formats."""
    reason = REFUSALS[to](config)
    if reason is not None:
        others = [name for name, refusal in REFUSALS.items() if refusal(config) is None]
        advice = f"use `to` {' or '.join(others)}" if others else "no other format can hold it; run it with crosslayer"
        raise ValueError(f"cannot export to {to}: {reason}; {advice}")
