"""Fit W_c from second moments of X and E, kept by fold of the calibration text for cross-validation.

The ridge penalty is chosen by leave-one-*domain*-out: fitted on all other domains, evaluated on that one, summed over
domains. Held-out windows of a calibration domain would say nothing about other text, since W_c learns the domain. With
a single domain every eighth window is held out instead.

Where W_o is refitted, the concatenated heads that it reads are inputs too, and the fit gives the change of W_o. W_o and
W_c then have a penalty each, in units of the mean square of their own inputs. The pair is found by steps of a factor of
ten from the best pair of equal penalties.

Shapes: B sequences, T tokens, C hidden, H·D concatenated heads, P folds, v groups of sequences, I inputs: C for W_c,
H·D for W_o, or both concatenated.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FITTED_WEIGHTS = {"refit": "W_o and the linear compensation W_c", "refit-o": "W_o"}  # where it is not W_c alone
REFITS = tuple(FITTED_WEIGHTS)  # which refit W_o of layers that read other layers' states
FITS = ("zero", "mean", "lstsq", "ridge", "layerwise", *REFITS)
WITH_PENALTY = ("ridge", "layerwise", *REFITS)  # penalty chosen by cross-validation
LAYER_ONLY = ("layerwise", *REFITS)  # which correct each layer's own change only
PENALTIES = tuple(10.0**exponent for exponent in range(-7, 4))  # times the mean square of an input
# Of singular values, as a share of the largest. X̄ of 32 windows is nearly one row with noise: without a cut-off W_c
# made SmolLM2's perplexity 1.2 million times as high, with one of 1% 1.61 times (1.97 times without W_c).
MAX_CUTOFF = 0.01
HELD_OUT = 8  # with a single domain every n-th sequence is held out
# Random combinations of E's entries on which penalties are compared, at most. For SmolLM2's 576 entries the error that
# is left is the same to five digits, in 0.6 of the time.
COMBINATIONS = 96
RANK_CUTOFF = 1e-13  # eigenvalues below this share of the largest count as zero: the rounding of float64 sums
TOKENS_PER_INPUT = 2  # with fewer, least squares memorize the text


@dataclass(frozen=True)
class Fit:
    """The error of a layer before and after the fit: root mean square of E and of E − X W, on all calibration tokens.

    `mean_*` is the error of the position-wise mean, which Theorem 3.1 makes small. `penalty` is that of W_c and
    `output_penalty` that of a refitted W_o, where they were chosen; `left_out` is then the relative error (after over
    before) on the held-out folds.
    """

    layer: int
    token_before: float
    token_after: float
    mean_before: float
    mean_after: float
    penalty: float | None = None
    left_out: float | None = None
    output_penalty: float | None = None


def folds(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each sequence's fold, and the folds to hold out in turn; `sizes` are the sequences of each domain."""
    if len(sizes) > 1:
        return [domain for domain, size in enumerate(sizes) for _ in range(size)], list(range(len(sizes)))
    # the last of every eight, so that the other fold is never empty
    return [int(index % HELD_OUT == HELD_OUT - 1) for index in range(sizes[0])], [1]


def is_enough(width: int, sizes: Sequence[int], length: int, fit: str) -> bool:
    """Return whether `sizes` (sequences by domain) of `length` tokens are enough to fit `width` inputs.

    If a penalty is chosen, some tokens must remain when others are held out.
    """
    if fit not in ("lstsq", *WITH_PENALTY):
        return True
    fold_of, held = folds(sizes)
    left_out = max(fold_of.count(fold) for fold in held) if fit in WITH_PENALTY else 0
    enough = (sum(sizes) - left_out) * length >= TOKENS_PER_INPUT * width
    return enough and (left_out > 0 or fit not in WITH_PENALTY)


def least_sequences(width: int, domains: int, length: int, fit: str) -> int:
    """Return how many sequences of `length` tokens, the same of each domain, are enough to fit `width` inputs."""
    count = 1
    while not is_enough(width, [len(range(first, count, domains)) for first in range(domains)], length, fit):
        count += 1
    return count


