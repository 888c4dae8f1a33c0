"""How far the predictions of a model are from those of its teacher, without the logits of all tokens at once.

    KL = mean over rows of Σ_v p_v (log p_v − log q_v),   p = softmax(z),  z = g W_tᵀ,   q = softmax(y),  y = h W_sᵀ

Forward: Σ p (z − y) − lse z + lse y, whose sums run over the vocabulary a chunk at a time, each rescaled when a larger
logit comes (Milakov and Gimelshein 2018). Backward: a second sweep makes the logits of each chunk again, since
∂KL/∂y = (q − p) / R needs both normalisers. At no time do logits exist but those of a chunk.

Shapes: R rows (tokens), C hidden (of either model), V vocabulary, K entries of a chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

CHUNK = 4096  # K: entries of the vocabulary


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states: weight (V, C), and a soft cap where the model has any."""

    weight: Tensor
    cap: float | None = None


def divergence(hidden: Tensor, head: Head, target: Tensor, target_head: Head, chunk: int = CHUNK) -> Tensor:
    """Return the mean KL of a model's predictions to its teacher's, in nats: a number with gradients.

    Products run in autocast's dtype where it is on; all sums are in float32, or in float64 for such states. Nothing
    flows back to the teacher.

    Args:
        hidden: (R, C), the last hidden states of the model, after its final norm.
        head: of the model.
        target: (R, C of the teacher), its hidden states of the same tokens.
        target_head: of the teacher, of the same vocabulary.
        chunk: K.

    """
    assert head.weight.shape[0] == target_head.weight.shape[0], "the vocabularies differ"
    assert hidden.shape[0] == target.shape[0] > 0, "states of the same tokens are compared"
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    sweep = _Sweep(head.cap, target_head.cap, dtype, chunk)
    return _Divergence.apply(hidden, head.weight, target.detach(), target_head.weight.detach(), sweep)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Sweep:
    """What makes the logits of a chunk, again and again the same."""

    cap: float | None
    target_cap: float | None
    dtype: torch.dtype
    chunk: int

    def starts(self, weight: Tensor) -> range:
        return range(0, weight.shape[0], self.chunk)

    def logits(self, hidden: Tensor, weight: Tensor, start: int, cap: float | None) -> Tensor:
        """Return logits (R, K) in float32 or wider."""
        part = weight[start : start + self.chunk].to(self.dtype)
        raw = (hidden.to(self.dtype) @ part.T).to(torch.promote_types(hidden.dtype, torch.float32))
        return raw if cap is None else torch.tanh(raw / cap) * cap


class _Divergence(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, target_weight: Tensor, sweep: _Sweep):
        kind = hidden.device.type
        with torch.autocast(kind, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            own, other = (_Normaliser(len(hidden), hidden.device, wide) for _ in range(2))
            product = torch.zeros(len(hidden), device=hidden.device, dtype=wide)  # (R,): Σ p (z − y), times Σ exp
            for start in sweep.starts(weight):
                y = sweep.logits(hidden, weight, start, sweep.cap)  # (R, K)
                z = sweep.logits(target, target_weight, start, sweep.target_cap)  # (R, K)
                own.add(y)
                shrunk, shares = other.add(z)  # (R,), (R, K)
                product = product * shrunk + (shares * (z - y)).sum(-1)
            rows = product / other.sums - other.logsumexp() + own.logsumexp()  # (R,)
        ctx.save_for_backward(hidden, weight, target, target_weight, own.logsumexp(), other.logsumexp())
        ctx.sweep = sweep
        return rows.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[override]
        hidden, weight, target, target_weight, lse, target_lse = ctx.saved_tensors
        sweep: _Sweep = ctx.sweep
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        scale = gradient / len(hidden)
        of_hidden = torch.zeros(hidden.shape, device=hidden.device, dtype=lse.dtype) if wants_hidden else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in sweep.starts(weight):
                y = sweep.logits(hidden, weight, start, sweep.cap)  # (R, K)
                z = sweep.logits(target, target_weight, start, sweep.target_cap)
                slope = ((y - lse[:, None]).exp() - (z - target_lse[:, None]).exp()) * scale  # (R, K): ∂/∂y
                if sweep.cap is not None:
                    slope = slope * (1 - (y / sweep.cap) ** 2)
                slope = slope.to(sweep.dtype)
                part = slice(start, start + sweep.chunk)
                if of_hidden is not None:
                    of_hidden += slope @ weight[part].to(sweep.dtype)
                if of_weight is not None:
                    of_weight[part] = slope.T @ hidden.to(sweep.dtype)
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, None, None, None


class _Normaliser:
    """The sum of exponentials of every row, over the chunks so far, relative to the largest logit so far."""

    def __init__(self, rows: int, device: torch.device, dtype: torch.dtype):
        self.largest = torch.full((rows,), -torch.inf, device=device, dtype=dtype)  # (R,)
        self.sums = torch.zeros(rows, device=device, dtype=dtype)  # (R,)

    def add(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take a chunk (R, K); return by what all sums so far were multiplied (R,), and the chunk's terms (R, K)."""
        largest = torch.maximum(self.largest, logits.amax(-1))
        shrunk, terms = (self.largest - largest).exp(), (logits - largest[:, None]).exp()
        self.largest, self.sums = largest, self.sums * shrunk + terms.sum(-1)
        return shrunk, terms

    def logsumexp(self) -> Tensor:
        """Return the normaliser of every row (R,)."""
        return self.largest + self.sums.log()
