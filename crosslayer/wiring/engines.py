"""What an engine allocates for the KV cache of a model, which is more than the states that it holds.

- transformers: a dynamic cache, which grows with the text; nothing is allocated beyond it.
- vllm: blocks of 16 tokens, of one size for all layers; a window keeps what is in flight (vLLM 0.32,
  kv_cache_utils; in 0.33 kv_cache_planning).
- llama.cpp: padded cells for the whole context; a window keeps a micro-batch more (llama-kv-cache-iswa).
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from crosslayer.wiring.states import FLOAT32, ItemSizes, LayerStates

# bits per element: of dtypes, and of the types to which engines quantize keys and values
BITS = {"float32": 32, "float64": 64, "bfloat16": 16, "float16": 16}
QUANTISED = {  # scales of blocks of 32 elements included
    "fp8": 8.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
}
OURS = {"int8": 8.5, "int4": 4.5, "int3": 3.5, "int2": 2.5, "fp8": 8.0}  # of the caches of this package, without ends
BLOCK = 16  # tokens of a vLLM block
# Tokens that vLLM may have in flight on a GPU: two batches of its default size. A window keeps them all: gpt-oss-20b
# stores 6.09 GiB at 8,192 tokens × 32, and vLLM allocates 12.0.
IN_FLIGHT = 2 * 8192
# vLLM's own rule: if the most frequent kind of layer has fewer than 1.5 times the layers of the rarest one, groups have
# its size and the others are padded. Otherwise groups have the size of the rarest kind.
EVEN = 1.5
CELLS = 256  # llama.cpp rounds up to a multiple of it
MICRO_BATCH = 512  # tokens, llama.cpp's default
# It must match the whole text: by their beginnings, "24GiB free", "20GB;x" and "1,5GiB" would be sizes.
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*((?:[kmgtp]i?)?b?)\s*", re.IGNORECASE)
PREFIXES = ("", "k", "m", "g", "t", "p")
GGML = ("float32", "float16", "bfloat16", *(kind for kind in QUANTISED if kind != "fp8"))


class Kind(NamedTuple):
    """What decides on how vLLM stores a layer: tokens that are kept (None: all), and bytes of a token."""

    window: int | None
    token_bytes: float


TYPES = {"transformers": (*BITS, *OURS), "vllm": (*BITS, "fp8"), "llama.cpp": GGML}  # engine → types of keys and values


class StoredLayer(NamedTuple):
    """A layer's states, and which of its keys and values it stores itself."""

    states: LayerStates
    stored: tuple[str, ...]


def check_engine(engine: str, kv_dtype: str, layers: Sequence[StoredLayer]) -> None:
    """Refuse an engine that cannot store what the model caches, or not in this type.

    Raises:
        ValueError: the engine is unknown, the type of keys and values is not its own, or the model is not for it.
    """
    if engine not in TYPES:
        raise ValueError(f"`engine` must be one of {', '.join(TYPES)}, got {engine!r}")
    if kv_dtype not in TYPES[engine]:
        able = [name for name, kinds in TYPES.items() if kv_dtype in kinds]
        raise ValueError(f"{engine} has no KV cache of type {kv_dtype}; use `engine` {able[0]}")
    for layer, (states, stored) in enumerate(layers):
        if engine == "transformers":
            more = states.every or states.index or states.passes > 1 or states.fixed or states.fixed_float32
            # Codes and scales belong to heads, and a latent has none.
            if kv_dtype in OURS and states.keys and (not states.heads or more):
                raise ValueError(
                    f"layer {layer} ({states.mask}) has more than keys and values, which cannot be quantized"
                )
            continue

        # The rules of the other engines are known here only for plain keys and values, with or without a window.
        if states.every is not None or states.index or states.prompt or states.passes > 1:
            raise ValueError(f"what {engine} allocates for layer {layer} ({states.mask}) is unknown")
        if engine == "vllm" and (states.fixed or states.fixed_float32):
            raise ValueError(f"what vllm allocates for the state of layer {layer} ({states.mask}) is unknown")
        if engine == "llama.cpp" and len(stored) == 1:
            raise ValueError(f"llama.cpp cannot store {stored[0]} alone, as layer {layer} does")