def check_enough(width: int, sizes: Sequence[int], length: int, fit: str) -> None:
    """Raise if there are too few sequences, as `is_enough` says."""
    if not is_enough(width, sizes, length, fit):
        count = least_sequences(width, len(sizes), length, fit)
        raise ValueError(
            f"{fit} needs at least {count} calibration windows of {length} tokens, got {sum(sizes)}: "
            f"{TOKENS_PER_INPUT} tokens for each of {width} inputs of {FITTED_WEIGHTS.get(fit, 'W_c')}, not counting "
            "those held out"
        )


class Moments:
    """Second moments of X and E by fold, and position-wise sums in groups of sequences."""

    def __init__(self, like: Tensor, sizes: Sequence[int], groups: int, blocks: Sequence[int]):
        """Start empty; `like` is a stream (B, T, C), `sizes` are the sequences of each domain, `groups` is v.

        `blocks` are the widths of inputs with a penalty of their own: (C,), (H·D,), or (H·D, C).
        """
        length, width = like.shape[1:]
        self.blocks = blocks
        inputs = sum(blocks)
        self.fold_of, self.held = folds(sizes)
        self.sequences, self.groups, self.length = sum(sizes), groups, length
        self.epsilon = torch.finfo(like.dtype).eps
        double = {"dtype": torch.float64, "device": like.device}
        count = max(self.held) + 1
        self.gram = torch.zeros(count, inputs, inputs, **double)  # XᵀX, (P, I, I)
        self.cross = torch.zeros(count, inputs, width, **double)  # XᵀE, (P, I, C)
        self.energy = torch.zeros(count, **double)  # ‖E‖², (P,)
        self.inputs = torch.zeros(groups, length, inputs, **double)  # sums of X, (v, T, I)
        self.errors = torch.zeros(groups, length, width, **double)  # sums of E, (v, T, C)
        self.members = torch.zeros(groups, **double)  # sequences in each group, (v,)
        self.added = 0  # sequences so far

    def add(self, x: Tensor, error: Tensor) -> None:
        """Add the next sequences: X (B, T, I) and E (B, T, C)."""
        # in float32 the sums of dependent inputs have rounding that least squares would invert
        x, error = x.double(), error.double()
        for inputs, errors in zip(x, error, strict=True):  # (T, I), (T, C)
            fold = self.fold_of[self.added]
            group = self.added * self.groups // self.sequences
            self.gram[fold].addmm_(inputs.T, inputs)
            self.cross[fold].addmm_(inputs.T, errors)
            self.energy[fold] += errors.square().sum()
            self.inputs[group] += inputs
            self.errors[group] += errors
            self.members[group] += 1
            self.added += 1

    def means(self) -> tuple[Tensor, Tensor]:
        """Return X̄ (v·T, I) and Ē (v·T, C)."""
        members = self.members[:, None, None]
        return (self.inputs / members).flatten(0, 1), (self.errors / members).flatten(0, 1)

    def solve(self, fit: str, roughly: bool = False) -> tuple[Tensor, tuple[float, ...], float | None]:
        """Return W (I, C) with X W ≈ E, the chosen penalties of its blocks, and the relative error on held-out folds.

        Without a choice these are () and None; `roughly` is as in `fit_layer`.
        """
        if fit == "zero":
            return torch.zeros_like(self.cross[0]), (), None
        if fit == "mean":
            x, error = self.means()
            # smaller singular values are the rounding of the streams, which inverting would amplify a million times;
            # in bfloat16 a cutoff above 1% would remove signal
            cutoff = min(self.epsilon * max(x.shape), MAX_CUTOFF)
            return torch.linalg.pinv(x, rtol=cutoff) @ error, (), None
        penalties, left = self._penalties(roughly) if fit in WITH_PENALTY else ((), None)
        return self._solved(penalties, self.gram.sum(0), self.cross.sum(0)), penalties, left

    def _solved(self, penalties: Sequence[float], gram: Tensor, cross: Tensor) -> Tensor:
        """Solve XᵀX W = XᵀE, (I, I) and (I, C) or combinations of its columns (I, K).

        There is a penalty per block, in units of the inputs' mean square; without any it is least squares.
        """
        if not penalties:
            return torch.linalg.pinv(gram, rtol=RANK_CUTOFF, hermitian=True) @ cross
        added = []
        for penalty, energies in zip(penalties, gram.diagonal().split(list(self.blocks)), strict=True):
            # inputs of zeros get weights of zero: without a penalty their Gram matrix has no Cholesky factor
            mean = float(energies.mean()) or 1.0
            added.append(torch.full_like(energies, penalty * mean))
        return torch.cholesky_solve(cross, torch.linalg.cholesky(gram + torch.cat(added).diag()))

    def _penalties(self, roughly: bool) -> tuple[tuple[float, ...], float | None]:
        """Return the penalties with the smallest error on held-out folds, and that error relative to E.

        `roughly`: the best equal penalties, and None.

        Ridge fits each entry of E independently, so a few random combinations of them suffice to rank penalties.
        """
        width = self.cross.shape[-1]
        combinations = torch.eye(width)  # orthonormal, (C, K)
        if width > 2 * COMBINATIONS:
            generator = torch.Generator().manual_seed(0)
            combinations = torch.linalg.qr(torch.randn(width, COMBINATIONS, dtype=torch.float64, generator=generator)).Q
        combinations = combinations.to(self.cross)
        gram, cross = self.gram.sum(0), self.cross.sum(0)
        without = {fold: (gram - self.gram[fold], cross - self.cross[fold]) for fold in self.held}
        combined = {fold: (without[fold][1] @ combinations, self.cross[fold] @ combinations) for fold in self.held}

        @functools.cache
        def error(indices: tuple[int, ...]) -> float:  # up to the energy of E, which is constant
            penalties = [PENALTIES[index] for index in indices]
            return sum(
                _explained(self._solved(penalties, without[fold][0], fitted_cross), self.gram[fold], held_cross)
                for fold, (fitted_cross, held_cross) in combined.items()
            )

        equal = [(index,) * len(self.blocks) for index in range(len(PENALTIES))]
        # a pair starts on a coarser grid, from which single steps follow
        best = min(equal if len(self.blocks) == 1 else equal[2::2], key=error)
        if roughly:
            return tuple(PENALTIES[index] for index in best), None
        # W_o needs a penalty of its own: in three layers of SmolLM2 0.01, where W_c's is the least of the grid in two
        next_best = min(_neighbors(best), key=error)
        while error(next_best) < error(best):
            best, next_best = next_best, min(_neighbors(next_best), key=error)
        penalties = tuple(PENALTIES[index] for index in best)
        energy = float(self.energy[self.held].sum())
        errors = []  # ‖E − X W‖² of each fold
        for fold in self.held:
            weight = self._solved(penalties, *without[fold])
            errors.append(float(self.energy[fold]) + _explained(weight, self.gram[fold], self.cross[fold]))
        # a difference of large sums: what rounding leaves of a perfect fit may be below zero
        return penalties, (max(sum(errors), 0.0) / energy) ** 0.5 if energy else 0.0

    def report(self, layer: int, weight: Tensor, **chosen: float | None) -> Fit:
        """Return the errors before and after."""
        tokens = self.sequences * self.length
        after = float(self.energy.sum()) + _explained(weight, self.gram.sum(0), self.cross.sum(0))  # ‖E − X W‖²
        x, error = self.means()  # (v·T, I), (v·T, C)
        rest = error - x @ weight
        return Fit(
            layer=layer,
            token_before=float((self.energy.sum() / tokens).sqrt()),
            token_after=(max(after, 0.0) / tokens) ** 0.5,
            mean_before=float((error.square().sum() / len(error)).sqrt()),
            mean_after=float((rest.square().sum() / len(rest)).sqrt()),
            **chosen,
        )


def _explained(weight: Tensor, gram: Tensor, cross: Tensor) -> float:
    """Return ‖E − X W‖² − ‖E‖² = ⟨W, XᵀX W⟩ − 2 ⟨W, XᵀE⟩, from the moments; for combinations of E too."""
    return float((weight * (gram @ weight - 2 * cross)).sum())


def _neighbors(indices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the indices into `PENALTIES` that are one step away for a single block."""
    steps = itertools.product(range(len(indices)), (-1, 1))
    near = [(*indices[:block], indices[block] + step, *indices[block + 1 :]) for block, step in steps]
    return [neighbor for neighbor in near if min(neighbor) >= 0 and max(neighbor) < len(PENALTIES)]
