"""Cross-layer attention (CLA): groups of consecutive layers use the keys and values of the group's first layer.

    U_n = softmax(Q_n K_l^T / √d) V_l,  l = the source of n's group

Flows: keys and values. Reads: every reader, its source's. Cache: keys and values of sources.
Source: Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention".

Pretrained key and value projections of a group can be merged. "first": keep the source's. "mean": the mean of the
group's projections, expressed for the source's normalised input. "svd": the shared projection that best fits all of
them up to a factor per layer: a complex number per rotary pair for keys, a D × D matrix per head for values. A layer's
factor is folded into its own W_q or W_o, so that no parameters are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from crosslayer.core.method import Compensated, Config, Wiring
from crosslayer.core.options import group_sources, sharing_groups
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class CLA(Compensated):
    """Groups of `group` consecutive layers from `start` to `end` (the last may be shorter), or the given `groups`."""

    saves = ("keys", "values")
    merges = ("first", "mean", "svd")

    group: int = 2
    """Layers per group."""
    start: int = 0
    """The first layer of the first group."""
    end: int | None = None
    """The layer after the last group; None: groups extend to the last layer."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """Explicit groups of 0-based layers in rising order, instead of `group`, `start` and `end`."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the layers of a group read its first layer's keys and values."""
        own, source = tuple(range(layers)), group_sources("cla", "groups", self._groups(layers), layers)
        return DepthPlan(own, source, source, own)

    def _groups(self, layers: int) -> tuple[tuple[int, ...], ...]:
        if self.groups is not None:
            if (self.group, self.start, self.end) != (2, 0, None):
                raise ValueError("cla: groups cannot be combined with group, start and end; leave these out")
            return self.groups
        end = layers if self.end is None else self.end
        if not 0 <= self.start < end <= layers:
            raise ValueError(
                f"cla: start and end must satisfy 0 ≤ start < end ≤ {layers} layers, got {self.start} and {end}"
            )
        if not 1 <= self.group <= layers:
            raise ValueError(f"cla: group must be 1 to {layers} (the number of layers), got {self.group}")
        return tuple(tuple(range(i, min(i + self.group, end))) for i in range(self.start, end, self.group))

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Return CLA with these groups."""
        return cls(groups=sharing_groups("cla", groups))

    def inherit(self, weights: dict[str, Tensor], config: Config, wiring: Wiring, merge: str) -> list[str]:
        """Merge the key and value projections of each group with readers."""
        if merge == "first":
            return []
        assert config.head_dim is not None
        groups = self._attending_groups(wiring.plan)
        if not groups:
            raise ValueError(
                f"cla: merge {merge!r} needs groups of at least two layers with attention, got none; use first"
            )
        if merge == "svd" and config.head_dim > config.hidden_size:
            raise ValueError(
                f"cla: merge 'svd' needs head_dim of at most hidden_size = {config.hidden_size}, got "
                f"{config.head_dim}; use first or mean"
            )
        if merge == "svd" and any("q_norm" in name for name in weights):
            raise ValueError(
                "cla: merge 'svd' folds factors of the keys into W_q, which qk_norm would undo; use first or mean"
            )
        changed = []
        for group in groups:
            for state in "kv":
                changed += _merge(weights, config, group, state, merge)
        return changed

    def _attending_groups(self, merged: DepthPlan) -> list[list[int]]:
        """Return the groups with readers, without layers whose attention another method drops."""
        layers = range(merged.layers)
        sources = self.plan(merged.layers).keys
        groups = [
            [i for i in layers if sources[i] == source and merged.attends(i)] for source in dict.fromkeys(sources)
        ]
        return [group for group in groups if len(group) > 1]


def _merge(weights: dict[str, Tensor], config: Config, group: list[int], state: str, merge: str) -> list[str]:
    """Merge the key ("k") or value ("v") projections of a group into its source's; return the changed names."""
    offset = config.components.gain_offset
    gains = [weights[_prefix(layer) + "input_layernorm.weight"].double() + offset for layer in group]
    stacked = torch.stack(
        [_with_gain(weights, *pair, state) for pair in zip(group, gains, strict=True)]
    )  # (G, H_kv·D, C [+ 1, the bias])
    if merge == "mean":
        return _write(weights, group[0], gains[0], state, stacked.mean(dim=0))
    assert config.head_dim is not None and config.num_key_value_heads is not None
    repeat = config.num_attention_heads // config.num_key_value_heads
    shared, factors = (_svd_keys if state == "k" else _svd_values)(stacked, config.head_dim)
    factors = factors.repeat_interleave(repeat, dim=1)  # (G, H_kv, …) → (G, H, …)
    fold = _fold_keys if state == "k" else _fold_values
    changed = []
    for layer, factor in zip(group, factors, strict=True):
        changed += fold(weights, layer, factor)
    return changed + _write(weights, group[0], gains[0], state, shared)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _with_gain(weights: dict[str, Tensor], layer: int, gain: Tensor, state: str) -> Tensor:
    """Return a projection (H_kv·D, C [+ 1]) with its norm's gain (C,) and, as the last column, its bias, in float64."""
    matrix = weights[f"{_prefix(layer)}self_attn.{state}_proj.weight"].double() * gain
    bias = weights.get(f"{_prefix(layer)}self_attn.{state}_proj.bias")
    return matrix if bias is None else torch.cat([matrix, bias.double()[:, None]], dim=1)


