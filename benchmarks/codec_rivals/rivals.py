"""Other ways to store a finished cache, as their papers describe them, to be measured next to the codec.

    KVTC (arXiv 2511.01815)     PCA of all layers' keys before rotation, another of all values; groups of components in
                                0, 2, 4 or 8 bits, with a shift and a scale for each token; DEFLATE over the codes
    AQUA-KV (arXiv 2501.19392)  keys from the decoded keys below, values from the decoded values below and the keys of
                                the layer itself; the rest rotated (Hadamard) and coded as HIGGS does
    integers                    of keys before rotation and values, less their calibration mean, as the package's
                                quantized cache codes them

What differs from the papers: KVTC has groups of 16 components and more, integers instead of fp8 for 8 bits, and a price
per bit instead of a table by budget in its dynamic programming, which gives the same plans on the convex hull of bits
and error. AQUA-KV has HIGGS's grid of one dimension (Lloyd-Max), and takes the mean off the first layer, too. DEFLATE
runs over all tokens of a prompt, once packed and once with a byte for each code; the smaller one counts.

Bytes are codes, scales, exact tokens in 16 bits, and `HEADER`; not the tokens' ids, which the codec's file also has.

Shapes: T tokens, N numbers of a token over all layers, P numbers of its keys, or of its values, R components.
"""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor
from transformers import Cache

from crosslayer.cache.quantizers import quantizer_of, rotated, rotation
from crosslayer.codec.fit import Calibration
from crosslayer.codec.quality import Way
from crosslayer.codec.states import CodedLayer, new_cache, read_states

HEADER = 16  # bytes of a file: tokens, exact ones at either end, length of the code
SIZES, BITS = (16, 64, 256, 1024), (2, 4, 8)  # of KVTC's groups
STRIDE, SAMPLE = 16, 128  # where groups may begin; tokens on which the error of a group is measured
SHARED = 32  # bits of the shift and the scale of a group, for each token
CLOSE, TRIES = 0.004, 4  # of the search for KVTC's bytes
DAMPED = 1e-3  # ridge of AQUA-KV's predictors, in units of their inputs' mean square
FIRST_LAYER = 4  # bits of AQUA-KV's first layer
SMALLEST = 2.0**-24  # of scales: float16's smallest number


class Rival(ABC):
    """Codes states of tokens, keys before rotation and values of all layers (T, N), each token by itself.

    Attributes:
        parameters: numbers of its matrices.

    """

    parameters: int

    @abstractmethod
    def coded(self, states: Tensor) -> tuple[Tensor, Any]:
        """Return decoded states (T, N), and their codes."""

    @abstractmethod
    def size(self, codes: Any, start: int, stop: int) -> int:
        """Return the bytes of the codes of the tokens from `start` to `stop`."""


def ways_of(rival: Rival, shapes: list[CodedLayer], exact: Mapping[str, tuple[int, int]]) -> dict[str, Way]:
    """Return a rival's ways by name; `exact` has how many tokens at the start and at the end each stores exactly.

    They code a cache once, if they run one after the other.
    """
    last_one: dict[str, Any] = {}

    def way(ends: tuple[int, int], cache: Cache, ids: Tensor) -> tuple[Cache, int]:
        first, last = ends
        count = ids.shape[1]
        states = torch.cat(read_states(cache, 0, 0, count, shapes), 1)
        if "states" not in last_one or not torch.equal(last_one["states"], states):
            last_one.update(states=states, coded=rival.coded(states))
        decoded, codes = last_one["coded"]
        held = torch.arange(count)
        is_exact = ((held < first) | (held >= count - last))[:, None]
        decoded = torch.where(is_exact, states.half().float(), decoded)
        size = rival.size(codes, first, count - last) + 2 * states.shape[1] * (first + last) + HEADER
        rows = list(decoded.split([shape.width for shape in shapes], 1))
        layer: Any = cache.layers[0]
        return new_cache([rows], shapes, [0], count, layer.keys.dtype), size

    return {name: partial(way, ends) for name, ends in exact.items()}


