"""How much of a layer's attention falls on the tokens that another layer would choose, a block of rows at a time.

Shapes: N layers, H key-value heads, S tokens of a sequence, R rows of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosslayer.core.choice import TokenChoice, mask_of, pooled_attention
from crosslayer.probe.intercept import AttentionCall
from crosslayer.probe.measures import working

BUFFER_ELEMENTS = 8_000_000  # of the attention of all layers to a block of rows


@dataclass(frozen=True)
class ChoiceSums:
    """Sums over rows of a sequence, for one way to choose tokens.

    `recovered` (N, H, N, H): attention of the second layer's head to the tokens that the first layer's head chooses.
    `first` (N, H): attention to the first token. `common` (N, H): how many tokens the choices of a layer and the one
    below it in the list have in common. `kept`: chosen tokens. `rows`: the rows that do not see all tokens chosen.
    """

    recovered: Tensor
    first: Tensor
    common: Tensor
    kept: int
    rows: int


@torch.no_grad()
def choice_sums(calls: Sequence[AttentionCall], choice: TokenChoice) -> ChoiceSums:
    """Return the sums over the rows in which `choice` leaves tokens out.

    `calls` are of layers with full causal attention and equal key-value heads: batch 1, as many queries as keys.
    """
    size, heads = calls[0].key.shape[2], calls[0].key.shape[1]
    many = len(calls) * heads
    double = {"dtype": torch.float64, "device": calls[0].key.device}
    recovered, first = torch.zeros(many, many, **double), torch.zeros(many, **double)
    common, kept, rows = torch.zeros(len(calls), heads, **double), 0, 0
    start = next((row for row in range(size) if choice.count.of(row + 1) < row + 1), size)
    step = max(1, BUFFER_ELEMENTS // (many * size))
    for block in (range(row, min(row + step, size)) for row in range(start, size, step)):
        columns = torch.arange(block.stop, device=calls[0].key.device)
        allowed = (columns <= columns[block.start :, None])[None, None]  # (1, 1, R, S)
        masses, chosen = [], []
        for call in calls:
            query, key = working(call.query[:, :, block.start : block.stop]), working(call.key[:, :, : block.stop])
            mass = pooled_attention(query, key, allowed, call.scaling, call.softcap)[0]  # (H, R, S)
            masses.append(mass * heads / query.shape[1])
            indices = choice.largest(mass[None], allowed, choice.count.of(block.stop))
            chosen.append(mask_of(indices, block.stop, 1, None)[0].to(mass.dtype))
        mass, mask = torch.stack(masses), torch.stack(chosen)  # (N, H, R, S)
        recovered += (mask.view(many, -1) @ mass.view(many, -1).T).double()
        first += mass[..., 0].sum(-1).double().flatten()
        common[1:] += (mask[1:] * mask[:-1]).sum((2, 3)).double()
        kept += sum(choice.count.of(row + 1) for row in block)
        rows += len(block)
    shape = (len(calls), heads)
    return ChoiceSums(recovered.view(*shape, *shape), first.view(shape), common, kept, rows)
