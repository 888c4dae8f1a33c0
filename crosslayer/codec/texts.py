"""Token ids with padding on the left, as rows of tokens.

Shapes: B rows, S columns, T tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.codec.format import MOST_PADDING


def check_padding(pads: Sequence[int], columns: int) -> None:
    """Refuse rows with far more padding than text, for which a small file would ask for a large cache."""
    most = MOST_PADDING * (columns - min(pads))
    if max(pads) > most:
        raise ValueError(f"padding must be at most {most} columns for the longest row's tokens, got {max(pads)}")


def texts_of(
    ids: Tensor, mask: Tensor | None, model: PreTrainedModel | None = None
) -> tuple[list[tuple[int, np.ndarray]], int]:
    """Return of each row its columns of padding on the left, and its tokens (T,) uint32; and S, of all rows.

    Both are (B, S) or (S,); without a mask nothing is padding. With a model, its padding id is known.
    """
    if not isinstance(ids, Tensor):
        raise ValueError(f"ids must be a tensor of token ids, (B, S) or (S,), got {type(ids).__name__}")
    ids = (ids[None] if ids.dim() == 1 else ids).cpu()
    if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
        raise ValueError(f"ids must be token ids of the shape (B, S) or (S,), got {ids.dtype} {tuple(ids.shape)}")
    if mask is None:
        # a row that begins with one id several times, as padding does: no mask says whether it is text
        padding = None if model is None else getattr(model.config.get_text_config(), "pad_token_id", None)
        for row, row_ids in enumerate(ids):
            first = int(row_ids[0])
            differs = row_ids != first
            repeats = int(differs.int().argmax()) if differs.any() else len(row_ids)
            if repeats > 1 and (first == padding or bool((ids[:, 0] != first).any())):
                raise ValueError(
                    f"`mask` must say whether row {row} begins with padding, got None and {repeats} times the id "
                    f"{first}; pass mask=ids != {first}, or ones if this is text"
                )
    mask = torch.ones_like(ids) if mask is None else mask
    mask = (mask[None] if mask.dim() == 1 else mask).cpu().bool()
    if mask.shape != ids.shape:
        raise ValueError(f"mask must have the shape of ids, {tuple(ids.shape)}, got {tuple(mask.shape)}")
    pads = (~mask).sum(1).tolist()
    if any(mask[row, :pad].any() or pad == ids.shape[1] for row, pad in enumerate(pads)):
        raise ValueError("padding must be on the left, and each row must have a token")
    return [(pad, row[pad:].numpy().astype(np.uint32)) for row, pad in zip(ids, pads, strict=True)], ids.shape[1]
