"""Pages of stored codes read by a GPU, a page a thread: pcodec's wrapped format, 16-bit numbers without deltas.

A page begins with four states of its tANS coder. Its numbers come in batches of 256: of each the bin, then of each the
offset within its bin. Bins are written where the numbers will be, and read again when their offsets come.

Nothing that a damaged file can say moves a read or a write out of bounds: where numbers go and how many there are
follows from the headers of blocks alone; a state stays below its table's size by the way that tables are built
(`codec.device`); words are read only before `end`.

Shapes: P pages, C channels of all layers, T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FACTS = 9  # of a page, the rows of `facts`: see `read`
BLOCK, WARPS = 64, 2  # pages of a program, a thread each: 40 registers on an H100, no shared memory
BATCH = 256  # pcodec writes the bins of 256 numbers, then their offsets


def read(
    words: Tensor,
    facts: Tensor,
    rows: Tensor,
    nodes: Tensor,
    bins: Tensor,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    block: int = BLOCK,
) -> None:
    """Read pages into `out` (C, T), int16 codes, or with `scales` coefficients in float16.

    Args:
        words: all bytes, int32, (N,).
        facts: of each page its first byte, the logarithm of its table's size, tokens, first node, first bin, the column
            of its first token, columns from a token to the next, the first of its `rows`, and channels, (9, P), int32.
        rows: of `out`, one for each channel.
        nodes: of all tables: next state without its bits | how many bits << 14 | bin << 18.
        bins: of all tables: the lowest number of a bin, 16 bits | how many bits its offset has << 16.
        out: (C, T), in which everything that no page has stays as it is.
        scales: a shift for each row of `out` (C,) and a step for each column (T,), float32: a coefficient is
            (code ± shift) · step, with the code's sign, and 0 for a code of 0.
        block: pages of a program.
    """
    shifts, steps = scales if scales is not None else (facts, facts)  # not read without
    programs = triton.cdiv(facts.shape[1], block)
    with torch.cuda.device_of(out):
        read_kernel[(programs,)](
            words,
            len(words),
            facts,
            facts.shape[1],
            rows,
            nodes,
            bins,
            shifts,
            steps,
            out,
            out.stride(0),
            SCALED=scales is not None,
            BATCH=BATCH,
            BLOCK=block,
            num_warps=WARPS,
            enable_fp_fusion=False,  # there is nothing to fuse; said here, since the default changes
        )


@triton.jit
def take(words, end, stream, held, at, count, live):
    """Take `count` ≤ 16 bits of each lane's stream, and fill it up from the next word: at least 32 bits stay."""
    taken = stream.to(tl.int32) & ((1 << count) - 1)
    stream = stream >> count.to(tl.uint64)
    held -= count
    low = live & (held < 32)
    word = tl.load(words + at, mask=low & (at < end), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    stream = tl.where(low, stream | (word << held.to(tl.uint64)), stream)
    return taken, stream, tl.where(low, held + 32, held), tl.where(low, at + 1, at)


@triton.jit
def following(token, row, tokens):
    """Return the token and the row of a page's next number: numbers are by channel, then by token."""
    token += 1
    ends = token == tokens
    return tl.where(ends, 0, token), row + ends.to(tl.int32)


@triton.jit
def read_kernel(
    words,
    end,
    facts,
    count,
    rows,
    nodes,
    bins,
    shifts,
    steps,
    out,
    stride,
    SCALED: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read BLOCK pages, a lane each."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < count
    own = facts + lane
    begin = tl.load(own, mask=live, other=0)
    log = tl.load(own + count, mask=live, other=0)
    tokens = tl.load(own + 2 * count, mask=live, other=0)
    nodes += tl.load(own + 3 * count, mask=live, other=0)
    bins += tl.load(own + 4 * count, mask=live, other=0)
    column = tl.load(own + 5 * count, mask=live, other=0)
    pace = tl.load(own + 6 * count, mask=live, other=0)
    first = tl.load(own + 7 * count, mask=live, other=0)
    numbers = tokens * tl.load(own + 8 * count, mask=live, other=0)

    # The first two words, less the bytes of the first before the page; then the four states, up to a whole byte.
    at = begin >> 2
    stream = tl.load(words + at, mask=live & (at < end), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    at += 1
    second = tl.load(words + at, mask=live & (at < end), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    at += 1
    before = (begin & 3) * 8
    stream = (stream | (second << 32)) >> before.to(tl.uint64)
    held = 64 - before
    a, stream, held, at = take(words, end, stream, held, at, log, live)
    b, stream, held, at = take(words, end, stream, held, at, log, live)
    c, stream, held, at = take(words, end, stream, held, at, log, live)
    d, stream, held, at = take(words, end, stream, held, at, log, live)
    _, stream, held, at = take(words, end, stream, held, at, -4 * log & 7, live)

    most = tl.max(numbers)
    token, row = lane * 0, first  # of the next bin
    later, place = lane * 0, first  # of the next offset
    for batch in range(0, most, BATCH):
        stop = tl.minimum(batch + BATCH, most)
        for number in range(batch, stop):
            good = numbers > number
            node = tl.load(nodes + a, mask=good, other=0)
            channel = tl.load(rows + row, mask=good, other=0).to(tl.int64)
            found = (node >> 18).to(tl.int16).to(out.dtype.element_ty, bitcast=True)
            tl.store(out + channel * stride + column + token * pace, found, mask=good)
            bits = tl.where(good, (node >> 14) & 15, 0)
            more, stream, held, at = take(words, end, stream, held, at, bits, good)
            a, b, c, d = b, c, d, (node & 0x3FFF) + more  # the states take turns
            token, row = following(token, row, tokens)
        for number in range(batch, stop):
            good = numbers > number
            channel = tl.load(rows + place, mask=good, other=0).to(tl.int64)
            target = out + channel * stride + column + later * pace
            found = tl.load(target, mask=good, other=0).to(tl.int16, bitcast=True).to(tl.int32)
            found = tl.load(bins + found, mask=good, other=0)
            more, stream, held, at = take(words, end, stream, held, at, found >> 16, good)
            code = ((found & 0xFFFF) + more).to(tl.int16)
            if SCALED:
                shift = tl.load(shifts + channel, mask=good, other=0.0)
                value = code.to(tl.float32) + tl.where(code > 0, shift, tl.where(code < 0, -shift, 0.0))
                step = tl.load(steps + column + later * pace, mask=good, other=0.0)
                tl.store(target, (value * step).to(out.dtype.element_ty), mask=good)
            else:
                tl.store(target, code, mask=good)
            later, place = following(later, place, tokens)
