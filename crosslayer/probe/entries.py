"""Compressed attention: keys beyond the tokens' own are entries, each of which stands for several tokens.

DeepSeek-V4's layers append such entries to the keys. What attention gives to them leaves the map over tokens, as what
it gives to a learned sink does: the softmax has one further logit, their log-sum-exp.

Shapes: B batch, T tokens, E entries, H heads, D head size.
"""

from dataclasses import replace

import torch
from torch import Tensor

from crosslayer.probe.intercept import AttentionCall
from crosslayer.probe.measures import working


def has_entries(call: AttentionCall) -> bool:
    """Return whether a call without a cache has more keys than tokens."""
    return call.key.shape[2] > call.query.shape[2]


def over_tokens(call: AttentionCall) -> AttentionCall:
    """Return a call of a single sequence whose keys are its tokens; entries become a further logit of each row."""
    if not has_entries(call):
        return call
    tokens = call.query.shape[2]
    outside = torch.stack([_entry_logits(call, head) for head in range(call.query.shape[1])])  # (H, T)
    outside = outside[None, :, :, None]  # (1, H, T, 1)
    if call.sinks is not None:
        outside = torch.logaddexp(outside, working(call.sinks))
    options = {name: option for name, option in call.options.items() if name != "s_aux"}
    return replace(
        call,
        key=call.key[:, :, :tokens],
        value=call.value[:, :, :tokens],
        mask=call.mask if call.mask is None else call.mask[..., :tokens],
        options={**options, "sinks": outside, "entries": True},
    )


def _entry_logits(call: AttentionCall, head: int) -> Tensor:
    """Return the log-sum-exp of a head's scores over the entries, (T,)."""
    tokens = call.query.shape[2]
    kv_head = head * call.key.shape[1] // call.query.shape[1]
    query, key = working(call.query[0, head]), working(call.key[0, kv_head, tokens:])  # (T, D), (E, D)
    scores = query @ key.T * call.scaling  # (T, E)
    if call.mask is not None:
        mask = call.mask[0, head % call.mask.shape[1], :, tokens:]  # (T, E)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + working(mask)
    return scores.logsumexp(dim=-1)
