"""What a layer's cache holds: states that grow with the text, and states of fixed size, which a config's fields give.

Convolutions and linear attention keep states of fixed size. A kind of layer is recognized by the fields of its config;
the sizes are those of transformers' caches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from crosslayer.wiring import kv_bits
from crosslayer.wiring.classes import reads

FLOAT32 = 4  # bytes per element
# names of fields, of which the first that is set counts
SHORT_CONVOLUTION = "conv_L_cache"
# Mamba 2 has groups, Mamba has none: this field tells the two kinds of state apart.
GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
HEAD_SIZE = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
STATE = ("mamba_d_state", "ssm_state_size", "state_size")
KERNEL = ("mamba_d_conv", "conv_kernel")
EXPAND = ("mamba_expand", "expand")


class ItemSizes(NamedTuple):
    """Bytes per element: of the model's dtype, and of keys and values, which may be quantized.

    `kind` is the type of a quantized cache of this package, whose bytes are not a number per element, else None.
    """

    model: float
    kv: float
    kind: str | None = None


@dataclass(frozen=True)
class LayerStates:
    """What a layer's attention reads and what its cache holds, in elements of one sequence.

    Attributes:
        mask: a short description of the mask.
        keys: elements of a token's keys, or of the latent for keys and values; 0 without attention.
        values: elements of a token's values, or of the state cached with the latent; 0 if the keys are the values.
        heads: key-value heads; 0 for a latent.
        index: elements of a token that an indexer caches.
        index_float32: whether the indexer caches float32, whatever the dtype of the model.
        window: tokens that a query can attend to, including its own; None: all.
        every: tokens per compressed entry, besides the window; None: no compressed entries.
        overlap: whether neighboring compressed entries overlap, so that they are made from twice the elements.
        selected: tokens, or compressed entries, that a query selects of those it can attend to; None: all.
        prompt: tokens that the model itself adds before a sequence.
        fixed: elements that do not grow with the text (states of convolutions), in the dtype of the model.
        fixed_float32: the same in float32 (states of linear attention).
        kernel: tokens that a convolution among them keeps, 0 without one.
        passes: how often a token goes through the layer, each time with a cache of its own.
    """

    mask: str
    keys: int = 0
    values: int = 0
    heads: int = 0
    index: int = 0
    index_float32: bool = False
    window: int | None = None
    every: int | None = None
    overlap: bool = False
    selected: int | None = None
    prompt: int = 0
    fixed: int = 0
    fixed_float32: int = 0
    kernel: int = 0
    passes: int = 1

    def entries(self, length: int) -> int:
        """Return the number of compressed entries of a sequence."""
        return 0 if self.every is None else length // self.every

    def stored_bytes(self, length: int, sizes: ItemSizes, stored: tuple[str, ...]) -> float:
        """Return the bytes that grow with the text; `stored` names which of its keys and values the layer stores."""
        # transformers' windowed cache holds one token less than the window: the query brings its own.
        tokens = length + self.prompt if self.window is None else min(length, self.window - 1)
        elements = [vars(self)[state] for state in stored]
        if sizes.kind is None:
            size = (tokens + self.entries(length)) * sum(elements) * sizes.kv
            return self.passes * (size + self._indexed_bytes(length, sizes))

        # A quantized cache leaves windows as they are.
        if self.window is not None:
            return tokens * sum(elements) * sizes.model
        heads = self.heads
        return sum(heads * kv_bits.stored_bytes(sizes.kind, size // heads, length, sizes.model) for size in elements)

    def fixed_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes of the states of fixed size, and of compressed entries that are not finished."""
        unfinished, float32 = 0, 0
        if self.every is not None:
            size = self.keys + self.index
            # Each token of the next entry has a key and a gate, also for the indexer; twice, where entries overlap.
            unfinished = 2 * (length % self.every) * (2 if self.overlap else 1) * size
            if self.overlap and self.entries(length):
                # The next entry is also made from the tokens of the last one: its keys, and its gates in float32.
                unfinished += self.every * size
                float32 = self.every * size
        return self.passes * ((self.fixed + unfinished) * sizes.model + (self.fixed_float32 + float32) * FLOAT32)

    def read_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes that attention reads for the last token of a sequence."""
        tokens = length + self.prompt if self.window is None else min(length, self.window)
        entries = self.entries(length)
        if self.selected is not None:
            # An indexer selects among compressed entries, where there are any; the window is read whole.
            tokens = min(tokens, self.selected) if self.every is None else tokens
            entries = min(entries, self.selected)
        read = (tokens + entries) * (self.keys + self.values) * sizes.kv
        return self.passes * (read + self._indexed_bytes(length, sizes))

    def _indexed_bytes(self, length: int, sizes: ItemSizes) -> float:
        indexed = length if self.every is None else self.entries(length)
        return indexed * self.index * (FLOAT32 if self.index_float32 else sizes.model)


def field(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of the fields `names` that is set in a config, and that its class reads, else `default`."""
    values = {name: getattr(config, name, None) for name in names}
    return next((value for name, value in values.items() if value is not None and reads(config, name)), default)


def int_field(config: Any, layer: int, *names: str, least: int = 1, default: Any = None) -> Any:
    """Return the first of the fields `names` that is set in a layer's config, as a whole number.

    Raises:
        ValueError: the value is not a whole number, or is below `least`.
    """
    name = next((name for name in names if field(config, name) is not None), None)
    if name is None:
        return default
    value = field(config, name)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"layer {layer}: {name} must be a whole number of at least {least}, got {value}")
    return value


def fixed_states(config: Any, layer_type: str, layer: int) -> tuple[int, int, int]:
    """Return the elements of a layer that do not grow with the text, in the model's dtype and in float32, and a kernel.

    The kernel is the number of tokens that a convolution keeps, 0 without one.

    Raises:
        ValueError: the config has linear attention of an unknown kind.
    """
    size = partial(int_field, config, layer)
    # A field that only one kind of layer has identifies it. The order matters: a config may have fields of several.
    if layer_type == "conv":
        return size("hidden_size") * size(SHORT_CONVOLUTION), 0, size(SHORT_CONVOLUTION)
    if layer_type.startswith("hybrid") and field(config, "number_of_conv_states") is not None:  # Inkling
        prefix = "swa_" if layer_type == "hybrid_sliding" else ""
        state = size(f"{prefix}num_key_value_heads") * size(f"{prefix}head_dim")
        # Convolutions over keys, over values and over the outputs of both sublayers, all in float32.
        return 0, 2 * (state + size("hidden_size")) * size("conv_kernel_size"), 0
    if layer_type == "hybrid" and field(config, "cca_time0") is not None:  # Zaya
        key_heads = size("num_key_value_heads")
        channels = (size("num_attention_heads") + key_heads) * size("head_dim")
        # Two convolutions in a row look back as far as both kernels together, less one token each.
        tokens = size("cca_time0") + size("cca_time1") - 2
        # Half of each value comes from the previous token.
        return channels * tokens + key_heads * size("head_dim") // 2, 0, 0
    if layer_type not in ("linear_attention", "hybrid"):
        return 0, 0, 0
    if field(config, "linear_key_head_dim") is not None:  # gated delta net
        keys = size("linear_num_key_heads") * size("linear_key_head_dim")
        values = size("linear_num_value_heads") * size("linear_value_head_dim")
        state = values * size("linear_key_head_dim")
        kernel = size("linear_conv_kernel_dim")
        # One convolution over queries, keys and values together; queries are as wide as keys.
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