def split(states: Tensor, shape: CodedLayer) -> tuple[Tensor, Tensor]:
    """Return the keys and the values (T, P) of a layer's states (T, W)."""
    keys, values = states.split([shape.heads * shape.key, shape.heads * shape.value], 1)
    return keys, values


def bases_of(data: Calibration, seed: int) -> list["Basis"]:
    """Return the principal components of all layers' keys, and of their values."""
    numbers = torch.arange(sum(shape.width for shape in data.shapes))[None].split([s.width for s in data.shapes], 1)
    bases = []
    for kind in (0, 1):
        states = [split(own, shape)[kind] for own, shape in zip(data.states, data.shapes, strict=True)]
        columns = [split(own, shape)[kind] for own, shape in zip(numbers, data.shapes, strict=True)]
        bases.append(Basis(torch.cat(states, 1), torch.cat(columns, 1)[0], seed))
    return bases


@dataclass(frozen=True)
class Group:
    """A run of components in as many bits each."""

    start: int
    size: int
    bits: int

    @property
    def stop(self) -> int:
        """The component behind its last one."""
        return self.start + self.size


def min_max(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes (…, R) of components, by shift and scale of each token's group, and what they are decoded to."""
    low, high = values.aminmax(dim=-1, keepdim=True)
    low = low.half().float()
    scale = ((high - low) / (2**bits - 1)).half().float().clamp_min(SMALLEST)
    codes = ((values - low) / scale).round_().clamp_(0, 2**bits - 1)
    return codes, codes * scale + low


class Basis:
    """The principal components of all layers' keys, or values, and what groups of them cost.

    Attributes:
        mean: (P,).
        vectors: (P, P), by decreasing energy.
        errors: the mean error of a group by size and bits, at each start.
        left: the energy (P / STRIDE + 1,) of the components from each start on.

    """

    def __init__(self, states: Tensor, columns: Tensor, seed: int):
        self.columns, self.mean = columns, states.mean(0)  # of the calibration tokens' states (tokens, P)
        states = states - self.mean
        energy, vectors = torch.linalg.eigh(states.T @ states / len(states))
        self.vectors = vectors.flip(1).contiguous()
        starts = len(self.mean) // STRIDE
        ends = energy.flip(0).clamp_min(0).double().cumsum(0)[STRIDE - 1 :: STRIDE][:starts]
        self.left = [float(ends[-1]), *(ends[-1] - ends).tolist()]
        picked = torch.randperm(len(states), generator=torch.Generator().manual_seed(seed))[:SAMPLE]
        sample = states[picked] @ self.vectors
        self.errors: dict[tuple[int, int], list[float]] = {}
        for size in SIZES:
            for bits in BITS if size <= len(self.mean) else ():
                runs = sample.unfold(1, size, STRIDE)  # (SAMPLE, starts, size)
                self.errors[size, bits] = [
                    float((min_max(run, bits)[1] - run).square().sum(-1).mean()) for run in runs.unbind(1)
                ]

    def plan(self, price: float) -> tuple[list[Group], int]:
        """Return the groups with the least error + price · bits, by dynamic programming, and their bits for a token."""
        starts = len(self.left) - 1
        best: list[tuple[float, Group | None]] = [(0.0, None), *((math.inf, None) for _ in range(starts))]
        for start in range(starts):
            cost = best[start][0]
            for (size, bits), errors in self.errors.items():
                stop = start + size // STRIDE
                if stop <= starts and (total := cost + errors[start] + price * (size * bits + SHARED)) < best[stop][0]:
                    best[stop] = total, Group(start * STRIDE, size, bits)
        at = min(range(starts + 1), key=lambda end: best[end][0] + self.left[end])
        groups: list[Group] = []
        while (group := best[at][1]) is not None:
            groups.append(group)
            at = group.start // STRIDE
        return groups[::-1], sum(group.size * group.bits + SHARED for group in groups)


class Kvtc(Rival):
    """KVTC at `bytes_per_token` after DEFLATE, measured on states (T, N) of held-out text."""

    def __init__(self, bases: Sequence[Basis], bytes_per_token: float, held_out: Tensor):
        self.bases, raw = bases, 1.1 * bytes_per_token
        for _ in range(TRIES):
            self.plans = _plans(bases, 8 * raw)
            ratio = self.size(self.coded(held_out)[1], 0, len(held_out)) / len(held_out) / bytes_per_token
            if abs(ratio - 1) < CLOSE:
                break
            raw /= ratio
        used = [max((group.stop for group in plan), default=0) for plan in self.plans]
        self.parameters = sum(len(basis.mean) * (1 + count) for basis, count in zip(bases, used, strict=True))

    def coded(self, states: Tensor) -> tuple[Tensor, Any]:
        """Return decoded states (T, N), and the codes (T, size) of each group with their bits."""
        decoded, codes = torch.empty_like(states), []
        for basis, plan in zip(self.bases, self.plans, strict=True):
            vectors = basis.vectors[:, : max((group.stop for group in plan), default=0)]
            components = (states[:, basis.columns] - basis.mean) @ vectors
            for group in plan:
                own = components[:, group.start : group.stop]
                code, back = min_max(own, group.bits)
                codes.append((code.to(torch.uint8), group.bits))
                components[:, group.start : group.stop] = back
            decoded[:, basis.columns] = components @ vectors.T + basis.mean
        return decoded, codes

    def size(self, codes: Any, start: int, stop: int) -> int:
        """Return the bytes of deflated codes, and of shifts and scales."""
        packed, wide = [], []
        for code, bits in codes:
            own = code[start:stop]
            parts = own.unflatten(1, (-1, 8 // bits)) << (bits * torch.arange(8 // bits, dtype=torch.uint8))
            packed.append(parts.sum(-1, dtype=torch.uint8).numpy().tobytes())
            wide.append(own.T.contiguous().numpy().tobytes())
        deflated = min(len(zlib.compress(b"".join(form))) for form in (packed, wide))
        return deflated + (stop - start) * len(codes) * SHARED // 8


def _plans(bases: Sequence[Basis], bits: float) -> list[list[Group]]:
    """Return the plans of keys and values at one price; together they take at most `bits` per token."""
    low, high = -14.0, 8.0  # log10 of the price
    for _ in range(36):
        middle = (low + high) / 2
        is_larger = sum(basis.plan(10**middle)[1] for basis in bases) > bits
        low, high = (middle, high) if is_larger else (low, middle)
    return [basis.plan(10**high)[0] for basis in bases]


@lru_cache
def lloyd_max(bits: int) -> Tensor:
    """Return the 2^bits values that a standard normal number is rounded to with the least mean square error."""
    values = norm.ppf((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(500):
        edges = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
        values = (norm.pdf(edges[:-1]) - norm.pdf(edges[1:])) / (norm.cdf(edges[1:]) - norm.cdf(edges[:-1]))
    return torch.from_numpy(values).float()


class Aqua(Rival):
    """AQUA-KV: linear predictors from layer to layer, fitted to what is decoded below, and codes of the rest."""

    def __init__(self, data: Calibration, bits: int):
        self.shapes, self.bits = data.shapes, bits
        self.maps: list[tuple[Tensor, Tensor]] = []
        decoded = None
        for layer, own in enumerate(data.states):
            keys, values = split(own, self.shapes[layer])
            known = None if decoded is None else decoded[0]
            to_keys = _regression(known, keys)
            keys = self._decoded(keys, _predicted(known, to_keys), layer)
            known = None if decoded is None else torch.cat([keys, decoded[1]], 1)
            to_values = _regression(known, values)
            values = self._decoded(values, _predicted(known, to_values), layer)
            self.maps.append((to_keys, to_values))
            decoded = keys, values
        self.parameters = sum(one.numel() for both in self.maps for one in both)

    def coded(self, states: Tensor) -> tuple[Tensor, Any]:
        """Return decoded states (T, N); the bytes of a token do not depend on it."""
        out, decoded = [], None
        layers = states.split([shape.width for shape in self.shapes], 1)
        for layer, (own, (to_keys, to_values)) in enumerate(zip(layers, self.maps, strict=True)):
            keys, values = split(own, self.shapes[layer])
            keys = self._decoded(keys, _predicted(None if decoded is None else decoded[0], to_keys), layer)
            known = None if decoded is None else torch.cat([keys, decoded[1]], 1)
            values = self._decoded(values, _predicted(known, to_values), layer)
            decoded = keys, values
            out += decoded
        return torch.cat(out, 1), None

    def size(self, codes: Any, start: int, stop: int) -> int:
        """Return the bytes of codes, and of two scales a layer and token."""
        bits = sum((self.bits if layer else FIRST_LAYER) * shape.width + 32 for layer, shape in enumerate(self.shapes))
        return math.ceil((stop - start) * bits / 8)

    def _decoded(self, states: Tensor, predicted: Tensor, layer: int) -> Tensor:
        """Return what keys or values (T, P) are decoded to, by the codes of what is not predicted."""
        turn = rotation(states.shape[1], states.dtype, states.device)
        rest = (states - predicted) @ turn
        scale = rest.square().mean(1, keepdim=True).sqrt().half().float().clamp_min(SMALLEST)
        grid = lloyd_max(self.bits if layer else FIRST_LAYER)
        codes = torch.bucketize(rest / scale, (grid[1:] + grid[:-1]) / 2)
        return predicted + grid[codes] * scale @ turn.T


def _with_one(inputs: Tensor | None, count: int) -> Tensor:
    one = torch.ones(count, 1)
    return one if inputs is None else torch.cat([inputs, one], 1)


def _regression(inputs: Tensor | None, outputs: Tensor) -> Tensor:
    """Return the matrix (P' + 1, P) that predicts outputs (T, P) from inputs (T, P') and a constant."""
    known = _with_one(inputs, len(outputs))
    gram = (known.T @ known).double()
    if inputs is not None:
        gram += DAMPED * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram, (known.T @ outputs).double()).float()


def _predicted(inputs: Tensor | None, matrix: Tensor) -> Tensor:
    """Return what is predicted from inputs (T, P'), or for any number of tokens (1, P)."""
    return matrix if inputs is None else _with_one(inputs, len(inputs)) @ matrix


class Integers(Rival):
    """Integer codes of keys before rotation and of values, after their calibration mean is subtracted."""

    def __init__(self, data: Calibration, bits: int):
        self.shapes, self.codec = data.shapes, quantizer_of(f"int{bits}")
        self.mean = torch.cat([own.mean(0) for own in data.states])
        self.parameters = len(self.mean)

    def coded(self, states: Tensor) -> tuple[Tensor, Any]:
        """Return decoded states (T, N), and the bytes of a token."""
        parts, size, at = [], 0, 0
        rest = states - self.mean
        for shape in self.shapes:
            for width in (shape.key, shape.value):
                own = rest[:, at : at + shape.heads * width].unflatten(1, (shape.heads, width)).transpose(0, 1)[None]
                stored = self.codec.encode(rotated(own))  # of (1, H_kv, T, D)
                back = torch.empty_like(own)
                self.codec.decode(stored, back)
                parts.append(rotated(back, back=True)[0].transpose(0, 1).flatten(1))
                size += sum(tensor.nbytes for tensor in stored) // len(states)
                at += shape.heads * width
        return torch.cat(parts, 1) + self.mean, size

    def size(self, codes: Any, start: int, stop: int) -> int:
        """Return the bytes of codes and scales."""
        return (stop - start) * codes
