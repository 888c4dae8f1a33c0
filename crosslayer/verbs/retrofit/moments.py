"""W_c from second moments of X and E, kept by part of the calibration text, so that a part can be left out.

A ridge penalty is chosen by leaving a *domain* out: fitted on all others, judged on that domain, summed over
domains. A window that is held out from a domain that was fitted says nothing about other text, and W_c learns the
domain. Text of a single domain leaves its every eighth window out instead.

A bias is the weight of a further input that is always 1. No penalty shrinks it: W is fitted to centred moments, and the
bias is what then remains of the mean of E.

Where W_o is refitted, the concatenated heads that it reads are inputs as well, and what is fitted is by how much W_o
changes. W_o and W_c then have a penalty each, in mean squares of their own inputs, found by steps of ten from the best
equal pair: both shrink what they change towards nothing.

Shapes: B sequences, T tokens, C hidden, H·D concatenated heads, P parts of the text, v groups of sequences, I inputs:
C for W_c, H·D for W_o, or both, one behind another; with a bias one more.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REFITTED = {"refit": "W_o and W_c", "refit-o": "W_o"}  # what is fitted, where it is not W_c alone
REFITS = tuple(REFITTED)  # W_o of layers that read borrowed states is fitted, too, or alone
FITS = ("zero", "mean", "lstsq", "lmmse", "ridge", "layerwise", *REFITS)
LEAST_SQUARES = ("lstsq", "lmmse")  # without a penalty
CHOSEN = ("ridge", "layerwise", *REFITS)  # whose penalty is chosen
ALONE = ("layerwise", "lmmse", *REFITS)  # what is fitted stands for what was taken from its own layer
PENALTIES = tuple(10.0**exponent for exponent in range(-7, 4))  # times the mean square of an input
LARGEST_CUTOFF = 0.01  # of singular values, as a share of the largest
HELD_OUT = 8  # every n-th sequence is left out where there is a single domain
COMPARED = 96  # combinations of E's entries on which penalties are compared, at most
SMALLEST = 1e-13  # of the largest eigenvalue: below it a direction of no weight
NEEDED = 2  # tokens for each input of W_c, below which least squares memorise


@dataclass(frozen=True)
class Fit:
    """What W_c of a layer does: root mean square of E before, and of E − X W_c after; on all calibration tokens.

    `mean_*` is that of the position-wise mean, which Theorem 3.1 makes small. Where a penalty was chosen: `penalty`, of
    W_c, `output_penalty`, of a refitted W_o, and `left_out`, the root mean square of what remains of E on each part
    that was left out in turn, over that of E.
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
    """Return the part of each sequence and the parts to leave out in turn, for domains of so many sequences."""
    if len(sizes) > 1:
        return [domain for domain, size in enumerate(sizes) for _ in range(size)], list(range(len(sizes)))
    return [int(number % HELD_OUT == HELD_OUT - 1) for number in range(sizes[0])], [1]


def check_enough(width: int, sizes: Sequence[int], length: int, fit: str) -> None:
    """Refuse too little text for what has `width` inputs: so many sequences of each domain, of `length` tokens."""
    if fit not in (*LEAST_SQUARES, *CHOSEN) or is_enough(width, sizes, length, fit):
        return
    domains = len(sizes)
    evenly = ([len(range(first, count, domains)) for first in range(domains)] for count in itertools.count(1))
    least = next(shared for shared in evenly if is_enough(width, shared, length, fit))
    held = _held_out(least, fit)
    turns = " in turn" if domains > 1 else ""
    held_words = f", and {held} held out{turns} to choose a penalty" if held else ""
    raise ValueError(
        f"calibration text has {sum(sizes) * length} tokens; {fit} needs at least {sum(least) * length} tokens "
        f"({sum(least)} windows of {length}: {sum(least) - held} to fit, with {NEEDED} tokens for each of the {width} "
        f"inputs of {REFITTED.get(fit, 'W_c')}{held_words})"
    )


