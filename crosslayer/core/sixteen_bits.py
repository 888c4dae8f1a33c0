"""The 16-bit cache, the one denominator of bytes: every share in a report is counted of it, whatever dtype ran.

A number of more than 16 bits counts as 16 of them; codes and their scales count as they are, for the tokens that memory
is allocated for.
"""

DTYPE = "bfloat16"  # in which a plan counts it
BLOCK = 16  # tokens for which a cache that rounds allocates memory at a time


def in_16_bits(size: int, item: int) -> int:
    """Return the bytes of numbers of `item` bytes each, which take `size` bytes, if a number has at most 16 bits."""
    return size * min(item, 2) // item


def allocated_tokens(tokens: int) -> int:
    """Return for how many tokens memory is allocated, in blocks that grow to `BLOCK`: at most a quarter ahead."""
    block = min(BLOCK, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // block) * block
