"""What a change costs on text that it has not seen: perplexity and KL, paired by window, with bootstrap intervals.

    ratio = exp(mean(nll_after − nll_before)),  KL = mean over tokens of Σ p_before (log p_before − log p_after)

Intervals are percentiles of windows drawn again within each document, n − 1 of its n (Rao and Wu 1988), so that the
spread is not understated. Documents of fewer than 8 windows are drawn as one (with the first larger document, where
they have fewer than 8 together); where that leaves one stratum (`Damage.strata`), windows are taken as independent.
Draws are spread by Student's t over the normal quantile, since a domain may have 16 windows only. Conditional on this
text.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.corpus.windows import Windows
from crosslayer.method import Compensation
from crosslayer.plan import DepthPlan
from crosslayer.probe.what_if import Wiring, what_if

FEWEST = 16  # windows of a domain, below which no interval is given
DRAWS = 4000
STRATUM = 8  # windows, below which a document is no stratum of its own
ROWS = 128  # of logits at a time, so that no second copy of a window's logits is made
Run = Callable[[Tensor], Tensor]  # ids (1, T) → logits (1, T, V)


@dataclass(frozen=True)
class Losses:
    """Means over each window's tokens: negative log-likelihood (nats) before and after, and KL (nats); (N,)."""

    before: np.ndarray
    after: np.ndarray
    kl: np.ndarray
    documents: tuple[int, ...]
    domains: tuple[str, ...] = ()  # empty: all of one

    def of(self, domain: str) -> "Losses":
        """Return the windows of one domain."""
        rows = [number for number, name in enumerate(self.domains) if name == domain]
        chosen = tuple(self.documents[row] for row in rows)
        return Losses(self.before[rows], self.after[rows], self.kl[rows], chosen, (domain,) * len(rows))


@dataclass(frozen=True)
class Damage:
    """Perplexities, their ratio and the KL to the original, with 95 % intervals over `windows` windows."""

    perplexity_before: float
    perplexity_after: float
    ratio: float
    ratio_ci95: tuple[float, float]
    kl: float
    kl_ci95: tuple[float, float]
    windows: int
    documents: int
    strata: int  # within which windows are drawn; 1: windows are taken as independent


def logits_of(model: PreTrainedModel) -> Run:
    """Return the forward pass of a model."""
    return lambda ids: model(input_ids=ids.to(model.device), use_cache=False).logits


def logits_if(model: PreTrainedModel, plan: DepthPlan, wiring: Wiring) -> Run:
    """Return the forward pass of a model that pretends to be wired by `plan`."""

    def run(ids: Tensor) -> Tensor:
        with what_if(model, plan, wiring):
            return model(input_ids=ids.to(model.device), use_cache=False).logits

    return run


def logits_without(model: PreTrainedModel) -> Run:
    """Return the forward pass of a rewired model as if every W_c were zero."""
    compensations = [module for module in model.modules() if isinstance(module, Compensation)]

    def run(ids: Tensor) -> Tensor:
        hooks = [
            module.register_forward_hook(lambda _, args, out: out.new_zeros(out.shape)) for module in compensations
        ]
        try:
            return logits_of(model)(ids)
        finally:
            for hook in hooks:
                hook.remove()

    return run


