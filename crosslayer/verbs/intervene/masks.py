"""The mask of an attention call as what is added to the scores, edited, and handed back in the form it came in.

Shapes: B batch, H heads, T new tokens, S keys.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from crosslayer.probe.intercept import AttentionCall
from crosslayer.verbs.intervene.running import Running

FLEX_BLOCK = 128  # rows and keys that flex attention's kernels take at once


def added_mask(call: AttentionCall, running: Running) -> Tensor:
    """Return a copy of the call's mask that may be edited, as what is added to the scores: (B, 1 or H, T, S)."""
    batch, _, new, _ = call.query.shape
    size, device = call.key.shape[2], call.query.device
    mask: Any = call.mask
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, batch, None, new, size, device=str(device))  # (B, 1, T, S)
    elif mask is None:
        mask = torch.ones(1, 1, new, size, dtype=torch.bool, device=device)
        if call.causal:
            mask = mask.tril(max(0, min(running.cached, size - new)))
    if mask.dtype == torch.bool:
        scores = torch.zeros(mask.shape, dtype=call.query.dtype, device=device)
        mask = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    return mask.expand(batch, *mask.shape[1:]).clone()  # (1 or B, …) → (B, …)


def as_taken(call: AttentionCall, mask: Tensor) -> Any:
    """Return an edited mask as the call's attention takes it: SDPA and eager add it, flex has a kind of its own."""
    if "flex" not in call.implementation:
        return mask
    batch, _, new, size = mask.shape
    # flex attention's kernels look at whole blocks, also beyond the last row and key
    allowed = torch.nn.functional.pad(mask[:, 0] == 0, (0, -size % FLEX_BLOCK, 0, -new % FLEX_BLOCK))  # (B, T', S')

    def may_see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allowed[row, query, key]

    return create_block_mask(may_see, batch, None, new, size, device=str(mask.device))


def check_first(mask: Tensor, places: list[tuple[int, int]]) -> None:
    """Refuse to isolate the first token where it sees nothing but itself already; mask (B, 1 or H, T, S)."""
    for row, index in places:
        if int((mask[row, 0, index] > torch.finfo(mask.dtype).min / 2).sum()) <= 1:
            raise ValueError(
                "a waiver of position 0 changes nothing: behind a causal mask the first token attends only to itself "
                "anyway; name a later position"
            )
