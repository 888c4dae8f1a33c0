"""The 16-bit cache, the one denominator of bytes: every share in a report is counted of it, whatever dtype ran.

A number of more than 16 bits counts as 16 of them; codes and their scales count as they are.
"""

DTYPE = "bfloat16"  # in which a plan counts it


def in_16_bits(size: int, item: int) -> int:
    """Return the bytes of numbers of `item` bytes each, which take `size` bytes, if a number has at most 16 bits."""
    return size * min(item, 2) // item
