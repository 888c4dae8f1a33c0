"""Bits per element: of dtypes, and of the types to which engines quantise keys and values."""

from typing import Any

from crosslayer.wiring.states import ItemSizes

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
DEFAULT = "bfloat16"


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, given by its name or as torch's.

    Raises:
        ValueError: it is not known.

    """
    name = str(dtype).removeprefix("torch.")
    if name not in BITS:
        raise ValueError(f"dtype {name!r} is not known; use {', '.join(BITS)}")
    return name


def item_sizes(dtype: str, kv_dtype: str | None, engine: str = "transformers") -> ItemSizes:
    """Return bytes per element of the model's dtype, and of keys and values, by default the same.

    Raises:
        ValueError: a type is not known.

    """
    kinds = {**BITS, **QUANTISED, **OURS}
    if kv_dtype is not None and kv_dtype not in kinds:
        raise ValueError(f"`kv_dtype` {kv_dtype!r} is not known; use {', '.join(kinds)}")
    ours = kv_dtype if engine == "transformers" and kv_dtype in OURS else None
    return ItemSizes(BITS[dtype] / 8, kinds[kv_dtype or dtype] / 8, ours)


def parse_bytes(size: str | int, option: str) -> int:
    """Return a number of bytes from an option such as 24GiB, 24GB or 512 MiB.

    Raises:
        ValueError: the option is not a size.

    """
    text = str(size)
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units |= {f"{letter}B": 1000**power, f"{letter}iB": 1024**power, letter: 1024**power}
    number = text.strip().rstrip("BKMGTikmgtb ")
    unit = text.strip()[len(number) :].strip()
    try:
        count = float(number) * {name.upper(): factor for name, factor in units.items()}[unit.upper()]
    except (ValueError, KeyError):
        raise ValueError(f"{option} must be a size such as 24GiB, got {text!r}") from None
    if not 1 <= count < 2**63:
        raise ValueError(f"{option} must be at least 1 byte, got {text!r}")
    return int(count)
