"""Depth attention in three kernels: the weighted sum, what each reader's backward pass leaves, a source's gradient.

Every kernel reads each large tensor once. Sources and gradients go in as a tuple of pointers, not stacked, each with
its own dtype; the tuple is padded to one of a few sizes by repeating its first tensor, and the padding is not read.
Arithmetic is in float32. Nothing is tuned while running: warps and blocks are in the tables below.

Shapes: T tokens, N sources of a reader, R readers of a source, C hidden.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# of the padded tuples: a kernel is compiled for each of them, and not for each number of sources
SIZES = (4, 8, 16, 32, 64, 129)
# of `differentiate`, at most: a constant, so that sums have the same order on all devices
PROGRAMS = 528
TOKENS = 32  # tokens of a tile of `gradient`
# channels of a tile of `gradient`: fewer than threads, so that a direction needs no shared memory
CHANNELS = 128
TILE_WARPS = 8
ROW_WARPS = ((1024, 1), (2048, 2), (4096, 4), (8192, 8))  # bytes of a row, and the warps for rows up to that size
# for wider rows; those of more than 16 KiB may spill a few registers: of width 16,384 up to 240 bytes a thread
MOST_WARPS = 16
# of `differentiate`: by itself, ptxas saves some and spills; AMD's compiler does not have the option
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}
# as one multiplication and addition; said here, since the default changes
FUSED = {"enable_fp_fusion": True}


def attend(
    sources: Sequence[Tensor], direction: Tensor, eps: float, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum (T, C) over N sources (T, C), and scores and 1 / rms of the sources, (N, T) each.

    The sum is of the sources, or with `normed` of these over their rms, in their promoted dtype; the others are
    float32. Sources are contiguous; the direction is (C,).
    """
    tokens, width = sources[0].shape
    dtype = functools.reduce(torch.promote_types, (source.dtype for source in sources))
    result = sources[0].new_empty(tokens, width, dtype=dtype)
    scores = sources[0].new_empty(len(sources), tokens, dtype=torch.float32)
    inverse = torch.empty_like(scores)
    block = triton.next_power_of_2(width)
    # Triton launches on the current device, which need not be that of the tensors
    with torch.cuda.device_of(result):
        attend_kernel[(tokens,)](
            padded(sources),
            direction,
            result,
            scores,
            inverse,
            len(sources),
            tokens,
            eps,
            WIDTH=width,
            BLOCK=block,
            NORMED=normed,
            num_warps=row_warps(sources),
            **FUSED,
        )
    return result, scores, inverse


