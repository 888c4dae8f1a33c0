"""ResFormer (value residual): values of the first or other earlier layers are mixed into a layer's own, then cached.

    V'_n = λ₁ V_1 + λ₂ V_n,  n ≥ 2;  of all layers  V'_n = (V_1 + … + V_n) / n

The added values are always raw, never mixed. By name alone, the weights are trained, as in the paper's later version;
its Eq. 7 is {"name": "resformer", "mode": "identity"}, with λ₁ = λ₂ = ½.

Flows: raw values (or queries, keys) of the new tokens. Reads: every layer with that state of its own. Cache: unchanged
in size, it holds V'. Source: ResFormer (arXiv 2410.17897), Eq. 7 (first), Eq. 5 (all), Fig. 8 (λ), Fig. 9 (queries,
keys), Fig. 11 (previous); its later version has trained weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.method import Carry, Config, HeadMixer, Method, Mixed, State, Wiring
from crosslayer.core.options import check_choice, mixed_layers
from crosslayer.core.plan import STATES
from crosslayer.core.sources import Sources, outside_layer_graphs

FIXED = {"identity": (0.5, 0.5), "constant": (2.0, 1.0), "sparse": (5.0, 1.0)}
MODES = ("identity", "constant", "sparse", "learnable", "dense")
WITH_WEIGHTS = ("constant", "learnable")
SOURCES = ("first", "previous", "all")


@dataclass(frozen=True)
class ResFormer(Method):
    """Raw states of earlier layers are mixed into each layer's own."""

    mode: str = "learnable"
    """The weights λ₁, λ₂: "identity" (½, ½), "constant" (2, 1), "sparse" (5, 1 in the last third of the layers,
    otherwise 0, 1), "learnable" (a trained pair per layer), "dense" (a trained weight for each layer up to its own).
    With the source "all", "identity" is ((n − 1) / n, 1 / n), the mean of the first n layers; trained weights of n
    layers begin there, too."""
    of: str = "values"
    """The state that is mixed: "queries", "keys" or "values"."""
    source: str = "first"
    """The added state: that of the "first" layer, of the "previous" layer, or the mean of "all" earlier layers."""
    weights: tuple[float, ...] = ()
    """λ of V_n + λ V_1 (Fig. 8): a number for all layers, or one for each that mixes, from the second on. It needs mode
    "constant", or "learnable", which begins there."""

    def __post_init__(self):
        check_choice("resformer", "mode", self.mode, MODES)
        check_choice("resformer", "of", self.of, STATES)
        check_choice("resformer", "source", self.source, SOURCES)
        if self.mode == "dense" and self.source != "all":
            raise ValueError(f"resformer: with mode 'dense' source must be 'all', got {self.source!r}")
        if self.weights and self.mode not in WITH_WEIGHTS:
            raise ValueError(f"resformer: weights need mode 'constant' or 'learnable', got {self.mode!r}")

    def heads(self, config: Config, wiring: Wiring, layer: int) -> HeadMixer | None:
        """Mix in every layer that computes the state itself."""
        own_layers = mixed_layers("resformer", wiring.plan, self.of)
        if layer not in own_layers:
            return None
        position = own_layers.index(layer)
        if len(self.weights) > 1 and len(self.weights) != len(own_layers) - 1:
            raise ValueError(f"resformer: weights must be 1 or {len(own_layers) - 1}, got {len(self.weights)}")
        weights = self._weights(position, late=layer >= config.num_hidden_layers - config.num_hidden_layers // 3)
        # the first layer has nothing to mix in: a weight of it would get no gradient
        trained = self.mode in ("learnable", "dense") and position > 0
        mixer = _MixerOfAll if self.source == "all" else _Mixer
        return mixer(self, position == 0, weights, trained)

    def _weights(self, position: int, late: bool) -> tuple[float, ...]:
        """Return the weights, or where they begin, of the layer at `position` among those that compute the state."""
        if self.weights:
            return self.weights[0 if len(self.weights) == 1 else position - 1], 1.0
        if self.mode == "dense":
            return (1 / (position + 1),) * (position + 1)
        if self.source == "all" and self.mode in ("identity", "learnable"):
            return position / (position + 1), 1 / (position + 1)
        if self.mode == "sparse" and not late:
            return 0.0, 1.0
        return FIXED.get(self.mode, (0.5, 0.5))


class _Mixer(HeadMixer):
    """Mixes a state; puts the raw state into the carry."""

    def __init__(self, method: ResFormer, first: bool, weights: tuple[float, ...], trained: bool):
        super().__init__()
        self.method, self.first, self.initial = method, first, weights
        self.state, self.key = STATES.index(method.of), f"resformer.{method.of}"
        self.weights = nn.Parameter(torch.tensor(weights)) if trained else None  # (2 or N,)

    def reset(self) -> None:
        if self.weights is not None:
            init.copy_(self.weights, torch.tensor(self.initial, dtype=self.weights.dtype, device=self.weights.device))

    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        states = [q, k, v]  # (B, H, T, D), (B, H_kv, T, D) twice
        raw = states[self.state]
        assert raw is not None
        below: Sequence[Tensor] = carry.get(self.key, ())
        if not self.first:
            states[self.state] = self._mix(raw, below)
        passed = Sources((*below, raw)) if self.method.source == "all" else (raw,)
        if self.method.source == "first" and below:
            passed = below
        q, k, v = states
        return q, k, v, {**carry, self.key: passed}

    def _mix(self, raw: Tensor, below: Sequence[Tensor]) -> Tensor:
        weights = self.initial if self.weights is None else self.weights
        if self.method.mode == "dense":
            total = weights[0] * below[0]
            for weight, state in zip(weights[1:], (*below[1:], raw), strict=True):
                total = total + weight * state
            return total
        added = below[0] if len(below) == 1 else torch.stack(tuple(below)).mean(dim=0)  # (N, B, H, T, D) → (B, H, T, D)
        if self.weights is not None:
            return weights[0] * added + weights[1] * raw
        # sparse, before the last third: bit for bit like Llama
        weight_added, weight_own = self.initial
        if weight_added == 0:
            return raw
        return torch.add(raw if weight_own == 1 else raw * weight_own, added, alpha=weight_added)


class _MixerOfAll(_Mixer):
    """Mixes with the states of all layers below, whose number differs from layer to layer."""

    # a tuple that grows with depth compiles every layer again, up to torch's limit of 8; later layers run eagerly
    @outside_layer_graphs
    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        return super().before(q, k, v, carry)
