"""The chain of layers: each is predicted from decoded layers below, and the rest is coded in the metric of its cost.

    ŷ_l = m_l + A_l (ŷ_k − m_k) + U_l ẑ,   z = D_l (y_l − m_l − A_l (ŷ_k − m_k)) / s_t,   ẑ = s_t · decoded(round(z))

y are keys before rotation and values of a token. ŷ_k are those of up to two layers side by side, the nearest below that
hold every token that l holds; layer 0 has none. s_t is the token's step: finer for tokens that later ones read more.
Tokens do not depend on each other, so any run of tokens decodes alone.

Shapes: N tokens, W numbers of a layer for each token, R channels of a layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosslayer.codec.entropy import Coder
from crosslayer.codec.states import LayerShape

PER_OCTAVE = 16  # steps of tokens are whole powers of 2^(1/16), a byte each
CENTER = 128  # the byte of the step 1
RECENT = 400  # tokens from the end, beyond which distance makes no difference
POWER = 0.75  # of the cost in the step: exp(−½ · 0.75 · log cost)
FINEST, COARSEST = 1 / 64, 8.0
FLOOR = 1e-6  # of squared norms
SOURCES = 2  # layers that predict one


@dataclass(frozen=True)
class Layer:
    """The parameters of a layer, for a step of 1.

    Attributes:
        shape: of its states.
        sources: the layers below that predict it, if any.
        mean: (W,).
        predict: from the sources' states less their mean, (W of the sources together, W).
        down: (W, R), to coefficients in steps.
        up: (R, W), back.
        coder: of the R channels.

    """

    shape: LayerShape
    sources: tuple[int, ...]
    mean: Tensor
    predict: Tensor
    down: Tensor
    up: Tensor
    coder: Coder

    def predicted(self, below: Tensor | None) -> Tensor:
        """Return the prediction (N, W), or the mean (W,), from what `below_of` returns."""
        return self.mean if below is None else torch.addmm(self.mean, below, self.predict)

    def decoded(self, below: Tensor | None, coefficients: Tensor, steps: Tensor) -> Tensor:
        """Return decoded states (N, W) from decoded coefficients (R, N) and steps (N,)."""
        return torch.addmm(self.predicted(below), (coefficients * steps).T, self.up)

    def coded(self, below: Tensor | None, states: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (R, N) of states (N, W), and what they are decoded to, (R, N), in steps."""
        rest = states - self.predicted(below)
        return self.coder.rounded(self.down.T @ rest.T / steps)


class Chain:
    """The layers together, with what says how much each token is read."""

    def __init__(self, layers: Sequence[Layer], importance: "Importance"):
        self.layers, self.importance = list(layers), importance

    @property
    def numbers(self) -> int:
        """Parameters of the matrices."""
        return sum(x.numel() for layer in self.layers for x in (layer.mean, layer.predict, layer.down, layer.up))

    def bits(self, states: Sequence[Tensor], steps: Tensor) -> Tensor:
        """Return the bits of the codes of each token, (N,); all layers hold all tokens."""
        codes, _ = code_layers(self.layers, states, steps)
        return sum((layer.coder.bits(code) for layer, code in zip(self.layers, codes, strict=True)), torch.zeros(1))


def code_layers(layers: Sequence[Layer], states: Sequence[Tensor], steps: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the codes (R, N) and the decoded states (N, W) of each layer, from states of the latest N tokens it holds.

    `steps` are those of all tokens.
    """
    codes: list[Tensor] = []
    decoded: list[Tensor] = []
    for layer, own in zip(layers, states, strict=True):
        last = steps[len(steps) - len(own) :]
        below = below_of(layers, layer.sources, decoded, len(own))
        code, coefficients = layer.coded(below, own, last)
        codes.append(code)
        decoded.append(layer.decoded(below, coefficients, last))
    return codes, decoded


def below_of(
    layers: Sequence[Layer], sources: Sequence[int], decoded: Sequence[Tensor] | Mapping[int, Tensor], count: int
) -> Tensor | None:
    """Return the decoded states of a layer's sources side by side, less their means, of the latest tokens.

    (N, W of the sources together); None without sources.
    """
    if any(len(decoded[source]) < count for source in sources):
        raise ValueError("a layer holds tokens that the layers which predict it do not")
    parts = [decoded[source][len(decoded[source]) - count :] - layers[source].mean for source in sources]
    return torch.cat(parts, 1) if parts else None


@dataclass(frozen=True)
class Importance:
    """How much later tokens read a token, from the norms of its keys and values and its distance from the end.

    A regression of log cost, features (F,): log ‖k‖² of each head and layer, log ‖v‖², log distance.
    """

    mean: Tensor
    spread: Tensor
    weight: Tensor

    def steps(self, states: Sequence[Tensor], shapes: Sequence[LayerShape], count: int) -> Tensor:
        """Return the bytes (N,) of the steps of `count` tokens, from states of the latest that each layer holds."""
        values = (features(states, shapes, count, self.mean) - self.mean) / self.spread
        cost = values @ self.weight
        cost = cost - cost[1:].mean() if len(cost) > 1 else torch.zeros_like(cost)
        steps = torch.exp(-0.5 * POWER * cost).clamp(FINEST, COARSEST)
        return (steps.log2() * PER_OCTAVE).round().add(CENTER).clamp(0, 255).to(torch.uint8)


def step_sizes(steps: Tensor) -> Tensor:
    """Return the steps (N,) of bytes."""
    return torch.exp2((steps.float() - CENTER) / PER_OCTAVE)


def features(
    states: Sequence[Tensor], shapes: Sequence[LayerShape], count: int, missing: Tensor | None = None
) -> Tensor:
    """Return the features (N, F) of `count` tokens; `missing` (F,) stands for layers that do not hold one any more."""
    rows = []
    for own, shape in zip(states, shapes, strict=True):
        keys, values = own.split([shape.heads * shape.key, shape.heads * shape.value], 1)
        norms = [part.unflatten(1, (shape.heads, -1)).square().sum(-1) for part in (keys, values)]
        rows.append((len(own), torch.cat(norms, 1).clamp_min(FLOOR).log()))
    width = sum(own.shape[1] for _, own in rows)
    out = rows[0][1].new_zeros(count, width + 1) if missing is None else missing.repeat(count, 1)
    at = 0
    for held, own in rows:
        out[count - held :, at : at + own.shape[1]] = own
        at += own.shape[1]
    out[:, -1] = torch.arange(count, 0, -1, device=out.device).clamp_max(RECENT).log()
    return out


def sources(shapes: Sequence[LayerShape]) -> list[tuple[int, ...]]:
    """Return the layers that predict each layer: the nearest below that hold every token which the layer holds."""
    held = [math.inf if shape.window is None else shape.window for shape in shapes]
    holding = ([below for below in range(index) if held[below] >= tokens] for index, tokens in enumerate(held))
    return [tuple(found[-SOURCES:]) for found in holding]
