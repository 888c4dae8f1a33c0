"""The losses of models on evaluation text, their KL to the original, and the damage: both with intervals.

    KL = mean over tokens of Σ p_before (log p_before − log p_after);   ratio = exp(mean(nll_after − nll_before))

Shapes: N windows, T tokens of a window, V vocabulary, R rows of logits at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.corpus.windows import Windows
from crosslayer.output.progress import progress
from crosslayer.output.record import Frozen
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.estimate import FEWEST_DOMAINS, Estimate, new_domain

ROWS = 128  # of logits at a time, which avoids a second copy of a window's logits
BATCH_TOKENS = 512  # of a forward pass: larger ones are hardly faster, and logits are large
Run = Callable[[Tensor], Tensor | None]  # ids (B, T) → logits (B, T, V), or None of a model that has failed
MIN_WINDOWS = 16  # per domain: what verbs ask for


@dataclass(frozen=True)
class Losses:
    """Means over each window's tokens: negative log-likelihood (nats) before and after, and KL (nats); all (N,).

    `documents` holds the document of each window, `domains` its domain (empty: a single one).
    """

    before: np.ndarray
    after: np.ndarray
    kl: np.ndarray
    documents: tuple[int, ...]
    domains: tuple[str, ...] = ()

    def for_domain(self, domain: str) -> "Losses":
        """Return the windows of a domain."""
        rows = [number for number, name in enumerate(self.domains) if name == domain]
        documents = tuple(self.documents[row] for row in rows)
        return Losses(self.before[rows], self.after[rows], self.kl[rows], documents, (domain,) * len(rows))


def logits_of(model: PreTrainedModel) -> Run:
    """Return the forward pass of a model."""
    return lambda ids: model(input_ids=ids.to(model.device), use_cache=False).logits


@torch.no_grad()
def losses(
    before: Run, after: dict[str, Run], windows: Windows, doing: str = "measuring the damage"
) -> dict[str, Losses]:
    """Compare converted models, by name, with the original, window by window; the original runs once for all.

    A model that fails at a window has no losses. `doing` is what a progress meter shows.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in after}
    done = 0
    with progress(doing, len(windows)) as bar:
        for batch in windows.ids.split(max(1, BATCH_TOKENS // windows.ids.shape[1])):
            reference = before(batch)
            assert reference is not None, "an original that fails raises"
            original = reference.float().log_softmax(-1)  # (B, T, V)
            for name, run in after.items():
                logits = run(batch) if name in rows else None
                if logits is None:
                    rows.pop(name, None)
                    continue
                rows[name] += [compare(*of_window) for of_window in zip(original, logits, batch, strict=True)]
            done += len(batch)
            bar.step(done, len(windows))
    compared = {}
    for name, own in rows.items():
        nll_before, nll_after, kl = np.array(own).T  # (N, 3) → three of (N,)
        compared[name] = Losses(nll_before, nll_after, kl, windows.documents, windows.domains)
    return compared


def compare(before: Tensor, after: Tensor, ids: Tensor) -> tuple[float, float, float]:
    """Return mean losses before and after, and mean KL, of a window, the last row unused.

    `before` (T, V) are log-probabilities of the original, `after` (T, V) logits of the other model. Of vocabularies of
    different sizes, as matrices padded to other multiples have them (Qwen2.5: 151,936 and 152,064), the common tokens
    are compared, and the probabilities of each model add up to 1 over them.
    """
    common = min(before.shape[-1], after.shape[-1])
    if before.shape[-1] > common:
        before = before[:, :common].log_softmax(-1)
    after = after[:, :common]
    targets = ids[1:].to(before.device)  # (T − 1,)
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(targets), ROWS):
        rows = slice(start, min(start + ROWS, len(targets)))
        log_before, log_after = before[rows], after[rows].float().log_softmax(-1)  # (R, V)
        target = targets[rows, None]  # (R, 1)
        sums[0] -= log_before.gather(1, target).double().sum().cpu()
        sums[1] -= log_after.gather(1, target).double().sum().cpu()
        sums[2] += functional.kl_div(log_after, log_before, reduction="sum", log_target=True).double().cpu()
    nll_before, nll_after, kl = (sums / len(targets)).tolist()
    return nll_before, nll_after, kl


class Damage(Frozen):
    """Perplexities, their ratio and the KL to the original (nats/token), over windows."""

    perplexity_before: float
    perplexity_after: float
    ratio: Estimate
    kl: Estimate
    documents: int
    strata: int = Field(description="within which windows are resampled; 1: windows are taken as independent")


class Gain(Frozen):
    """The effect of compensation: the damage without it, and the KL with it minus without (below 0: it helps)."""

    without: Damage
    kl: Estimate


class DomainDamage(Damage):
    """The damage on a domain."""

    name: str
    seen: bool = Field(description="whether this is a calibration domain")
    gain: Gain | None = Field(description="None if nothing was fitted")


class Domains(Frozen):
    """The damage by domain, the worst unseen one first, and on all windows together."""

    domains: list[DomainDamage] = Field(min_length=1)
    all: Damage
    new_domain: Estimate | None = Field(description="KL on text of another kind, from the domains; None with too few")


def kl_estimate(kl: np.ndarray, documents: Sequence[int], seed: int = 0) -> Estimate:
    """Return the mean KL of N windows (N,), with the interval that every report has; a single window has none."""
    mean = Bootstrap(tuple(documents), seed).mean(kl)
    if mean.low is None:
        return mean
    return mean.model_copy(update={"low": max(mean.low, min(mean.value, 0.0))})  # a KL is at least 0, but for rounding


def ratio_estimate(losses: Losses, seed: int = 0) -> Estimate:
    """Return the ratio of perplexities after and before, with the interval that every report has."""
    return Bootstrap(losses.documents, seed).ratio(losses.after - losses.before)


def damage(losses: Losses, seed: int = 0) -> Damage:
    """Return the damage with paired bootstrap intervals, stratified by document."""
    return Damage(
        perplexity_before=float(np.exp(losses.before.mean())),
        perplexity_after=float(np.exp(losses.after.mean())),
        ratio=ratio_estimate(losses, seed),
        kl=kl_estimate(losses.kl, losses.documents, seed),
        documents=len(set(losses.documents)),
        strata=len(Bootstrap(losses.documents, seed).strata),
    )


def difference(losses: Losses, other: Losses, seed: int = 0) -> Estimate:
    """Return the mean KL of the first minus that of the other, paired by window."""
    return Bootstrap(losses.documents, seed).mean(losses.kl - other.kl)


def by_domain(after: Losses, uncompensated: Losses | None, seen: frozenset[str], seed: int = 0) -> Domains:
    """Return the damage by domain: unseen domains first, and the worst of each kind first.

    `uncompensated`: the losses without what was fitted, None if nothing was. `seen`: the calibration domains.
    """
    rows = []
    for name in dict.fromkeys(after.domains):
        own, gain = after.for_domain(name), None
        if uncompensated is not None:
            without = uncompensated.for_domain(name)
            gain = Gain(without=damage(without, seed), kl=difference(own, without, seed))
        rows.append(DomainDamage(**dict(damage(own, seed)), name=name, seen=name in seen, gain=gain))
    rows.sort(key=lambda row: (row.seen, -row.kl.value))
    other = new_domain([row.kl.value for row in rows], least=0.0) if len(rows) >= FEWEST_DOMAINS else None
    return Domains(domains=rows, all=damage(after, seed), new_domain=other)
