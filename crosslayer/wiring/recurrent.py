"""States of fixed size: what convolutions and linear attention keep of a text, however long it is.

A kind of layer is recognized by the fields of its config; the sizes are those of transformers' caches.
"""

from typing import Any

from crosslayer.wiring.values import field, int_field

SHORT_CONVOLUTION = "conv_L_cache"
GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")  # Mamba 2 has groups, Mamba has none
HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
HEAD_SIZE = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
STATE = ("mamba_d_state", "ssm_state_size", "state_size")
KERNEL = ("mamba_d_conv", "conv_kernel")
EXPAND = ("mamba_expand", "expand")


def fixed_states(config: Any, layer_type: str, layer: int) -> tuple[int, int, int]:
    """Return the elements of a layer that do not grow with the text, in the model's dtype and in float32, and a kernel.

    The kernel is the number of tokens that a convolution keeps, 0 without one.

    Raises:
        ValueError: the config has linear attention of an unknown kind.
    """

    def size(*names: str) -> int:
        return int_field(config, layer, *names)

    if layer_type == "conv":
        return size("hidden_size") * size(SHORT_CONVOLUTION), 0, size(SHORT_CONVOLUTION)
    if layer_type.startswith("hybrid") and field(config, "number_of_conv_states") is not None:  # Inkling
        prefix = "swa_" if layer_type == "hybrid_sliding" else ""
        state = size(f"{prefix}num_key_value_heads") * size(f"{prefix}head_dim")
        return 0, 2 * (state + size("hidden_size")) * size("conv_kernel_size"), 0
    if layer_type == "hybrid" and field(config, "cca_time0") is not None:  # Zaya
        key_heads = size("num_key_value_heads")
        channels = (size("num_attention_heads") + key_heads) * size("head_dim")
        kept = size("cca_time0") + size("cca_time1") - 2
        return channels * kept + key_heads * size("head_dim") // 2, 0, 0
    if layer_type not in ("linear_attention", "hybrid"):
        return 0, 0, 0
    if field(config, "linear_key_head_dim") is not None:  # gated delta net
        keys = size("linear_num_key_heads") * size("linear_key_head_dim")
        values = size("linear_num_value_heads") * size("linear_value_head_dim")
        state = values * size("linear_key_head_dim")
        kernel = size("linear_conv_kernel_dim")
        return (2 * keys + values) * kernel, state, kernel
    if field(config, "linear_head_dim") is not None:  # Kimi Linear
        width = size("linear_num_heads") * size("linear_head_dim")
        kernel = size("linear_conv_kernel_dim")
        return 3 * width * kernel, width * size("linear_head_dim"), kernel
    if field(config, *GROUPS) is not None:
        width, state = size(*HEADS) * size(*HEAD_SIZE), size(*STATE)
        return (width + 2 * size(*GROUPS) * state) * size(*KERNEL), width * state, size(*KERNEL)
    if field(config, *STATE) is not None:
        width = int(field(config, *EXPAND) * size("hidden_size"))
        return width * size(*KERNEL), width * size(*STATE), size(*KERNEL)
    if field(config, "linear_attn_alpha_factor") is not None:  # lightning attention
        heads = size("num_attention_heads")
        return heads * int_field(config, layer, "head_dim", default=size("hidden_size") // heads) ** 2, 0, 0
    raise ValueError(f"layer {layer} of {config.model_type} has linear attention whose state is of an unknown size")