def differentiate(
    grad: Tensor, scores: Tensor, inverse: Tensor, sources: Sequence[Tensor], direction: Tensor, normed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return shares, slopes and shrink (N, T) of a reader, and the gradient of its direction (C,), all float32.

    `grad` is (T, C), contiguous like the sources; `scores` and `inverse` (N, T) are from `attend`. A source's gradient
    is shares · grad + slopes · direction + shrink · source.

    Slopes need the mean Σ_i shares_i v_iᵀ grad, which is known only after a token's last source: the direction's
    gradient is summed without it, and corrected then. The order of all sums is fixed: equal arguments give equal bits.
    """
    tokens, width = grad.shape
    shares, slopes, shrink = (torch.empty_like(scores) for _ in range(3))
    programs = min(tokens, PROGRAMS)
    partial = scores.new_empty(programs, width)  # (P, C)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(grad):
        differentiate_kernel[(programs,)](
            padded(sources),
            grad,
            scores,
            inverse,
            shares,
            slopes,
            shrink,
            partial,
            len(sources),
            tokens,
            WIDTH=width,
            BLOCK=block,
            ROWS=triton.next_power_of_2(len(padded(sources))),
            NORMED=normed,
            num_warps=row_warps(sources),
            **REGISTERS,
            **FUSED,
        )
    return shares, slopes, shrink, partial.sum(0)


def gradient(
    source: Tensor,
    grads: Sequence[Tensor],
    shares: Tensor,
    slopes: Tensor,
    shrink: Tensor,
    directions: Tensor,
    arrived: Tensor | None,
) -> Tensor:
    """Return the gradient (T, C) of a source (T, C) in its dtype, from what its R readers left.

    It is Σ_r shares_r grads_r + Σ_r slopes_r directions_r + shrink · source + arrived, for grads (T, C), shares and
    slopes (R, T), directions (R, C), shrink (T,), the sum over readers, and a gradient that arrived otherwise (T, C).
    All are contiguous.
    """
    tokens, width = source.shape
    output = torch.empty_like(source)
    tiles = triton.cdiv(width, CHANNELS)
    with torch.cuda.device_of(source):
        gradient_kernel[(triton.cdiv(tokens, TOKENS) * tiles,)](
            padded(grads),
            source,
            shares,
            slopes,
            shrink,
            directions,
            arrived,
            output,
            len(grads),
            tokens,
            WIDTH=width,
            TOKENS=TOKENS,
            CHANNELS=CHANNELS,
            num_warps=TILE_WARPS,
            **FUSED,
        )
    return output


def padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors as a tuple of one of the `SIZES`, filled with its first one."""
    if not 1 <= len(tensors) <= SIZES[-1]:
        raise ValueError(f"depth attention kernels take 1 to {SIZES[-1]} tensors, got {len(tensors)}")
    size = next(size for size in SIZES if size >= len(tensors))
    return (*tensors, *[tensors[0]] * (size - len(tensors)))


def row_warps(tensors: Sequence[Tensor]) -> int:
    """Return the number of warps that hold a row (C,) of each tensor."""
    size = triton.next_power_of_2(tensors[0].shape[-1]) * max(tensor.element_size() for tensor in tensors)
    return next((warps for limit, warps in ROW_WARPS if size <= limit), MOST_WARPS)


# these change from call to call: Triton would compile again for 1, and for multiples of 16
@triton.jit(do_not_specialize=["count", "tokens", "eps"])
def attend_kernel(
    sources,
    direction,
    result,
    scores,
    inverse,
    count,
    tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Compute a token's weighted sum with a running maximum; the next row is requested before one is used."""
    # tokens times channels exceed 32 bits in long prompts
    token = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    inside = channels < WIDTH
    offsets = token * WIDTH + channels
    toward = tl.load(direction + channels, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    maximum = -float("inf")
    mass = 0.0
    left = tl.full([BLOCK], count, tl.int32)
    at = token  # in (N, T)
    following = tl.load(sources[0] + offsets, mask=inside, other=0.0)
    for number in tl.static_range(len(sources)):
        current = following
        if number + 1 < len(sources):
            following = tl.load(sources[number + 1] + offsets, mask=inside & (left > number + 1), other=0.0)
        if count > number:
            row = current.to(tl.float32)
            pairs = tl.join(row * row, row * toward)  # (BLOCK, 2): both sums in one exchange between warps
            square, score = tl.split(tl.sum(pairs, axis=0))
            norm = tl.rsqrt(square / WIDTH + eps)
            score *= norm
            higher = tl.maximum(maximum, score)
            shrunk = tl.exp(maximum - higher)
            share = tl.exp(score - higher)
            total = total * shrunk + row * (share * norm if NORMED else share)
            mass = mass * shrunk + share
            maximum = higher
            tl.store(scores + at, score)
            tl.store(inverse + at, norm)
        at += tokens
    tl.store(result + offsets, (total / mass).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "tokens"])
def differentiate_kernel(
    sources,
    grad,
    scores,
    inverse,
    shares,
    slopes,
    shrink,
    partial,
    count,
    tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Differentiate the scores of every P-th token, and sum the direction's gradient over these tokens.

    Two rows are requested before one is used.
    """
    channels = tl.arange(0, BLOCK)
    inside = channels < WIDTH
    rows = tl.arange(0, ROWS)
    left = tl.full([BLOCK], count, tl.int32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        offsets = token * WIDTH + channels
        following = tl.load(sources[0] + offsets, mask=inside, other=0.0)
        second = tl.load(sources[1] + offsets, mask=inside & (left > 1), other=0.0)
        arrived = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        column = rows.to(tl.int64) * tokens + token  # (ROWS,), in (N, T)
        score = tl.load(scores + column, mask=rows < count, other=0.0)
        maximum = tl.max(tl.where(rows < count, score, -float("inf")), axis=0)
        share = tl.where(rows < count, tl.exp(score - maximum), 0.0)
        mass = tl.sum(share, axis=0)
        share /= mass
        products = tl.zeros([ROWS], dtype=tl.float32)  # v_iᵀ grad, over rms(v_i) if sources are normed
        mean = tl.zeros([BLOCK], dtype=tl.float32)  # Σ_i shares_i v_i / rms(v_i)
        at = token
        for number in tl.static_range(len(sources)):
            current = following
            following = second
            if number + 2 < len(sources):
                second = tl.load(sources[number + 2] + offsets, mask=inside & (left > number + 2), other=0.0)
            if count > number:
                row = current.to(tl.float32)
                over_rms = tl.load(inverse + at)
                weight = tl.exp(tl.load(scores + at) - maximum) / mass * over_rms
                product = tl.sum(row * arrived, axis=0)
                if NORMED:
                    product *= over_rms
                mean += row * weight
                total += row * (weight * product)
                products = tl.where(rows == number, product, products)
            at += tokens
        average = tl.sum(share * products, axis=0)
        total -= mean * average
        norm = tl.load(inverse + column, mask=rows < count, other=0.0)
        slope = share * (products - average) * norm
        through_norms = slope * score
        if NORMED:  # the norms divide the values, too
            through_norms += share * products * norm
            share *= norm
        tl.store(shares + column, share, mask=rows < count)
        tl.store(slopes + column, slope, mask=rows < count)
        tl.store(shrink + column, through_norms * norm / (-WIDTH), mask=rows < count)
    tl.store(partial + tl.program_id(0).to(tl.int64) * WIDTH + channels, total, mask=inside)


@triton.jit(do_not_specialize=["count", "tokens"])
def gradient_kernel(
    grads,
    source,
    shares,
    slopes,
    shrink,
    directions,
    arrived,
    output,
    count,
    tokens,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sum a source's gradient in a tile of (tokens, channels); neighboring programs share tokens."""
    tiles = tl.cdiv(WIDTH, CHANNELS)
    token = (tl.program_id(0) // tiles).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channels = (tl.program_id(0) % tiles) * CHANNELS + tl.arange(0, CHANNELS)
    there, inside = token < tokens, channels < WIDTH
    offsets = token[:, None] * WIDTH + channels[None, :]  # (TOKENS, CHANNELS)
    mask = there[:, None] & inside[None, :]
    left = tl.full([TOKENS, CHANNELS], count, tl.int32)
    following = tl.load(grads[0] + offsets, mask=mask, other=0.0)
    factor = tl.load(shrink + token, mask=there, other=0.0)
    total = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
    at = token  # in (R, T)
    if arrived is not None:
        total += tl.load(arrived + offsets, mask=mask, other=0.0).to(tl.float32)
    for number in tl.static_range(len(grads)):
        current = following
        if number + 1 < len(grads):
            following = tl.load(grads[number + 1] + offsets, mask=mask & (left > number + 1), other=0.0)
        if count > number:
            share = tl.load(shares + at, mask=there, other=0.0)
            slope = tl.load(slopes + at, mask=there, other=0.0)
            toward = tl.load(directions + number * WIDTH + channels, mask=inside, other=0.0).to(tl.float32)
            total += current.to(tl.float32) * share[:, None] + slope[:, None] * toward[None, :]
        at += tokens
    tl.store(output + offsets, total.to(output.dtype.element_ty), mask=mask)
