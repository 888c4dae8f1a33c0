"""The chain of layers: each is predicted from decoded layers below, and the rest is coded in the metric of its cost.

    ŷ_l = b_l + A_l ŷ_k + U_l ẑ s_t,   z = D_l (y_l − b_l − A_l ŷ_k) / s_t,   ẑ = decoded(round(z))

y are keys before rotation and values of a token. ŷ_k are those of up to two layers side by side, the nearest below that
hold every token that l holds; layer 0 has none. s_t is the token's step: finer for tokens that later ones read more.
Tokens do not depend on each other, so any run of tokens decodes alone.

Shapes: N tokens, W numbers of a layer for each token, R channels of a layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from crosslayer.codec.entropy import Coder, quantized
from crosslayer.codec.states import CodedLayer
from crosslayer.machine import float32_sums

# Tokens of a block. Prompts share whole blocks, which smaller ones do earlier; a block of 1,024 tokens has a quarter of
# the headers and tables.
BLOCK = 256
STEPS_PER_OCTAVE = 16  # steps of tokens are whole powers of 2^(1/16), a byte each
CENTER = 128  # the byte of the step 1
RECENT = 400  # tokens from the end, beyond which distance makes no difference
# Of the cost in the step: exp(−½ · 0.75 · log cost). With 1, all tokens would have the same part of the damage.
POWER = 0.75
FINEST, COARSEST = 1 / 64, 8.0
FLOOR = 1e-6  # of squared norms
# Layers that predict one. Two instead of one have 0.95 times the KL at an eighth and 0.78 at a sixteenth (SmolLM2);
# three overfit the calibration text: 1.3 times that of two at an eighth.
SOURCES = 2


@dataclass(frozen=True)
class Layer:
    """The parameters of a layer, for a step of 1.

    Attributes:
        shape: of its states.
        sources: the layers below that predict it, if any.
        offset: (W,).
        predict: from the sources' states, (W of the sources together, W).
        down: (W, R), to coefficients in steps.
        up: (R, W), back.
        shift: of what the codes of each channel are decoded to, (R,).
        classes: of the channels, (R,), in increasing order.
    """

    shape: CodedLayer
    sources: tuple[int, ...]
    offset: Tensor
    predict: Tensor
    down: Tensor
    up: Tensor
    shift: Tensor
    classes: Tensor

    def coded(self, prediction: Tensor, states: Tensor, steps: Tensor) -> Tensor:
        """Return the codes (R, N), as floats, of states (N, W)."""
        return quantized((self.down.T @ (states - prediction).T).div_(steps))

    def decoded(self, prediction: Tensor, codes: Tensor, steps: Tensor) -> Tensor:
        """Return decoded states (N, W) from codes (R, N), as floats, and steps (N,)."""
        return torch.addmm(prediction, self.coefficients(codes, steps).T, self.up)

    def coefficients(self, codes: Tensor, steps: Tensor) -> Tensor:
        """Return what codes (R, N), as floats, stand for, times the steps (N,)."""
        return torch.addcmul(codes, codes.sign(), self.shift[:, None]).mul_(steps)


@dataclass(eq=False)
class Chain:
    """The layers together, with what says how much each token is read."""

    layers: list[Layer]
    importance: "Importance"

    @property
    def numbers(self) -> int:
        """Parameters of the matrices."""
        matrices = ((layer.offset, layer.predict, layer.down, layer.up) for layer in self.layers)
        return sum(matrix.numel() for of_layer in matrices for matrix in of_layer)

    @cached_property
    def coder(self) -> Coder:
        """What makes bytes of codes."""
        return Coder([layer.classes for layer in self.layers])

    def bytes_per_token(self, states: Sequence[Tensor], steps: Tensor) -> float:
        """Return the bytes that the codes of a token take in blocks of 256; all layers hold all N tokens."""
        codes, _ = code_layers(self.layers, states, steps)
        size = 0
        for begin in range(0, len(steps), BLOCK):
            size += sum(map(len, self.coder.encode([code[:, begin : begin + BLOCK] for code in codes])))
        return size / len(steps)


@dataclass(frozen=True)
class HalfLayer:
    """A layer that decodes states less their mean, in float16: what a GPU multiplies fastest.

        m_l = b_l + A_l m_k,   ŷ_l − m_l = A_l (ŷ_k − m_k) + U_l ẑ s_t

    With the means taken off, KL is 1.008 (0.999-1.016) times that of float32 on SmolLM2 at an eighth, over 24 windows
    (benchmarks/codec_half.py). A trial that left them in had 1.02 on SmolLM2, and 2.4 on Qwen2.5, whose keys have
    biases. With bfloat16, it had 4 to 1,000 either way.

    Attributes:
        mean: (W,), float32.
        predict: A, float16.
        up: U, float16.
    """

    mean: Tensor
    predict: Tensor
    up: Tensor

    def decoded(self, below: Sequence[Tensor], coefficients: Tensor) -> Tensor:
        """Return states less their mean (N, W) from those of the layer's sources, and coefficients (R, N)."""
        states = half_product(coefficients.T, self.up)
        for source, matrix in zip(below, self.predict.split([source.shape[1] for source in below]), strict=True):
            states = half_product(source, matrix, states)
        return states


