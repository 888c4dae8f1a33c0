"""The loss of distillation: a model is trained towards the predictions of another, its teacher.

    KL = mean over tokens of Σ_v p_v (log p_v − log q_v),   p = softmax(z),  z = g W_tᵀ,   q = softmax(y),  y = h W_sᵀ

No token is predicted across document boundaries.

The logits of all tokens are never in memory at once: they are computed for BLOCK tokens at a time. ∂KL/∂y = (q − p) / R
depends on nothing that comes later, so it is computed with the value. Its products wait for ROWS tokens, since each one
updates all of ∂KL/∂W_s.

Shapes: B batch, T tokens, R tokens with labels, C hidden (of either model), V vocabulary.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.training.rows import IGNORED

# tokens whose ∂KL/∂y is in memory, in the dtype of the products. Each product with it adds to all of ∂KL/∂W_s: 2,048
# tokens of a vocabulary of 49,152 took 1.13 s on two cores, and 1.8 s with a product for every block
ROWS = 1024
# tokens whose logits are in memory; 25 MB of float32 with 50,000 entries, which fits the CPU's cache
BLOCK = 128


@dataclass(frozen=True)
class Head:
    """The language-model head: weight (V, C), and a soft cap if the model has one."""

    weight: Tensor
    cap: float | None = None


def divergence(hidden: Tensor, head: Head, target: Tensor, target_head: Head, rows: int = ROWS) -> Tensor:
    """Return the mean KL of a model's predictions to its teacher's, in nats, as a scalar with gradients.

    `hidden` (R, C) and `target` (R, C of the teacher) are last hidden states of the same tokens, after the final norm;
    ∂KL/∂y of `rows` tokens is in memory. Products run in autocast's dtype if it is on; all sums are in float32, or in
    float64 for float64 states. The teacher gets no gradients.
    """
    assert head.weight.shape[0] == target_head.weight.shape[0], "the vocabularies differ"
    assert hidden.shape[0] == target.shape[0] > 0, "hidden and target must be of the same tokens"
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
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
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtypes = hidden.dtype, weight.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        of_hidden = torch.empty_like(hidden, dtype=wide) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        total = torch.zeros((), device=hidden.device, dtype=wide)
        slopes = hidden.new_empty((min(rows, len(hidden)), len(weight)), dtype=dtype)  # ∂KL/∂y times R
        # the dtype of each product is chosen here
        with torch.autocast(hidden.device.type, enabled=False):
            weight, target_weight = weight.to(dtype), target_weight.to(dtype)
            for start in range(0, len(hidden), rows):
                states = hidden[start : start + rows].to(dtype)  # (ROWS, C)
                targets = target[start : start + rows].to(dtype)
                filled = slopes[: len(states)]
                blocks = zip(states.split(BLOCK), targets.split(BLOCK), filled.split(BLOCK), strict=True)
                for student, teacher, slope in blocks:
                    log_q, squash = _log_softmax(student @ weight.T, caps[0], wide)
                    log_p, _ = _log_softmax(teacher @ target_weight.T, caps[1], wide)
                    # in place from here on, so that a block's tensors stay in the cache
                    p = log_p.exp()
                    total += log_p.sub_(log_q).mul_(p).sum()
                    if needs_hidden or needs_weight:
                        change = log_q.exp_().sub_(p)
                        slope.copy_(change if squash is None else change.mul_(squash))
                if of_hidden is not None:
                    of_hidden[start : start + rows] = filled @ weight
                if of_weight is not None:
                    of_weight += filled.T @ states
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
    """Return log probabilities of a block (BLOCK, V), and the factor of a soft cap on gradients."""
    logits = logits.to(dtype)
    if cap is None:
        return logits.log_softmax(-1), None
    squashed = torch.tanh(logits / cap)
    return (squashed * cap).log_softmax(-1), 1 - squashed**2


class Teacher:
    """A frozen model; another is trained towards its predictions."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.head = model.eval(), head_of(model)

    def loss(
        self, student: Any, inputs: dict[str, Any], autocast: AbstractContextManager[None]
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a model over the tokens with labels, and their number; products run in `autocast`."""
        counts = inputs["labels"][:, 1:] != IGNORED  # (B, T − 1): the token before each predicts it
        given = {**{name: value for name, value in inputs.items() if name != "labels"}, "use_cache": False}
        # accelerate wraps only the forward of the trained model, so the products with the head would be in float32
        with autocast:
            states = student.get_decoder()(**given).last_hidden_state  # (B, T, C)
            with torch.no_grad():
                decoder: Any = self.model.get_decoder()
                targets = decoder(**given).last_hidden_state
            loss = divergence(states[:, :-1][counts], head_of(student), targets[:, :-1][counts], self.head)
        return loss, counts.sum()


def head_of(model: nn.Module) -> Head:
    """Return the language-model head; in all supported families it is a weight and maybe a soft cap."""
    assert isinstance(model, nn.Module)
    config: Any = model.config
    translated = config if isinstance(config, CrossLayerConfig) else to_config(config)
    embeddings: Any = model.get_output_embeddings()  # type: ignore[operator]
    return Head(embeddings.weight, translated.final_logit_softcapping)
