"""How many bytes a KV cache takes: in 16 bits, and quantized; without importing torch.

The 16-bit cache is the one denominator: every share in a report is counted of it, whatever dtype ran. A number of more
than 16 bits counts as 16 of them; codes and their scales count as they are, for the tokens that have memory allocated.

As text, `4` stores keys and values of every layer with 4 bits, `8@0-11,4@12-29` by layer; `fp8` is float8 (e4m3).
Below 8 bits the first token and the latest 64 stay exact, since much of attention goes to them.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from crosslayer.core.options import ByLayer, by_layer

KINDS = {"8": "int8", "4": "int4", "3": "int3", "2": "int2", "fp8": "fp8"}  # as an option → name of the type
# Latest tokens that stay exact below 8 bits. The first does, too: with the mean key subtracted, that lowers the KL of 4
# bits from 0.0106 to 0.0027 nats per token on SmolLM2; four exact tokens are no better than one.
RECENT = 64
GROUP = 64  # channels of a head that have a scale and a smallest value, in float16
SCALES = 4  # bytes of both
EXAMPLE = "as 4, fp8, or 8@0-11,4@12-29 (by layer)"
REFERENCE_DTYPE = "bfloat16"  # in which a plan counts the 16-bit cache
BLOCK = 16  # tokens for which a cache that rounds allocates memory at a time


def in_16_bits(size: int, item: int) -> int:
    """Return the bytes of numbers of `item` bytes each, which take `size` bytes, if a number has at most 16 bits."""
    return size * min(item, 2) // item


def allocated_tokens(tokens: int) -> int:
    """Return for how many tokens memory is allocated, in blocks that grow to `BLOCK`: at most a quarter ahead."""
    block = min(BLOCK, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // block) * block


@dataclass(frozen=True)
class KvBits(ByLayer[str]):
    """The types to which layers' keys and values are quantized, such as int4; None, or no type: not quantized.

    Attributes:
        recent: latest tokens that stay exact, below 8 bits; a query's own token counts.
    """

    recent: int = RECENT

    @property
    def name(self) -> str:
        """How results call a cache with these bits: "4 bits", "fp8"."""
        return self.text if self.everywhere == "fp8" else f"{self.text} bits"

    @property
    def about(self) -> str:
        """What is stored, in words."""
        kinds = {self.everywhere, *self.layers}
        exact = f"; the first token and the latest {self.recent} exact" if any(map(keeps_recent, kinds)) else ""
        return f"{self.name}{exact}"


def parse_kv_bits(text: str | int) -> KvBits:
    """Return what a text such as `4`, `fp8` or `8@0-11,4@12-29` says.

    Raises:
        ValueError: it cannot be read.
    """
    text = str(text).strip()

    def kind(value: str) -> str:
        if value not in KINDS:
            raise ValueError(f"KV bits {text!r}: {value!r} is not one of {', '.join(KINDS)}; write it {EXAMPLE}")
        return KINDS[value]

    return KvBits(text, *by_layer(text, f"KV bits {text!r}", EXAMPLE, kind))


def token_bytes(kind: str, size: int) -> int:
    """Return the bytes of a token's keys, or values, of a head of `size` channels."""
    if kind == "fp8" or not size:
        return size
    return -(-size // 8) * int(kind.removeprefix("int")) + SCALES * groups(size)


def groups(size: int) -> int:
    """Return in how many groups the channels of a head are quantized: of 64 each if that divides them, else one."""
    return size // GROUP if size % GROUP == 0 else 1


def stored_bytes(kind: str, size: int, length: int, item: float, recent: int = RECENT) -> float:
    """Return the bytes of a head's keys, or values, of a text of `length` tokens.

    `item` is the size of an element that is not quantized, in bytes. Memory for codes is allocated in blocks.
    """
    if not keeps_recent(kind) or not recent:
        return allocated_tokens(length) * token_bytes(kind, size)
    latest = min(length, recent - 1)
    coded = length - latest
    # A single coded token would be the first, which stays exact.
    if coded <= 1:
        return length * size * item
    return allocated_tokens(coded) * token_bytes(kind, size) + (latest + 1) * size * item  # the first token too


def keeps_recent(kind: str | None) -> bool:
    """Return whether the first token and the latest stay exact: with less than 8 bits."""
    return kind in ("int4", "int3", "int2")


KvBitsText = Annotated[str, AfterValidator(lambda text: parse_kv_bits(text).text)]  # the type of an option
