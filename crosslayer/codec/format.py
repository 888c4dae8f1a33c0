"""A block of stored tokens as bytes: the file format, version 3. All numbers are little-endian.

    offset      bytes    what
    0           4        "CLKB"
    4           2        version, 3
    6           1        numbers of the cache: 0 float16, 1 bfloat16, 2 float32
    7           1        if the position is 0, tokens behind token 0 that equal it and have its states, else 0
    8           32       name of the block: SHA-256 of its parent's name and its tokens as uint32
    40          32       name of its parent; of a first block the SHA-256 of "crosslayer-kv-1" and the codec's id
    72          4        position of its first token
    76          2        T, its tokens, at most 4096
    78          2        L, layers
    80          2        K, parts of codes: classes of channels
    82          4 T      tokens, uint32
    +           2 L      for each layer the first of the T tokens that it holds, uint16; T: none
    +           T        steps of the tokens, a byte b each: 2^((b − 128)/16)
    +           4 K      bytes of each part, uint32
    +                    if the position is 0, token 0: of each layer that holds it W numbers, float16
    +                    the parts: the codes of the other tokens (see `entropy.Coder.encode`)
    end − 32    32       SHA-256 of all bytes before

A file of `Codec.encode` is "CLKF", the version (2 bytes), two zeros, the number of rows (4), and for each row the
columns of padding on its left (4), the number of its blocks (4), and its blocks, each behind its size (4). It ends with
the SHA-256 of what stands around the blocks and of the last 32 bytes of each, which are the block's own SHA-256: blocks
can be checked in threads, and no byte is hashed twice.

A block is decoded only if its length and its SHA-256 match, so a truncated or altered block is an error. The hash is
not a signature: anyone who can write to a store can change its texts.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

MAGIC, FILE = b"CLKB", b"CLKF"
VERSION = 3  # of a block
FILE_VERSION = 3  # of what `Codec.encode` returns
HEAD = struct.Struct("<4sHBB32s32sIHHH")
START = struct.Struct("<4sHHI")
PAIR = struct.Struct("<II")
HASH = 32
LONGEST = 4096  # tokens of a block
MOST_COPIES = 255
MOST_PADDING = 64  # columns for each token of the longest row: a small file must not ask for a large cache
DTYPES = ("float16", "bfloat16", "float32")


class OtherFormat(ValueError):
    """The bytes are of another version of the format."""


def other_format(what: str, version: int, own: int) -> OtherFormat:
    """Return the error of a block or a file of another version than this release's `own`."""
    then = "update crosslayer" if version > own else "store the prompt again"
    return OtherFormat(f"the {what} has format {version}, and this release reads {own}; {then}")


@dataclass(frozen=True)
class Block:
    """A block of a stored prompt: its header and its codes.

    Attributes:
        name: 32 bytes; files are found by it.
        parent: the name of the block before it.
        start: position of its first token.
        tokens: (T,) uint32.
        first: of each layer the first token that it holds, (L,).
        dtype: of the cache, an index of `DTYPES`.
        copies: tokens behind a prompt's first that equal it, and whose states are its; at most `MOST_COPIES`.
        steps: bytes of the tokens' steps, (T,).
        exact: the first token of a prompt; empty elsewhere.
        parts: of the codes, one for each class of channels.
    """

    name: bytes
    parent: bytes
    start: int
    tokens: np.ndarray
    first: np.ndarray
    dtype: int
    copies: int = 0
    steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    exact: bytes | memoryview = b""
    parts: Sequence[bytes | memoryview] = ()

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)

    def pack(self) -> bytes:
        """Return the block as bytes."""
        counts = len(self.tokens), len(self.first), len(self.parts)
        head = HEAD.pack(MAGIC, VERSION, self.dtype, self.copies, self.name, self.parent, self.start, *counts)
        sizes = np.array([len(part) for part in self.parts], "<u4")
        arrays = [self.tokens.astype("<u4"), self.first.astype("<u2"), self.steps.astype("u1"), sizes]
        body = b"".join([head, *(array.tobytes() for array in arrays), self.exact, *self.parts])
        return body + hashlib.sha256(body).digest()


def child(parent: bytes, tokens: np.ndarray) -> bytes:
    """Return the name of a block from its parent's name and its tokens."""
    return hashlib.sha256(parent + tokens.astype("<u4").tobytes()).digest()


def root(codec: bytes) -> bytes:
    """Return the name that stands for the parent of first blocks, from the id of a codec."""
    return hashlib.sha256(b"crosslayer-kv-1" + codec).digest()


