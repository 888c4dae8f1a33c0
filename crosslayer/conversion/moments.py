"""W_c from second moments of X and E, kept by part of the calibration text, so that a part can be left out.

A ridge penalty is chosen by leaving a *domain* out: fitted on all others, judged on that domain, summed over
domains. A window that is held out from a domain that was fitted says nothing about other text, and W_c learns the
domain. Text of a single domain leaves its every eighth window out instead.

A bias is the weight of a further input that is always 1. No penalty shrinks it: W is fitted to centred moments, and the
bias is what then remains of the mean of E.

Shapes: B sequences, T tokens, C hidden, I inputs (C, with a bias C + 1), P parts of the text, v groups of sequences.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FITS = ("zero", "mean", "lstsq", "lmmse", "ridge", "layerwise")
LEAST_SQUARES = ("lstsq", "lmmse")  # without a penalty
CHOSEN = ("ridge", "layerwise")  # whose penalty is chosen
ALONE = ("layerwise", "lmmse")  # W_c stands for what was taken from its own layer
PENALTIES = tuple(10.0**exponent for exponent in range(-7, 4))  # times the mean square of an input
LARGEST_CUTOFF = 0.01  # of singular values, as a share of the largest
HELD_OUT = 8  # every n-th sequence is left out where there is a single domain
NEEDED = 2  # tokens for each input of W_c, below which least squares memorise


@dataclass(frozen=True)
class Fit:
    """What W_c of a layer does: root mean square of E before, and of E − X W_c after; on all calibration tokens.

    `mean_*` is that of the position-wise mean, which Theorem 3.1 makes small. Where a penalty was chosen: `penalty`,
    and `left_out`, the root mean square of what remains of E on each part that was left out in turn, over that of E.
    """

    layer: int
    token_before: float
    token_after: float
    mean_before: float
    mean_after: float
    penalty: float | None = None
    left_out: float | None = None


def folds(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the part of each sequence and the parts to leave out in turn, for domains of so many sequences."""
    if len(sizes) > 1:
        return [domain for domain, size in enumerate(sizes) for _ in range(size)], list(range(len(sizes)))
    return [int(number % HELD_OUT == HELD_OUT - 1) for number in range(sizes[0])], [1]


def check_enough(width: int, sizes: Sequence[int], length: int, fit: str) -> None:
    """Refuse too little text for W_c.

    Args:
        width: inputs of W_c.
        sizes: sequences of each domain.
        length: tokens of a sequence.
        fit: how W_c is fitted.

    Raises:
        ValueError: the message says how many tokens are needed, and how many of them are held out.

    """
    if fit not in (*LEAST_SQUARES, *CHOSEN) or _is_enough(width, sizes, length, fit):
        return
    domains = len(sizes)
    evenly = ([len(range(first, count, domains)) for first in range(domains)] for count in itertools.count(1))
    least = next(shared for shared in evenly if _is_enough(width, shared, length, fit))
    held = _held_out(least, fit)
    parts = f"{sum(least) - held} to fit, with {NEEDED} tokens for each of the {width} inputs of W_c"
    if held:
        parts += f", and {held} held out{' in turn' if domains > 1 else ''} to choose its penalty"
    raise ValueError(
        f"calibration text has {sum(sizes) * length} tokens; {fit} needs at least {sum(least) * length} tokens "
        f"({sum(least)} windows of {length}: {parts})"
    )


def _is_enough(width: int, sizes: Sequence[int], length: int, fit: str) -> bool:
    """Return whether what is fitted has enough tokens, and something is held out where a penalty is chosen."""
    held = _held_out(sizes, fit)
    return (sum(sizes) - held) * length >= NEEDED * width and (held > 0 or fit not in CHOSEN)


def _held_out(sizes: Sequence[int], fit: str) -> int:
    """Return the most sequences that are held out at a time."""
    parts, held = folds(sizes)
    return max(parts.count(part) for part in held) if fit in CHOSEN else 0