def _write(weights: dict[str, Tensor], source: int, gain: Tensor, state: str, shared: Tensor) -> list[str]:
    """Replace the source's projection so that `_with_gain` returns `shared`."""
    name = f"{_prefix(source)}self_attn.{state}_proj."
    matrix = shared[:, : len(gain)] / torch.where(gain == 0, torch.ones_like(gain), gain)
    weights[name + "weight"] = matrix.to(weights[name + "weight"].dtype)
    if shared.shape[1] == len(gain):
        return [name + "weight"]
    weights[name + "bias"] = shared[:, -1].to(weights[name + "bias"].dtype)
    return [name + "weight", name + "bias"]


def _svd_keys(stacked: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return shared keys (H_kv·D, C) and a complex factor for each layer, head and rotary pair: k_l ≈ factor · k.

    Only multiplication by a complex number commutes with the rotation of the pair (i, i + D/2).
    """
    group, rows, width = stacked.shape
    split = stacked.view(group, rows // size, 2, size // 2, width)  # (G, H_kv, 2, D/2, C)
    paired = torch.complex(split[:, :, 0], split[:, :, 1]).permute(1, 2, 0, 3)  # (H_kv, D/2, G, C)
    left, values, right = torch.linalg.svd(paired, full_matrices=False)
    scale = values[..., 0] / group**0.5  # so that equal layers have factors of absolute value 1
    shared = scale[..., None] * right[..., 0, :]  # (H_kv, D/2, C)
    factors = left[..., 0] * group**0.5  # (H_kv, D/2, G)
    turned = factors[..., :1] / factors[..., :1].abs().clamp(min=1e-30)  # the source's factor becomes real
    shared, factors = shared * turned, factors / turned
    rows_of_pairs = torch.stack([shared.real, shared.imag], dim=1).reshape(
        rows, width
    )  # (H_kv, 2, D/2, C) → (H_kv·D, C)
    return rows_of_pairs, factors.permute(2, 0, 1)  # (G, H_kv, D/2)


def _svd_values(stacked: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return shared values (H_kv·D, C) and, for each layer and head, the matrix R (D, D) with v_l ≈ R v."""
    group, rows, width = stacked.shape
    heads = rows // size
    tall = stacked.view(group, heads, size, width).transpose(0, 1).reshape(heads, -1, width)  # (H_kv, G·D, C)
    left, values, right = torch.linalg.svd(tall, full_matrices=False)
    shared = right[:, :size].reshape(rows, width) * group**-0.5
    scaled = left[..., :size] * values[:, None, :size]  # (H_kv, G·D, D)
    return shared, scaled.view(heads, group, size, size).transpose(0, 1) * group**0.5  # (G, H_kv, D, D)


def _fold_values(weights: dict[str, Tensor], layer: int, factor: Tensor) -> list[str]:
    """Multiply the output projection (C, H·D) of a layer by its factors (H, D, D)."""
    name = f"{_prefix(layer)}self_attn.o_proj.weight"
    old = weights[name]
    matrix = old.double().view(old.shape[0], *factor.shape[:2])  # (C, H, D)
    weights[name] = torch.einsum("chd,hde->che", matrix, factor).reshape(old.shape).to(old.dtype)
    return [name]


def _fold_keys(weights: dict[str, Tensor], layer: int, factor: Tensor) -> list[str]:
    """Multiply the query projection of a layer, weight and bias, by its factors (H, D/2)."""
    prefix = f"{_prefix(layer)}self_attn.q_proj."
    changed = [name for name in (prefix + "weight", prefix + "bias") if name in weights]
    for name in changed:
        weights[name] = _turned(weights[name], factor)
    return changed


def _turned(rows: Tensor, factor: Tensor) -> Tensor:
    """Multiply the rotary pairs of queries by the conjugate factors, so that q · (factor k) = (conj(factor) q) · k."""
    split = rows.double().view(len(factor), 2, -1, *rows.shape[1:])  # (H, 2, D/2 [, C])
    paired = torch.complex(split[:, 0], split[:, 1])
    paired = paired * factor.conj().view(*factor.shape, *([1] * (rows.dim() - 1)))
    return torch.stack([paired.real, paired.imag], dim=1).reshape(rows.shape).to(rows.dtype)