def half_product(left: Tensor, right: Tensor, base: Tensor | None = None) -> Tensor:
    """Return base + left @ right of float16, summed in float32; on a CPU as a GPU would."""
    if left.is_cuda:
        with float32_sums():
            return left @ right if base is None else torch.addmm(base, left, right)
    result = left.float() @ right.float()
    return (result if base is None else result + base.float()).half()


def half_layers(layers: Sequence[Layer]) -> list[HalfLayer]:
    """Return layers that decode in float16."""
    means: list[Tensor] = []
    for layer in layers:
        below = [means[source][None] for source in layer.sources]
        means.append(predicted(below, layer.predict, layer.offset).reshape(-1))
    return [HalfLayer(mean, layer.predict.half(), layer.up.half()) for mean, layer in zip(means, layers, strict=True)]


def code_layers(
    layers: Sequence[Layer], states: Sequence[Tensor], steps: Tensor
) -> tuple[list[np.ndarray], list[Tensor]]:
    """Return the codes (R, N), int16, and the decoded states (N, W) of each layer, from the latest N that it holds.

    `steps` are those of all tokens.
    """
    codes: list[np.ndarray] = []
    decoded: list[Tensor] = []
    for layer, layer_states in zip(layers, states, strict=True):
        held = steps[len(steps) - len(layer_states) :]
        prediction = predicted(below_of(layer.sources, decoded, len(layer_states)), layer.predict, layer.offset)
        layer_codes = layer.coded(prediction, layer_states, held)
        codes.append(layer_codes.to(torch.int16).cpu().numpy())
        decoded.append(layer.decoded(prediction, layer_codes, held))
    return codes, decoded


def predicted(below: Sequence[Tensor], predict: Tensor, offset: Tensor) -> Tensor:
    """Return offset (W,) + below @ predict, (N, W) or without sources (W,), from the sources' states side by side."""
    # one product for each source: side by side they would be copied first
    for states, matrix in zip(below, predict.split([states.shape[1] for states in below]), strict=True):
        offset = torch.addmm(offset, states, matrix)
    return offset


def below_of(sources: Sequence[int], decoded: Sequence[Tensor] | Mapping[int, Tensor], count: int) -> list[Tensor]:
    """Return the decoded states (N, W) of each of a layer's sources, of the latest `count` tokens."""
    if any(len(decoded[source]) < count for source in sources):
        raise ValueError("a layer has tokens that the layers predicting it lack")
    return [decoded[source][len(decoded[source]) - count :] for source in sources]


@dataclass(frozen=True)
class Importance:
    """How much later tokens read a token, from the norms of its keys and values and its distance from the end.

    A regression of log cost, features (F,): log ‖k‖² of each head and layer, log ‖v‖², log distance.
    """

    mean: Tensor
    spread: Tensor
    weight: Tensor

    def steps(self, states: Sequence[Tensor], shapes: Sequence[CodedLayer], count: int) -> Tensor:
        """Return the bytes (N,) of the steps of `count` tokens, from states of the latest that each layer holds."""
        standardized = (features(states, shapes, count, self.mean) - self.mean) / self.spread
        cost = standardized @ self.weight
        # the first token is stored as it is, so the mean that the others are compared with leaves it out
        cost = cost - cost[1:].mean() if len(cost) > 1 else torch.zeros_like(cost)
        steps = torch.exp(-0.5 * POWER * cost).clamp(FINEST, COARSEST)
        return (steps.log2() * STEPS_PER_OCTAVE).round().add(CENTER).clamp(0, 255).to(torch.uint8)


def step_sizes(steps: Tensor) -> Tensor:
    """Return the steps (N,) of bytes."""
    return torch.exp2((steps.float() - CENTER) / STEPS_PER_OCTAVE)


def features(
    states: Sequence[Tensor], shapes: Sequence[CodedLayer], count: int, missing: Tensor | None = None
) -> Tensor:
    """Return the features (N, F) of `count` tokens; `missing` (F,) stands for layers that do not hold one any more."""
    by_layer = []
    for layer_states, shape in zip(states, shapes, strict=True):
        keys, values = layer_states.split([shape.heads * shape.key, shape.heads * shape.value], 1)
        norms = [part.unflatten(1, (shape.heads, -1)).square().sum(-1) for part in (keys, values)]
        by_layer.append(torch.cat(norms, 1).clamp_min(FLOOR).log())
    width = sum(norms.shape[1] for norms in by_layer)
    out = by_layer[0].new_zeros(count, width + 1) if missing is None else missing.repeat(count, 1)
    at = 0
    for norms in by_layer:
        out[count - len(norms) :, at : at + norms.shape[1]] = norms
        at += norms.shape[1]
    out[:, -1] = torch.arange(count, 0, -1, device=out.device).clamp_max(RECENT).log()
    return out


def sources(shapes: Sequence[CodedLayer]) -> list[tuple[int, ...]]:
    """Return the layers that predict each layer: the nearest below that hold every token which the layer holds."""
    held = [math.inf if shape.window is None else shape.window for shape in shapes]
    holding = ([below for below in range(index) if held[below] >= tokens] for index, tokens in enumerate(held))
    return [tuple(below[-SOURCES:]) for below in holding]