def read_header(data: bytes | memoryview, layers: int | None = None) -> Block:
    """Return a block without what follows its header, which is enough to find a prefix.

    Raises:
        OtherFormat: it is of another version.
        ValueError: it has other layers, or its name does not follow from its tokens.
    """
    if len(data) < HEAD.size:
        raise ValueError("a block is truncated")
    magic, version, dtype, copies, name, parent, start, count, held, _ = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("this is not a block of a stored cache")
    if version != VERSION:
        raise other_format("block", version, VERSION)
    if layers not in (None, held) or not 0 < count <= LONGEST or dtype >= len(DTYPES):
        raise ValueError("the header of a block is damaged")
    if len(data) < HEAD.size + 4 * count + 2 * held:
        raise ValueError("a block is truncated")
    tokens = np.frombuffer(data, "<u4", count, HEAD.size)
    first = np.frombuffer(data, "<u2", held, HEAD.size + 4 * count)
    # copies of the first token equal it, and stand right behind it in all layers
    is_wrong = copies and (start > 0 or first.any() or (tokens[: copies + 1] != tokens[0]).any() or copies >= count)
    # the name is checked here too, without the hash of the block: a prefix is found by headers alone
    if is_wrong or int(first.max(initial=0)) > count or child(parent, tokens) != name:
        raise ValueError("the header of a block is damaged")
    return Block(name, parent, start, tokens, first, dtype, copies)


def unpack(data: bytes | memoryview, widths: Sequence[int], classes: int) -> Block:
    """Return the block of bytes that are not trusted.

    Args:
        data: of the block.
        widths: numbers of each layer for a token.
        classes: of channels.

    Raises:
        ValueError: they are cut off, altered, or of another format.
    """
    data = memoryview(data)
    block = read_header(data, len(widths))
    count = len(block.tokens)
    if HEAD.unpack_from(data)[-1] != classes:
        raise ValueError("the header of a block is damaged")
    at = HEAD.size + 4 * count + 2 * len(widths)
    if len(data) < at + count + 4 * classes + HASH:
        raise ValueError("a block is truncated")
    steps = np.frombuffer(data, "u1", count, at)
    sizes = np.frombuffer(data, "<u4", classes, at + count).tolist()
    at += count + 4 * classes
    held = zip(widths, block.first, strict=True)
    exact = 0 if block.start else sum(2 * width for width, first in held if first == 0)
    if len(data) != at + exact + sum(sizes) + HASH:
        raise ValueError("the length of a block does not match its header")
    check_hash(data)
    ends = np.cumsum([at + exact, *sizes]).tolist()
    parts = [data[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]
    return replace(block, steps=steps, exact=data[at : at + exact], parts=parts)


def check_hash(data: bytes | memoryview) -> None:
    """Refuse bytes that do not end with their SHA-256."""
    if hashlib.sha256(data[:-HASH]).digest() != data[-HASH:]:
        raise ValueError("the bytes were truncated or altered: their SHA-256 differs")


def pack_file(rows: Sequence[tuple[int, Sequence[bytes]]]) -> bytes:
    """Return a file of rows: columns of padding, and blocks.

    Its hash is of what stands around the blocks and of the hash that each of them ends with, so that a reader can check
    the blocks in threads, and hashes nothing twice.
    """
    parts = [START.pack(FILE, FILE_VERSION, 0, len(rows))]
    digest = hashlib.sha256(parts[0])
    for pad, blocks in rows:
        parts.append(PAIR.pack(pad, len(blocks)))
        digest.update(parts[-1])
        for block in blocks:
            size = len(block).to_bytes(4, "little")
            parts += [size, block]
            digest.update(size + bytes(block[-HASH:]))
    return b"".join([*parts, digest.digest()])


def unpack_file(data: bytes) -> list[tuple[int, list[memoryview]]]:
    """Return the rows of a file that is not trusted: columns of padding, and the bytes of the blocks.

    The hashes that blocks end with are those of the file; whether a block has its hash, `unpack` says.

    Raises:
        ValueError: it is cut off, longer than it says, or of another format.
    """
    view = memoryview(data)
    if len(view) < START.size + HASH or START.unpack_from(view)[0] != FILE:
        raise ValueError("these bytes were not written by Codec.encode")
    _, version, _, count = START.unpack_from(view)
    if version != FILE_VERSION:
        raise other_format("file", version, FILE_VERSION)
    view, expected = view[:-HASH], view[-HASH:]
    digest = hashlib.sha256(view[: START.size])
    at, rows = START.size, []
    for _ in range(count):
        pair = _piece(view, at, PAIR.size)
        pad, block_count = PAIR.unpack(pair)
        digest.update(pair)
        at += PAIR.size
        blocks = []
        for _ in range(block_count):
            size = int.from_bytes(_piece(view, at, 4), "little")
            blocks.append(_piece(view, at + 4, size))
            digest.update(view[at : at + 4])
            digest.update(blocks[-1][-HASH:])
            at += 4 + size
        if not blocks:
            raise ValueError("a row of the file has no block")
        rows.append((pad, blocks))
    if at != len(view) or not rows or digest.digest() != expected:
        raise ValueError("the file was truncated or altered")
    return rows


def _piece(view: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(view):
        raise ValueError("the file is truncated")
    return view[at : at + size]