class Moments:
    """Second moments of X and E by part, and position-wise sums in groups of sequences."""

    def __init__(self, like: Tensor, sizes: Sequence[int], groups: int, bias: bool = False):
        length, width = like.shape[1:]
        inputs = width + bias
        self.parts, self.held = folds(sizes)
        self.sequences, self.groups, self.length, self.bias = sum(sizes), groups, length, bias
        self.epsilon = torch.finfo(like.dtype).eps
        double = {"dtype": torch.float64, "device": like.device}
        count = max(self.held) + 1
        self.gram = torch.zeros(count, inputs, inputs, **double)  # XᵀX, (P, I, I)
        self.cross = torch.zeros(count, inputs, width, **double)  # XᵀE, (P, I, C)
        self.energy = torch.zeros(count, **double)  # ‖E‖², (P,)
        self.inputs = torch.zeros(groups, length, inputs, **double)  # sums of X, (v, T, I)
        self.errors = torch.zeros(groups, length, width, **double)  # sums of E, (v, T, C)
        self.members = torch.zeros(groups, **double)  # sequences in each group, (v,)

    def add(self, x: Tensor, error: Tensor, first: int) -> None:
        """Add a batch (B, T, C) whose first sequence has the number `first`."""
        x, error = x.double(), error.double()  # least squares invert what float32 products leave of dependent inputs
        if self.bias:
            x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1)  # (B, T, I)
        for row in range(len(x)):
            number = first + row
            part, group = self.parts[number], number * self.groups // self.sequences
            self.gram[part] += x[row].T @ x[row]
            self.cross[part] += x[row].T @ error[row]
            self.energy[part] += error[row].square().sum()
            self.inputs[group] += x[row]
            self.errors[group] += error[row]
            self.members[group] += 1

    def means(self) -> tuple[Tensor, Tensor]:
        """Return X̄ (v·T, I) and Ē (v·T, C)."""
        members = self.members[:, None, None]
        x = self.inputs / members  # (v, T, C)
        error = self.errors / members
        return x.flatten(0, 1), error.flatten(0, 1)

    def solve(self, fit: str) -> tuple[Tensor, float | None, float | None]:
        """Return W (I, C) with X W ≈ E, and the penalty if it was chosen, with what it leaves on the parts left out.

        The last row of W is the bias, where there is one.
        """
        if fit == "zero":
            return torch.zeros_like(self.cross[0]), None, None
        if fit == "mean":
            return self._interpolated(), None, None
        penalty, left = self._penalty() if fit in CHOSEN else (None, None)
        system = _System(self.gram.sum(0), self.cross.sum(0), self.bias)
        return system.solve(penalty or 0.0), penalty, left

    def _interpolated(self) -> Tensor:
        """Return pinv(X̄) Ē, with a bias that of what deviates from the means over all rows."""
        x, error = self.means()
        if not self.bias:
            return pseudo_inverse(x, self.epsilon) @ error
        x, center, offset = x[:, :-1], x[:, :-1].mean(0), error.mean(0)
        weight = pseudo_inverse(x - center, self.epsilon) @ (error - offset)  # (C, C)
        return torch.cat([weight, (offset - center @ weight)[None]])

    def _penalty(self) -> tuple[float, float]:
        """Return the penalty with the least error on the parts left out, and the share of E that it leaves there."""
        errors = dict.fromkeys(PENALTIES, 0.0)
        for part in self.held:
            system = _System(self.gram.sum(0) - self.gram[part], self.cross.sum(0) - self.cross[part], self.bias)
            for penalty in PENALTIES:
                errors[penalty] += self._error(system.solve(penalty), [part])
        penalty = min(PENALTIES, key=errors.__getitem__)
        energy = float(self.energy[self.held].sum())
        return penalty, (max(errors[penalty], 0.0) / energy) ** 0.5 if energy else 0.0

    def _error(self, weight: Tensor, parts: list[int]) -> float:
        """Return ‖E − X W‖² = ‖E‖² − 2 ⟨W, XᵀE⟩ + ⟨W, XᵀX W⟩, from the moments alone."""
        gram = self.gram[parts].sum(0)  # (I, I)
        cross = self.cross[parts].sum(0)
        return float(self.energy[parts].sum() - 2 * (weight * cross).sum() + (weight * (gram @ weight)).sum())

    def report(self, layer: int, weight: Tensor, penalty: float | None, left_out: float | None) -> Fit:
        """Return the errors before and after."""
        tokens = self.sequences * self.length
        after = max(self._error(weight, list(range(len(self.gram)))), 0.0)
        x, error = self.means()  # (v·T, I), (v·T, C)
        rest = error - x @ weight
        return Fit(
            layer=layer,
            token_before=float((self.energy.sum() / tokens).sqrt()),
            token_after=(after / tokens) ** 0.5,
            mean_before=float((error.square().sum() / len(error)).sqrt()),
            mean_after=float((rest.square().sum() / len(rest)).sqrt()),
            penalty=penalty,
            left_out=left_out,
        )


def pseudo_inverse(x: Tensor, epsilon: float) -> Tensor:
    """Return the pseudo-inverse of means (R, C) whose entries are known to a relative `epsilon`.

    Singular values below epsilon · max(R, C) of the largest are taken for rounding: those of float32 streams stand far
    above what float64 would call zero, and their inverse is noise times a million. At most 1 %, which bfloat16 reaches:
    beyond that, what the text says goes too.
    """
    return torch.linalg.pinv(x, rtol=min(epsilon * max(x.shape), LARGEST_CUTOFF))


class _System:
    """The normal equations XᵀX W = XᵀE, solved for any penalty; with a bias, those of centred X and E."""

    def __init__(self, gram: Tensor, cross: Tensor, bias: bool):
        self.bias = bias
        if bias:
            tokens = gram[-1, -1]
            self.center, self.offset = gram[-1, :-1] / tokens, cross[-1] / tokens  # means of X and E, (C,) each
            gram = gram[:-1, :-1] - tokens * torch.outer(self.center, self.center)
            cross = cross[:-1] - tokens * torch.outer(self.center, self.offset)
        self.cross, self.scale = cross, float(gram.diagonal().mean())
        values, self.vectors = torch.linalg.eigh(gram)
        self.values = torch.where(values > values[-1] * 1e-13, values, 0)  # 0: a direction of no weight

    def solve(self, penalty: float) -> Tensor:
        """Return W (I, C); `penalty` is in mean squares of an input; directions of no weight are left alone."""
        penalized = torch.where(self.values > 0, self.values + penalty * self.scale, 1)
        inverse = torch.where(self.values > 0, 1 / penalized, 0)
        weight = self.vectors @ (inverse[:, None] * (self.vectors.T @ self.cross))  # (C, C)
        return torch.cat([weight, (self.offset - self.center @ weight)[None]]) if self.bias else weight
