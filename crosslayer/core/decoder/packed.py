"""Attention within the documents of packed rows, document by document, without a mask (B, 1, T, T).

A document is a contiguous causal piece of its row, which SDPA computes without a mask. Under a sliding window a longer
document is cut into pieces, each of which also reads the piece before it, through a band mask that all of them share.
`attend_within_documents` and `document_mask` are an attention implementation for transformers, which training
registers. For rows that are padded or continue a cache, and under torch.compile, it falls back to transformers' SDPA.

Shapes: B batch, T tokens of a row, N documents, P tokens of a piece, C hidden, H heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_recurrent_attention_mask, find_packed_sequence_indices, sdpa_mask

# least tokens of a piece, if a document is longer than the window: small windows would make many small calls of SDPA
PIECE = 512


@dataclass(frozen=True)
class Documents:
    """The pieces of all rows, concatenated: B·T tokens.

    Args:
        lengths: tokens of each piece.
        continues: whether a piece also reads the piece before it.
        window: tokens that a token attends to, itself included; None: all of its document up to itself.
        band: (P, 2·P), the mask to add to scores of a piece with the piece before it and with itself.
    """

    lengths: tuple[int, ...]
    continues: tuple[bool, ...]
    window: int | None = None
    band: Tensor | None = None


def document_mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Documents | Tensor | None:
    """Return the documents of packed rows, otherwise the result of `sdpa_mask`, which takes the same arguments."""
    whole = q_length == kv_length > 1 and options.get("attention_mask") is None and not options.get("use_vmap")
    # static caches have offsets as tensors, which are not compared: that would wait for the device
    offsets = (options.get("q_offset"), options.get("kv_offset"))
    begins = all(isinstance(offset, int) and offset == 0 for offset in offsets)
    documents = None
    # lengths of documents are Python's numbers: a graph would be compiled for each row of a text
    if whole and begins and not torch.compiler.is_compiling():
        sees = options["mask_function"]
        documents = _documents(sees, batch_size, q_length, options["device"], options["dtype"])
    return documents or sdpa_mask(batch_size, q_length, kv_length, **options)


def recurrent_mask(
    config: Any,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None = None,
    position_ids: Tensor | None = None,
) -> Documents | Tensor | None:
    """Return the documents of packed rows, between which a state is reset, otherwise transformers' padding mask."""
    if attention_mask is None and cache is None and not torch.compiler.is_compiling():
        assert position_ids is not None
        documents = find_packed_sequence_indices(position_ids.expand(inputs_embeds.shape[0], -1))  # (B, T)
        if documents is not None:
            lengths = _lengths(documents.diff(dim=1) != 0)
            return Documents(lengths, (False,) * len(lengths))
    return create_recurrent_attention_mask(config, inputs_embeds, attention_mask, cache)


def attend_within_documents(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return attention's output (B, T, H, D), as `sdpa_attention_forward` does, which takes the same arguments."""
    if not isinstance(attention_mask, Documents):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    lengths, window, band = attention_mask.lengths, attention_mask.window, attention_mask.band
    outputs = []
    q, k, v = (state.transpose(0, 1).flatten(1, 2).split(lengths, 1) for state in (query, key, value))
    for piece, continues in enumerate(attention_mask.continues):
        near = slice(piece - 1 if continues else piece, piece + 1)
        keys, values = (torch.cat(states[near], 1) if continues else states[piece] for states in (k, v))  # (H, keys, D)
        # a piece that the window holds is plainly causal: without a mask SDPA has faster kernels
        length, mask = lengths[piece], None
        if band is not None and (continues or length > (window or length)):
            before = band.shape[0]
            mask = band[None, None, :length, 0 if continues else before : before + length]  # (1, 1, P, keys), a view
        states = (q[piece][None], keys[None], values[None])
        outputs.append(sdpa_attention_forward(module, *states, mask, **options)[0])  # (1, P, H, D)
    return torch.cat(outputs, 1).unflatten(1, query.shape[::2][:2])[0], None


def _documents(
    sees: Callable[..., Tensor], batch: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> Documents | None:
    """Return the documents of rows; None if each row is one causal document, or a token attends to a later one.

    A document begins at each token that does not attend to the previous token.
    """
    rows, positions = torch.arange(batch, device=device)[:, None], torch.arange(tokens, device=device)[None]
    head = positions.new_zeros(())
    later, earlier = positions[:, 1:], positions[:, :-1]
    if sees(rows, head, earlier, later).any():
        return None
    starts = ~sees(rows, head, later, earlier).expand(batch, -1)  # (B, T − 1)
    lengths = _lengths(starts)
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1  # (N,), counted over all rows
    row, last = ends // tokens, ends % tokens
    first = last + 1 - torch.tensor(lengths, device=device)
    longer = (~sees(row, head, last, first)).nonzero().flatten().tolist()  # than the window
    if not longer:
        return Documents(lengths, (False,) * len(lengths)) if starts.any() else None

    # the window is what the last token of a longer document sees; longer documents are cut into pieces
    document = longer[0]
    seen = positions[0, first[document] : last[document] + 1]
    window = int(sees(row[document], head, last[document], seen).sum())
    size = max(window, PIECE)
    pieces: list[int] = []
    continues: list[bool] = []
    for length in lengths:
        starts_of_pieces = range(0, length, size if length > window else length)
        pieces += [min(size, length - start) for start in starts_of_pieces]
        continues += [start > 0 for start in starts_of_pieces]
    # the mask has the dtype of the queries, which under autocast is not that of the embeddings
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    behind = torch.arange(size, device=device)[:, None] - torch.arange(-size, size, device=device)  # (P, 2·P)
    band = torch.zeros(behind.shape, device=device, dtype=dtype)
    band.masked_fill_((behind < 0) | (behind >= window), float("-inf"))
    return Documents(tuple(pieces), tuple(continues), window, band)


def _lengths(starts: Tensor) -> tuple[int, ...]:
    """Return the length of each document in all rows; `starts` (B, T − 1) marks where one begins after token 0."""
    begins = torch.nn.functional.pad(starts, (1, 0), value=True).flatten()  # (B·T,)
    positions = begins.nonzero().flatten()
    return tuple(torch.diff(positions, append=positions.new_tensor([begins.numel()])).tolist())
