"""How far the predictions of a model are from those of its teacher, without the logits of all tokens at once.

    KL = mean over tokens of Σ_v p_v (log p_v − log q_v),   p = softmax(z),  z = g W_tᵀ,   q = softmax(y),  y = h W_sᵀ

Logits exist of BLOCK tokens at a time. ∂KL/∂y = (q − p) / R needs nothing from above, so it is computed along with the
value, while the logits are there, and the products with it wait for ROWS tokens, since each adds to a whole W_s.

Shapes: R tokens, C hidden (of either model), V vocabulary, B tokens of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

ROWS = 1024  # tokens whose ∂KL/∂y is in memory, in the dtype of the products
BLOCK = 128  # tokens whose logits are in memory; 25 MB of float32 with 50,000 entries, which stay in a cache


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states: weight (V, C), and a soft cap where the model has any."""

    weight: Tensor
    cap: float | None = None


def divergence(hidden: Tensor, head: Head, target: Tensor, target_head: Head, rows: int = ROWS) -> Tensor:
    """Return the mean KL of a model's predictions to its teacher's, in nats: a number with gradients.

    Products run in autocast's dtype where it is on; all sums are in float32, or in float64 for such states. Nothing
    flows back to the teacher.

    Args:
        hidden: (R, C), the last hidden states of the model, after its final norm.
        head: of the model.
        target: (R, C of the teacher), its hidden states of the same tokens.
        target_head: of the teacher, of the same vocabulary.
        rows: tokens whose ∂KL/∂y is in memory.

    """
    assert head.weight.shape[0] == target_head.weight.shape[0], "the vocabularies differ"
    assert hidden.shape[0] == target.shape[0] > 0, "states of the same tokens are compared"
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    caps = head.cap, target_head.cap
    return _Divergence.apply(hidden, head.weight, target.detach(), target_head.weight.detach(), caps, dtype, rows)  # type: ignore[return-value]


class _Divergence(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        target_weight: Tensor,
        caps: tuple[float | None, float | None],
        dtype: torch.dtype,
        rows: int,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dtypes = hidden.dtype, weight.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        of_hidden = torch.empty_like(hidden, dtype=wide) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        total = torch.zeros((), device=hidden.device, dtype=wide)
        slopes = hidden.new_empty((min(rows, len(hidden)), len(weight)), dtype=dtype)  # ∂KL/∂y times R
        with torch.autocast(hidden.device.type, enabled=False):
            weight, target_weight = weight.to(dtype), target_weight.to(dtype)
            for start in range(0, len(hidden), rows):
                states = hidden[start : start + rows].to(dtype)  # (ROWS, C)
                targets = target[start : start + rows].to(dtype)
                kept = slopes[: len(states)]
                blocks = zip(states.split(BLOCK), targets.split(BLOCK), kept.split(BLOCK), strict=True)
                for own, other, slope in blocks:
                    log_q, squash = _log_softmax(own @ weight.T, caps[0], wide)
                    log_p, _ = _log_softmax(other @ target_weight.T, caps[1], wide)
                    p = log_p.exp()
                    total += log_p.sub_(log_q).mul_(p).sum()
                    if wants_hidden or wants_weight:
                        change = log_q.exp_().sub_(p)
                        slope.copy_(change if squash is None else change.mul_(squash))
                if of_hidden is not None:
                    of_hidden[start : start + rows] = kept @ weight
                if of_weight is not None:
                    of_weight += kept.T @ states
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.rows, ctx.dtypes = len(hidden), dtypes
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[override]
        scale = gradient / ctx.rows
        gradients = [
            None if slope is None else (slope * scale).to(dtype)
            for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None, None, None, None


def _log_softmax(logits: Tensor, cap: float | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return log probabilities (B, V), and by what a soft cap multiplies gradients."""
    logits = logits.to(dtype)
    if cap is None:
        return logits.log_softmax(-1), None
    squashed = torch.tanh(logits / cap)
    return (squashed * cap).log_softmax(-1), 1 - squashed**2