def allocated(engine: str, layers: Sequence[StoredLayer], sizes: ItemSizes, length: int) -> float:
    """Return the bytes that an engine allocates for one sequence of `length` tokens."""
    if engine == "vllm":
        return _vllm(layers, sizes, length)
    total = 0.0
    for states, stored in layers:
        if engine == "transformers":
            total += states.stored_bytes(length, sizes, stored)
        elif stored:
            # A window also keeps the tokens of a micro-batch (llama-kv-cache-iswa).
            cells = length if states.window is None else min(length, states.window + MICRO_BATCH)
            total += math.ceil(cells / CELLS) * CELLS * (states.keys + states.values) * sizes.kv
        total += fixed_bytes(engine, states, sizes, length)
    return total


def fixed_bytes(engine: str, states: LayerStates, sizes: ItemSizes, length: int) -> float:
    """Return the bytes of a layer's states that do not grow with the text; llama.cpp's have float32."""
    if engine != "llama.cpp":
        return states.fixed_bytes(length, sizes)
    # A convolution over K tokens needs K − 1 of the past: llama.cpp keeps these, transformers keeps K.
    convolved = states.fixed // states.kernel * (states.kernel - 1) if states.kernel else states.fixed
    return (convolved + states.fixed_float32) * FLOAT32


def _vllm(layers: Sequence[StoredLayer], sizes: ItemSizes, length: int) -> float:
    """Return the bytes of the blocks of a request; layers are grouped by kind, all groups draw from one pool."""
    kinds: dict[Kind, int] = {}
    for states, stored in layers:
        # A page holds a token's keys and values together, so a layer that stores one of them allocates both.
        if stored:
            kind = Kind(states.window, (states.keys + states.values) * sizes.kv)
            kinds[kind] = kinds.get(kind, 0) + 1

    # Layers with one window form one group, and may differ in size there. Else groups have equally many layers and draw
    # pages of one size, that of the largest kind, from one pool.
    is_one_group = len({kind.window for kind in kinds}) == 1
    page = BLOCK * max(kind.token_bytes for kind in kinds)
    rarest, most = min(kinds.values()), max(kinds.values())
    group = most if most < EVEN * rarest else rarest
    total = 0.0
    for kind, count in kinds.items():
        # A page holds more tokens of a smaller kind, if it holds a whole number of blocks of it; else it is padded.
        fitting = page / (BLOCK * kind.token_bytes)
        tokens = BLOCK if is_one_group or fitting != int(fitting) else BLOCK * int(fitting)
        blocks = math.ceil(length / tokens)
        if kind.window is not None:
            # A window may begin within a block, so it needs one more.
            blocks = math.ceil(min(kind.window - 1 + IN_FLIGHT, length) / tokens) + 1
        pages = count * kind.token_bytes * BLOCK if is_one_group else math.ceil(count / group) * group * page
        total += blocks * pages
    return total


def item_sizes(dtype: str, kv_dtype: str | None, engine: str = "transformers") -> ItemSizes:
    """Return bytes per element of the model's dtype, and of keys and values, by default the same.

    Raises:
        ValueError: a type is not known.
    """
    kinds = {**BITS, **QUANTISED, **OURS}
    if dtype not in BITS:
        raise ValueError(f"`dtype` must be one of {', '.join(BITS)}, got {dtype!r}")
    if kv_dtype is not None and kv_dtype not in kinds:
        raise ValueError(f"`kv_dtype` must be one of {', '.join(kinds)}, got {kv_dtype!r}")
    ours = kv_dtype if engine == "transformers" and kv_dtype in OURS else None
    return ItemSizes(BITS[dtype] / 8, kinds[kv_dtype or dtype] / 8, ours)


def parse_bytes(size: str | int, option: str) -> int:
    """Return a number of bytes from an option such as 24GiB, 24GB or 512 MiB.

    Raises:
        ValueError: the option is not a size.
    """
    count = 0.0
    if match := SIZE.fullmatch(str(size)):
        unit = match[2].lower().removesuffix("b")
        base = 1024 if unit.endswith("i") else 1000
        count = float(match[1]) * base ** PREFIXES.index(unit.removesuffix("i"))
        # "24" without a unit is meant as GiB, so it is an error and not 24 bytes.
        if isinstance(size, str) and not match[2] and count < 1000:
            count = 0.0
    if not 1 <= count < 2**63:
        raise ValueError(f"{option} must be a size such as 24GiB or 1.5TB, got {str(size)!r}")
    return int(count)
