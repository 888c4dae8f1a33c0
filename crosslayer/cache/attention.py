"""How attention reads quantized keys and values, and masks.

Shapes: B batch, T new tokens, S cached + new tokens, H heads, H_kv key-value heads, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from crosslayer.cache.quantized import first_exact
from crosslayer.cache.quantizers import quantizer_of
from crosslayer.probe.intercept import AttentionCall

# That attend at a time, when some of them read quantized what others read exactly. A prompt then takes 1.24 times as
# long (SmolLM2 on a CPU), and 1.96 times as one attention over twice the columns.
QUERIES = 256


def rounded(
    call: AttentionCall, kinds: Sequence[str | None], shift: Tensor | float = 0.0, first: Tensor | None = None
) -> AttentionCall:
    """Return a call whose keys and values are quantized and back, keys less a shift (B or 1, H_kv, T, D).

    Where `first` (B or 1, 1, T, 1) is true they stay as they are.
    """
    keys, values = call.key, call.value
    if kinds[0] is not None:
        keys = quantizer_of(kinds[0]).rounded(call.key - shift) + shift
    if kinds[1] is not None:
        values = quantizer_of(kinds[1]).rounded(call.value)
    if first is not None:
        keys, values = torch.where(first, call.key, keys), torch.where(first, call.value, values)
    return replace(call, key=keys, value=values)


def queries_by_block(
    call: AttentionCall, rounded_states: AttentionCall, ranks: Tensor, recent: int
) -> Iterator[AttentionCall]:
    """Return calls of `QUERIES` queries each, which read the `recent` latest tokens exactly, others as rounded.

    In `call` the first columns are quantized already; `rounded_states` are the others, quantized. `ranks` (B or 1, S)
    counts the tokens up to a column.
    """
    new, width = call.query.shape[2], call.key.shape[2]
    before, exact = width - new, width - rounded_states.key.shape[2]
    allowed = allowed_by(call)  # (B or 1, 1, T, S)
    ahead = bool(allowed.triu(before + 1).any())  # queries that attend to later tokens
    quantized = torch.arange(width, device=ranks.device) < exact
    for start in range(0, new, QUERIES):
        end = min(start + QUERIES, new)
        rank = ranks[:, before + start : before + end]  # (B or 1, Q)
        # columns from `near` on are read exactly by some of these queries, and up to `far` quantized by some
        near = max(exact, int(first_exact(ranks, rank[:, 0], recent).min()))
        far = max(exact, int(first_exact(ranks, rank[:, -1], recent).max()))
        last = width if ahead else before + end
        old = (ranks[:, None] <= rank[..., None] - recent)[:, None]  # (B or 1, 1, Q, S)
        by_codes = (old | quantized)[..., :far] & allowed[:, :, start:end, :far]
        exactly = ~old[..., near:last] & allowed[:, :, start:end, near:last]
        keys, values = (
            torch.cat([states[:, :, :exact], codes[:, :, : far - exact], states[:, :, near:last]], 2)
            for states, codes in ((call.key, rounded_states.key), (call.value, rounded_states.value))
        )
        sinks = call.options.get("sinks")  # (B, H, T, 1)
        yield replace(
            call,
            query=call.query[:, :, start:end],
            key=keys,
            value=values,
            mask=mask_for(call, torch.cat([by_codes, exactly], -1)),
            options=call.options if sinks is None else {**call.options, "sinks": sinks[:, :, start:end]},
        )


def allowed_by(call: AttentionCall) -> Tensor:
    """Return what the queries of a call may attend to, (B or 1, 1, T, S)."""
    if call.mask is not None:
        return call.mask if call.mask.dtype == torch.bool else call.mask == 0
    new, width = call.query.shape[2], call.key.shape[2]
    allowed = torch.ones(new, width, dtype=torch.bool, device=call.key.device)
    return (allowed.tril(width - new) if call.causal else allowed)[None, None]


def mask_for(call: AttentionCall, allowed: Tensor) -> Tensor:
    """Return a boolean mask as a call's attention function takes it."""
    if call.implementation == "sdpa":
        return allowed
    hidden = max(torch.finfo(call.query.dtype).min, -1e30)  # finite in eager softmax, which is float32
    return torch.zeros(allowed.shape, dtype=call.query.dtype, device=allowed.device).masked_fill(~allowed, hidden)
