"""W_c from second moments of X and E, kept by part of the calibration text, so that a part can be left out.

A ridge penalty is chosen by leaving a *domain* out: fitted on all others, judged on that domain, summed over
domains. A window that is held out from a domain that was fitted says nothing about other text, and W_c learns the
domain. Text of a single domain leaves its every eighth window out instead.

Shapes: B sequences, T tokens, C hidden, P parts of the text, v groups of sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FITS = ("zero", "mean", "lstsq", "ridge", "layerwise")
CHOSEN = ("ridge", "layerwise")  # whose penalty is chosen
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
        ValueError: the message says how many tokens are needed.

    """
    if fit not in ("lstsq", *CHOSEN):
        return
    tokens = sum(sizes) * length
    needed = NEEDED * width
    parts, held = folds(sizes)
    left_out = max((parts.count(part) for part in held), default=0) if fit in CHOSEN else 0  # sequences
    if tokens - left_out * length >= needed and (fit == "lstsq" or left_out):
        return
    least = needed
    if fit in CHOSEN:
        share = len(sizes) if len(sizes) > 1 else HELD_OUT
        least = max(needed + needed // (share - 1), share * length)
    raise ValueError(
        f"calibration text has {tokens} tokens; {fit} needs at least {least} "
        f"({NEEDED} for each of the {width} inputs of W_c)"
    )


class Moments:
    """Second moments of X and E by part, and position-wise sums in groups of sequences."""

    def __init__(self, like: Tensor, sizes: Sequence[int], groups: int):
        length, width = like.shape[1:]
        self.parts, self.held = folds(sizes)
        self.sequences, self.groups, self.length = sum(sizes), groups, length
        self.epsilon = torch.finfo(like.dtype).eps
        double = {"dtype": torch.float64, "device": like.device}
        count = max(self.held) + 1
        self.gram = torch.zeros(count, width, width, **double)  # XᵀX, (P, C, C)
        self.cross = torch.zeros(count, width, width, **double)  # XᵀE, (P, C, C)
        self.energy = torch.zeros(count, **double)  # ‖E‖², (P,)
        self.inputs = torch.zeros(groups, length, width, **double)  # sums of X, (v, T, C)
        self.errors = torch.zeros(groups, length, width, **double)  # sums of E, (v, T, C)
        self.members = torch.zeros(groups, **double)  # sequences in each group, (v,)

    def add(self, x: Tensor, error: Tensor, first: int) -> None:
        """Add a batch (B, T, C) whose first sequence has the number `first`."""
        x, error = x.double(), error.double()  # least squares invert what float32 products leave of dependent inputs
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
        """Return X̄ and Ē, (v·T, C)."""
        members = self.members[:, None, None]
        x = self.inputs / members  # (v, T, C)
        error = self.errors / members
        return x.flatten(0, 1), error.flatten(0, 1)

    def solve(self, fit: str) -> tuple[Tensor, float | None, float | None]:
        """Return W (C, C) with X W ≈ E, and the penalty if it was chosen, with what it leaves on the parts left out."""
        if fit == "zero":
            return torch.zeros_like(self.gram[0]), None, None
        if fit == "mean":
            x, error = self.means()
            return pseudo_inverse(x, self.epsilon) @ error, None, None
        if fit == "lstsq":
            return _solve(_spectrum(self.gram.sum(0)), self.cross.sum(0), 0.0), None, None
        penalty, left = self._penalty()
        gram = self.gram.sum(0)
        return _solve(_spectrum(gram), self.cross.sum(0), penalty * _scale(gram)), penalty, left

    def _penalty(self) -> tuple[float, float]:
        """Return the penalty with the least error on the parts left out, and the share of E that it leaves there."""
        errors = dict.fromkeys(PENALTIES, 0.0)
        for part in self.held:
            gram = self.gram.sum(0) - self.gram[part]  # (C, C)
            cross = self.cross.sum(0) - self.cross[part]
            spectrum, scale = _spectrum(gram), _scale(gram)
            for penalty in PENALTIES:
                errors[penalty] += self._error(_solve(spectrum, cross, penalty * scale), [part])
        penalty = min(PENALTIES, key=errors.__getitem__)
        energy = float(self.energy[self.held].sum())
        return penalty, (max(errors[penalty], 0.0) / energy) ** 0.5 if energy else 0.0

    def _error(self, weight: Tensor, parts: list[int]) -> float:
        """Return ‖E − X W‖² = ‖E‖² − 2 ⟨W, XᵀE⟩ + ⟨W, XᵀX W⟩, from the moments alone."""
        gram = self.gram[parts].sum(0)  # (C, C)
        cross = self.cross[parts].sum(0)
        return float(self.energy[parts].sum() - 2 * (weight * cross).sum() + (weight * (gram @ weight)).sum())

    def report(self, layer: int, weight: Tensor, penalty: float | None, left_out: float | None) -> Fit:
        """Return the errors before and after."""
        tokens = self.sequences * self.length
        after = max(self._error(weight, list(range(len(self.gram)))), 0.0)
        x, error = self.means()  # (v·T, C)
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


def _scale(gram: Tensor) -> float:
    return float(gram.diagonal().mean())


def _spectrum(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, with 0 for directions of no weight, and eigenvectors of XᵀX."""
    values, vectors = torch.linalg.eigh(gram)
    return torch.where(values > values[-1] * 1e-13, values, 0), vectors


def _solve(spectrum: tuple[Tensor, Tensor], cross: Tensor, penalty: float) -> Tensor:
    """Return (XᵀX + penalty)⁻¹ XᵀE; directions of no weight are left alone."""
    values, vectors = spectrum
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values + penalty, 1), 0)
    return vectors @ (inverse[:, None] * (vectors.T @ cross))