def is_enough(width: int, sizes: Sequence[int], length: int, fit: str) -> bool:
    """Return whether what is fitted has enough tokens, and something is held out where a penalty is chosen."""
    held = _held_out(sizes, fit)
    return (sum(sizes) - held) * length >= NEEDED * width and (held > 0 or fit not in CHOSEN)


def _held_out(sizes: Sequence[int], fit: str) -> int:
    parts, held = folds(sizes)
    return max(parts.count(part) for part in held) if fit in CHOSEN else 0


class Moments:
    """Second moments of X and E by part, and position-wise sums in groups of sequences."""

    def __init__(
        self, like: Tensor, sizes: Sequence[int], groups: int, bias: bool = False, blocks: Sequence[int] | None = None
    ):
        """Begin with nothing; `like` is a stream (B, T, C), `sizes` are the sequences of each domain, `groups` is v.

        `blocks` are inputs with a penalty of their own: (C,) by default, (H·D,), or (H·D, C).
        """
        length, width = like.shape[1:]
        self.blocks = (width,) if blocks is None else tuple(blocks)
        inputs = sum(self.blocks) + bias
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
        self.added = 0  # sequences so far

    def add(self, x: Tensor, error: Tensor) -> None:
        """Add the next sequences: X (B, T, I without the bias) and E (B, T, C)."""
        x, error = x.double(), error.double()  # least squares invert what float32 products leave of dependent inputs
        if self.bias:
            x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1)  # (B, T, I)
        for own, lack in zip(x, error, strict=True):  # (T, I), (T, C)
            part, group = self.parts[self.added], self.added * self.groups // self.sequences
            self.gram[part] += own.T @ own
            self.cross[part] += own.T @ lack
            self.energy[part] += lack.square().sum()
            self.inputs[group] += own
            self.errors[group] += lack
            self.members[group] += 1
            self.added += 1

    def means(self) -> tuple[Tensor, Tensor]:
        """Return X̄ (v·T, I) and Ē (v·T, C)."""
        members = self.members[:, None, None]
        return (self.inputs / members).flatten(0, 1), (self.errors / members).flatten(0, 1)

    def solve(self, fit: str) -> tuple[Tensor, tuple[float, ...], float | None]:
        """Return W (I, C) with X W ≈ E, and if they were chosen the penalties of its blocks, with what they leave.

        That is measured on the parts left out. The last row of W is the bias, where there is one.
        """
        if fit == "zero":
            return torch.zeros_like(self.cross[0]), (), None
        if fit == "mean":  # with a bias that of what deviates from the means over all rows
            x, error = self.means()
            if not self.bias:
                return pseudo_inverse(x, self.epsilon) @ error, (), None
            x, center, offset = x[:, :-1], x[:, :-1].mean(0), error.mean(0)
            weight = pseudo_inverse(x - center, self.epsilon) @ (error - offset)  # (C, C)
            return torch.cat([weight, (offset - center @ weight)[None]]), (), None
        penalties, left = self._penalties() if fit in CHOSEN else ((), None)
        return self._solved(penalties), penalties, left

    def _solved(
        self, penalties: Sequence[float], without: int | None = None, combinations: Tensor | None = None
    ) -> Tensor:
        """Solve XᵀX W = XᵀE over all parts, or all but one; for E, or for combinations (C, K) of it.

        Penalties, one a block, are in mean squares of an input; without any it is least squares.
        """
        gram, cross = self.gram.sum(0), self.cross.sum(0)
        if without is not None:
            gram, cross = gram - self.gram[without], cross - self.cross[without]
        if combinations is not None:
            cross = cross @ combinations
        energy = gram.diagonal()[: sum(self.blocks)]  # of each input, (I,)
        if not self.bias:
            return self._ridge(gram, cross, energy, penalties)
        tokens = gram[-1, -1]
        center, offset = gram[-1, :-1] / tokens, cross[-1] / tokens  # means of X and E, (I,) and (C,)
        gram = gram[:-1, :-1] - tokens * torch.outer(center, center)
        weight = self._ridge(gram, cross[:-1] - tokens * torch.outer(center, offset), energy, penalties)
        return torch.cat([weight, (offset - center @ weight)[None]])

    def _ridge(self, gram: Tensor, cross: Tensor, energy: Tensor, penalties: Sequence[float]) -> Tensor:
        """Solve with penalties; `energy` (I,) is that of the inputs before they were centred.

        Inputs that hardly vary leave nothing but the rounding of `energy` in a centred gram, which may be negative: the
        least penalty stays above that.
        """
        if not penalties:
            return torch.linalg.pinv(gram, rtol=SMALLEST, hermitian=True) @ cross
        added, sizes = [], list(self.blocks)
        for penalty, centred, whole in zip(penalties, gram.diagonal().split(sizes), energy.split(sizes), strict=True):
            mean = max(float(centred.mean()), SMALLEST / PENALTIES[0] * float(whole.sum()))
            added.append(torch.full_like(centred, penalty * (mean or 1.0)))  # of nothing but zeros: weights of zero
        return torch.cholesky_solve(cross, torch.linalg.cholesky(gram + torch.cat(added).diag()))

    def _penalties(self) -> tuple[tuple[float, ...], float]:
        """Return the penalties with the least error on the parts left out, and the share of E that they leave there.

        Ridge fits each entry of E by itself, so a few random combinations of them tell penalties apart.
        """
        width = self.cross.shape[-1]
        combinations = torch.eye(width)  # orthonormal, (C, K)
        if width > 2 * COMPARED:
            generator = torch.Generator().manual_seed(0)
            combinations = torch.linalg.qr(torch.randn(width, COMPARED, dtype=torch.float64, generator=generator)).Q
        combinations = combinations.to(self.cross)
        crosses = {part: self.cross[part] @ combinations for part in self.held}

        @functools.cache
        def error(places: tuple[int, ...]) -> float:  # but for the energy of E, which no penalty changes
            penalties = [PENALTIES[place] for place in places]
            return sum(
                _explained(self._solved(penalties, part, combinations), self.gram[part], cross)
                for part, cross in crosses.items()
            )

        equal = [(place,) * len(self.blocks) for place in range(len(PENALTIES))]
        best = min(equal if len(self.blocks) == 1 else equal[2::2], key=error)
        nearer = min(_neighbours(best), key=error)
        while error(nearer) < error(best):
            best, nearer = nearer, min(_neighbours(nearer), key=error)
        penalties = tuple(PENALTIES[place] for place in best)
        energy = float(self.energy[self.held].sum())
        rest = sum(self._error(self._solved(penalties, part), [part]) for part in self.held)
        return penalties, (max(rest, 0.0) / energy) ** 0.5 if energy else 0.0

    def _error(self, weight: Tensor, parts: list[int]) -> float:
        return float(self.energy[parts].sum()) + _explained(weight, self.gram[parts].sum(0), self.cross[parts].sum(0))

    def report(self, layer: int, weight: Tensor, **chosen: float | None) -> Fit:
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
            **chosen,
        )


def _explained(weight: Tensor, gram: Tensor, cross: Tensor) -> float:
    """Return ‖E − X W‖² − ‖E‖² = ⟨W, XᵀX W⟩ − 2 ⟨W, XᵀE⟩, from the moments alone; for combinations of E too."""
    return float((weight * (gram @ weight - 2 * cross)).sum())


def _neighbours(places: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the places in `PENALTIES` that are one step away for a single block."""
    steps = itertools.product(range(len(places)), (-1, 1))
    near = [(*places[:block], places[block] + step, *places[block + 1 :]) for block, step in steps]
    return [others for others in near if min(others) >= 0 and max(others) < len(PENALTIES)]


def pseudo_inverse(x: Tensor, epsilon: float) -> Tensor:
    """Return the pseudo-inverse of means (R, C) whose entries are known to a relative `epsilon`.

    Singular values below epsilon · max(R, C) of the largest are taken for rounding: those of float32 streams stand far
    above what float64 would call zero, and their inverse is noise times a million. At most 1 %, which bfloat16 reaches:
    beyond that, what the text says goes too.
    """
    return torch.linalg.pinv(x, rtol=min(epsilon * max(x.shape), LARGEST_CUTOFF))
