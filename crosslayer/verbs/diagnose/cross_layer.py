"""How well the short forms of arXiv 2410.17897 stand for attention over two layers, on any model (its Fig. 4).

    Eq. 2  U = softmax(Q_n [K_n; K_m]ᵀ/√d) [V_n; V_m]      true cross-layer attention
    Eq. 4  U = ½ A_n (V_n + V_m)                            current attention: the value residual
    Eq. 6  U = A_n V_n + V_m                                identity attention

with m the previous layer or the first. The measure is the cosine with Eq. 2, of all heads together, mean over tokens.

Shapes: B batch, T tokens, H heads, H_kv key-value heads, D head size.
"""

import torch
from torch import Tensor
from torch.nn import functional

from crosslayer.probe.intercept import AttentionCall
from crosslayer.probe.maps import is_causal

SOURCES = ("previous", "first")
FORMS = ("current", "identity")


class CrossLayerCosines:
    """Takes attention calls in the order of layers and keeps `by_form`: form and source → layer → cosine."""

    def __init__(self):
        self.by_form: dict[str, dict[int, Tensor]] = {f"{form}_{source}": {} for form in FORMS for source in SOURCES}
        self.states: dict[str, tuple[Tensor, Tensor]] = {}

    def see(self, call: AttentionCall) -> None:
        """Measure a layer against the previous and the first; layers of other shapes are left out."""
        if call.softcap is not None or call.sinks is not None or call.position_bias is not None:
            raise ValueError(
                f"layer {call.layer}: cross-layer attention is compared only for plain softmax scores, not with "
                "soft-caps, learned sinks or position biases"
            )
        groups = call.query.shape[1] // call.key.shape[1]
        key = call.key.repeat_interleave(groups, dim=1)  # (B, H_kv, T, D) → (B, H, T, D)
        value = call.value.repeat_interleave(groups, dim=1)
        for source in SOURCES:
            other = self.states.get(source)
            if other is not None and other[0].shape == key.shape and other[1].shape == value.shape:
                for form, cosine in zip(FORMS, _cosines(call, key, value, *other), strict=True):
                    self.by_form[f"{form}_{source}"][call.layer] = cosine
        self.states["previous"] = (key, value)
        self.states.setdefault("first", (key, value))


def _cosines(call: AttentionCall, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor) -> list[Tensor]:
    """Return the cosines of Eq. 4 and Eq. 6 with Eq. 2; states are (B, H, T, D)."""
    mask = _mask(call)
    two_masks = None if mask is None else torch.cat([mask, mask], dim=-1)  # (…, T, 2T)
    keys, values = torch.cat([key, other_key], dim=2), torch.cat([value, other_value], dim=2)  # (B, H, 2T, D)
    true = _attend(call, keys, values, two_masks)
    own = _attend(call, key, value, mask)
    lent = _attend(call, key, other_value, mask)
    forms = ((own + lent) / 2, own + other_value)
    return [functional.cosine_similarity(_flat(true), _flat(form), dim=-1).mean() for form in forms]


def _attend(call: AttentionCall, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(call.query, key, value, attn_mask=mask, scale=call.scaling)


def _mask(call: AttentionCall) -> Tensor | None:
    """Return what a layer masks, (…, T, T), None for nothing."""
    if call.mask is not None:
        return call.mask[..., : call.key.shape[2]]
    if not is_causal(call):
        return None
    rows, columns = call.query.shape[2], call.key.shape[2]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=call.query.device).tril()
    return mask if call.window is None else mask.triu(1 - call.window)  # row i sees columns i − window + 1 … i


def _flat(heads: Tensor) -> Tensor:
    """(B, H, T, D) → (B, T, H·D) in float32 or wider."""
    return heads.transpose(1, 2).flatten(2).to(torch.promote_types(heads.dtype, torch.float32))
