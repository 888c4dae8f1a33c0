"""What a layer's cache holds: states that grow with the text, and states of fixed size, which a config's fields give.

Convolutions and linear attention keep states of fixed size. A kind of layer is recognized by the fields of its config;
the sizes are those of transformers' caches.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from crosslayer.wiring import kv_bits
from crosslayer.wiring.classes import reads

FLOAT32 = 4  # bytes per element
# names of fields, of which the first that is set counts
SHORT_CONVOLUTION = "conv_L_cache"
GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")  # Mamba 2 has groups, Mamba has none
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

    def kept(self, length: int) -> int:
        """Return the tokens whose keys and values are kept; a windowed cache leaves space for the next token."""
        return length + self.prompt if self.window is None else min(length, self.window - 1)

    def stored_bytes(self, length: int, sizes: ItemSizes, own: tuple[str, ...]) -> float:
        """Return the bytes that grow with the text; `own` names which of its keys and values it stores."""
        if sizes.kind is not None:
            return sum(self._quantized_bytes(vars(self)[state], length, sizes) for state in own)
        size = sum(vars(self)[state] for state in own)
        kept = (self.kept(length) + self.entries(length)) * size * sizes.kv
        return self.passes * (kept + self._indexed_bytes(length, sizes))

    def _quantized_bytes(self, size: int, length: int, sizes: ItemSizes) -> float:
        """Return the bytes of keys, or values, of `size` elements a token; a window is not quantized."""
        assert sizes.kind is not None
        if self.window is not None:
            return self.kept(length) * size * sizes.model
        return self.heads * kv_bits.stored_bytes(sizes.kind, size // self.heads, length, sizes.model)

    def fixed_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes of the states of fixed size, and of compressed entries that are not finished."""
        unfinished, float32 = 0, 0
        if self.every is not None:  # keys and gates of the tokens of the next entry, of the indexer as well
            size = (2 if self.overlap else 1) * (self.keys + self.index)
            unfinished = 2 * (length % self.every) * size
        if self.overlap and self.every is not None and self.entries(length):
            unfinished += self.every * (self.keys + self.index)
            float32 = self.every * (self.keys + self.index)
        return self.passes * ((self.fixed + unfinished) * sizes.model + (self.fixed_float32 + float32) * FLOAT32)

    def read_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes that attention reads for the last token of a sequence."""
        tokens = length + self.prompt if self.window is None else min(length, self.window)
        entries = self.entries(length)
        if self.selected is not None:
            tokens = min(tokens, self.selected) if self.every is None else tokens
            entries = min(entries, self.selected)
        read = (tokens + entries) * (self.keys + self.values) * sizes.kv
        return self.passes * (read + self._indexed_bytes(length, sizes))

    def full_bytes(self, length: int, sizes: ItemSizes) -> float:
        """Return the bytes of a plain cache: keys and values of all tokens, neither compressed nor quantized."""
        kept = length * (self.keys + self.values) * sizes.model
        return self.passes * (kept + length * self.index * (FLOAT32 if self.index_float32 else sizes.model))

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
