# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalMemberAccess=false
"""Decoding of asymmetric numeral systems (ANS), as `codec.entropy` writes them: one program a stream, all at once.

The state has 64 bits, words have 32 and frequencies 24. A stream holds the symbols of runs of channels that share a
table, by channel and then by token. Its words are read from the last to the first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def decode(words: Tensor, escaped: Tensor, streams: Tensor, tables: tuple[Tensor, Tensor, Tensor], out: Tensor):
    """Decode all streams into `out` (float32). Return, for each stream, the index of its first unread escaped code.

    Args:
        words: of all streams, bits of uint32 as int32.
        escaped: codes of all streams that no table has, int16.
        streams: (streams, 9), int64: first word, last word + 1, first escaped code, last + 1, tokens, first run,
            last + 1, where in `out` the first channel begins, and how far behind it the next one.
        tables: three tensors. Runs of channels, (runs, 4) int32: where the run's table begins, how many symbols it has,
            the first channel, and the last + 1. Then, for the symbols of all tables, the cumulative frequencies (int32)
            and the decoded values (float32).
        out: numbers (channels, tokens) of each stream.

    """
    ended = streams.new_empty(len(streams))
    with torch.cuda.device_of(out):
        decode_kernel[(len(streams),)](words, escaped, streams, *tables, out, ended, num_warps=1, enable_fp_fusion=True)
    return ended


@triton.jit
def decode_kernel(words, escaped, streams, runs, starts, values, out, ended):
    """Decode a stream; beyond the ends of damaged ones are zeros."""
    stream = tl.program_id(0)
    begin, at, escape, last_escape, tokens, run, last_run, position, stride = _facts(streams + stream * 9)
    state = tl.full((), 0, tl.uint64)
    for _ in range(2):
        state, at = _refilled(state, at, begin, words)
    while run < last_run:
        table = tl.load(runs + run * 4)
        symbols = tl.load(runs + run * 4 + 1)
        channel = tl.load(runs + run * 4 + 2)
        last_channel = tl.load(runs + run * 4 + 3)
        while channel < last_channel:
            for token in range(tokens):
                slot = (state & 0xFFFFFF).to(tl.int32)
                low, high = tl.full((), 0, tl.int32), symbols
                while high - low > 1:  # starts[low] <= slot < starts[high]
                    middle = (low + high) >> 1
                    above = tl.load(starts + table + middle) <= slot
                    low, high = tl.where(above, middle, low), tl.where(above, high, middle)
                start = tl.load(starts + table + low)
                frequency = tl.load(starts + table + low + 1) - start
                state = (state >> 24) * frequency.to(tl.uint64) + (slot - start).to(tl.uint64)
                state, at = _refilled(state, at, begin, words)
                escapes = low == symbols - 1
                raw = tl.load(escaped + escape, mask=escapes & (escape < last_escape), other=0)
                value = tl.where(escapes, raw.to(tl.float32), tl.load(values + table + low))
                tl.store(out + position + channel * stride + token, value)
                escape += escapes.to(tl.int64)
            channel += 1
        run += 1
    tl.store(ended + stream, escape)


@triton.jit
def _facts(of):
    return (
        tl.load(of), tl.load(of + 1), tl.load(of + 2), tl.load(of + 3), tl.load(of + 4), tl.load(of + 5),
        tl.load(of + 6), tl.load(of + 7), tl.load(of + 8),
    )  # fmt: skip


@triton.jit
def _refilled(state, at, begin, words):
    """Return a state of at least 32 bits, if there are words left."""
    needed = (state < 4294967296) & (at > begin)
    word = tl.load(words + at - 1, mask=needed, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    return tl.where(needed, (state << 32) | word, state), at - needed.to(tl.int64)