@torch.no_grad()
def losses(before: Run, after: dict[str, Run], windows: Windows, progress: Any = None) -> dict[str, Losses]:
    """Compare changed models with the original, window by window; the original runs once for all of them."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in after}
    for number, ids in enumerate(windows.ids):
        original = before(ids[None])[0]
        for name, run in after.items():
            found[name].append(compare(original, run(ids[None])[0], ids))
        if progress is not None:
            progress(number + 1, len(windows))
    result = {}
    for name, rows in found.items():
        nll, changed, kl = np.array(rows).T
        result[name] = Losses(nll, changed, kl, windows.documents, windows.domains)
    return result


def compare(before: Tensor, after: Tensor, ids: Tensor) -> tuple[float, float, float]:
    """Return mean losses before and after and mean KL of one window; logits (T, V), whose last row predicts nothing."""
    targets, sums = ids[1:].to(before.device), torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(targets), ROWS):
        rows = slice(start, min(start + ROWS, len(targets)))
        one, two = before[rows].float().log_softmax(-1), after[rows].float().log_softmax(-1)
        picked = targets[rows, None]
        sums[0] -= one.gather(1, picked).double().sum().cpu()
        sums[1] -= two.gather(1, picked).double().sum().cpu()
        sums[2] += functional.kl_div(two, one, reduction="sum", log_target=True).double().cpu()
    first, second, divergence = (sums / len(targets)).tolist()
    return first, second, divergence


def damage(found: Losses, seed: int = 0) -> Damage:
    """Summarise losses with paired bootstrap intervals, stratified by document.

    Raises:
        ValueError: there are fewer than 16 windows.

    """
    if len(found.before) < FEWEST:
        raise ValueError(f"{len(found.before)} windows are too few for an interval; use at least {FEWEST}")
    change, weights = found.after - found.before, _weights(found.documents, seed)
    return Damage(
        float(np.exp(found.before.mean())),
        float(np.exp(found.after.mean())),
        float(np.exp(change.mean())),
        _interval(np.exp(weights @ change)),
        float(found.kl.mean()),
        _interval(weights @ found.kl),
        len(found.before),
        len(set(found.documents)),
        len(_strata(found.documents)),
    )


def by_domain(found: dict[str, Losses], seen: frozenset[str], seed: int = 0) -> dict[str, Any]:
    """Return the damage of each domain, the worst first among those that nothing was fitted to, then the others.

    `found`: losses "after", and "without" (the same without W_c) where there is W_c; its `gain` is then KL after minus
    KL without, below 0 where W_c helps.
    """
    after, without, rows = found["after"], found.get("without"), []
    for name in dict.fromkeys(after.domains):
        row: dict[str, Any] = {"name": name, "seen": name in seen, **asdict(damage(after.of(name), seed))}
        if without is not None:
            gain, interval = difference(after.of(name), without.of(name), seed)
            row |= {"without": asdict(damage(without.of(name), seed)), "gain": gain, "gain_ci95": interval}
        rows.append(row)
    return {"domains": sorted(rows, key=lambda row: (row["seen"], -row["kl"])), "all": asdict(damage(after, seed))}


def difference(one: Losses, other: Losses, seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Return the mean of one's KL minus the other's, paired by window, and its 95 % interval."""
    gap = one.kl - other.kl
    return float(gap.mean()), _interval(_weights(one.documents, seed) @ gap)


def _weights(documents: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the weight of each window in the mean of each draw, (DRAWS, N)."""
    generator, groups = np.random.default_rng(seed), _strata(documents)
    weights = np.zeros((DRAWS, len(documents)))
    for rows in groups:
        count = len(rows)
        drawn = generator.multinomial(count - 1, np.full(count, 1 / count), size=DRAWS)
        weights[:, rows] = drawn * (count / (count - 1) / len(documents))
    spread = stats.t.ppf(0.975, len(documents) - len(groups)) / stats.norm.ppf(0.975)
    return (1 + spread * (weights * len(documents) - 1)) / len(documents)


def _strata(documents: tuple[int, ...]) -> list[np.ndarray]:
    """Return the windows of each stratum: large documents, and all small ones as one."""
    names = np.array(documents)
    strata = [np.flatnonzero(names == name) for name in sorted(set(documents))]
    large = [rows for rows in strata if len(rows) >= STRATUM]
    small = np.concatenate([np.empty(0, int), *(rows for rows in strata if len(rows) < STRATUM)])
    if large and len(small) < STRATUM:
        large[0], small = np.concatenate([large[0], small]), small[:0]
    return [*large, small] if len(small) else large


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
