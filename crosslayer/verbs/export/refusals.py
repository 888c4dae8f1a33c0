"""Why a model has no form in which another program would open it, in words that name method and layers."""

from collections.abc import Callable

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.output.formatting import ranges
from crosslayer.verbs.export.layers import culprits, left, rope, strange, unlike_llama
from crosslayer.verbs.export.stock import stock_config

ROPES = ("default", "linear", "llama3")  # that a GGUF file is written for


def no_stock_class(config: CrossLayerConfig) -> str | None:
    """Return why no stock class can hold a model of ours, None if one can."""
    odd = strange(config)
    if odd is not None:
        return odd
    partial = [layer.number for layer in left(config) if not layer.whole]
    if partial:
        return (
            f"layers {ranges(partial)} lack a part ({culprits(config, partial)}), and stock layers are whole, as a "
            "retrofit with part layer leaves them"
        )
    try:
        stock_config(config)
    except ValueError as error:
        return str(error)
    return None


def no_deci(config: CrossLayerConfig) -> str | None:
    """Return why a model has no form as DeciLM in vLLM, None if it has."""
    odd = strange(config) or unlike_llama(config)
    if odd is not None:
        return odd
    if config.hidden_size % config.num_attention_heads:
        return f"hidden_size is {config.hidden_size}, no multiple of num_attention_heads ({config.num_attention_heads})"
    layers = left(config)
    linear = [layer.number for layer in layers if layer.attention == "compensation"]
    if linear:
        return (
            f"layers {ranges(linear)} have W_c in the place of attention ({culprits(config, linear)}), which a "
            "retrofit with compensation none leaves out"
        )
    if layers[0].attention is None:
        first = layers[0].number
        return f"layer {first} has no attention ({culprits(config, [first])}), and the first layer of DeciLM must"
    return None


def no_gguf(config: CrossLayerConfig) -> str | None:
    """Return why llama.cpp has no form for a model, None if it has."""
    odd = strange(config) or unlike_llama(config)
    if odd is not None:
        return odd
    kind = rope(config)["rope_type"]
    if kind not in ROPES:
        return f"rope_type is {kind!r}; {', '.join(ROPES)} are written"
    layers, biased = left(config), config.wiring.compensation_bias
    bare = [layer.number for layer in layers if not layer.mlp]
    if bare:
        return f"layers {ranges(bare)} have no MLP ({culprits(config, bare)})"
    with_bias = [layer.number for layer in layers if layer.attention == "compensation" and biased[layer.number]]
    if with_bias:
        return (
            f"W_c of layers {ranges(with_bias)} has a bias ({culprits(config, with_bias)}), which a retrofit without "
            "bias leaves out"
        )
    if layers[0].attention is None:
        first = layers[0].number
        return f"layer {first} has no attention ({culprits(config, [first])}), and the first layer must have heads"
    return None


REFUSALS: dict[str, Callable[[CrossLayerConfig], str | None]] = {
    "hf": no_stock_class,
    "deci": no_deci,
    "gguf": no_gguf,
}


def check_form(config: CrossLayerConfig, to: str) -> None:
    """Refuse a form that a model does not have, by a message that names those that it has."""
    reason = REFUSALS[to](config)
    if reason is not None:
        others = [name for name, refusal in REFUSALS.items() if refusal(config) is None]
        advice = f"`to` {' or '.join(others)} can" if others else "no other form can; crosslayer itself runs it"
        raise ValueError(f"{to} cannot hold it: {reason}; {advice}")
