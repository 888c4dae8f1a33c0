"""How the predictions of changed models differ from the original's on text that nothing was fitted to.

    KL = mean over tokens of Σ p_before (log p_before − log p_after)

Shapes: N windows, T tokens of a window, V vocabulary, R rows of logits at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.core.method import Compensation
from crosslayer.corpus.windows import Windows

ROWS = 128  # of logits at a time, so that no second copy of a window's logits is made
Run = Callable[[Tensor], Tensor]  # ids (1, T) → logits (1, T, V)


@dataclass(frozen=True)
class Losses:
    """Means over each window's tokens: negative log-likelihood (nats) before and after, and KL (nats); all (N,).

    `documents` holds the document of each window, `domains` its domain (empty: all are of the same).
    """

    before: np.ndarray
    after: np.ndarray
    kl: np.ndarray
    documents: tuple[int, ...]
    domains: tuple[str, ...] = ()

    def of(self, domain: str) -> "Losses":
        """Return the windows of a domain."""
        rows = [number for number, name in enumerate(self.domains) if name == domain]
        documents = tuple(self.documents[row] for row in rows)
        return Losses(self.before[rows], self.after[rows], self.kl[rows], documents, (domain,) * len(rows))


def logits_of(model: PreTrainedModel) -> Run:
    """Return the forward pass of a model."""
    return lambda ids: model(input_ids=ids.to(model.device), use_cache=False).logits


def logits_without(model: PreTrainedModel, refitted: Mapping[str, Tensor]) -> Run:
    """Return the forward pass of a rewired model as if nothing was fitted: W_c is zero, W_o the original's, by name."""
    weights = dict(refitted)
    for place, module in model.named_modules():
        if isinstance(module, Compensation):
            weights |= {f"{place}.{name}": torch.zeros_like(weight) for name, weight in module.named_parameters()}

    def run(ids: Tensor) -> Tensor:
        words = {"input_ids": ids.to(model.device), "use_cache": False}
        return functional_call(model, weights, kwargs=words, strict=False).logits

    return run


@torch.no_grad()
def losses(
    before: Run, after: dict[str, Run], windows: Windows, progress: Callable[[int, int], None] | None = None
) -> dict[str, Losses]:
    """Compare changed models, by name, with the original, window by window; the original runs once for all of them."""
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in after}
    for number, ids in enumerate(windows.ids):
        original = before(ids[None])[0]  # (T, V)
        for name, run in after.items():
            rows[name].append(compare(original, run(ids[None])[0], ids))
        if progress is not None:
            progress(number + 1, len(windows))
    compared = {}
    for name in after:
        nll_before, nll_after, kl = np.array(rows[name]).T  # (N, 3) → three of (N,)
        compared[name] = Losses(nll_before, nll_after, kl, windows.documents, windows.domains)
    return compared


def compare(before: Tensor, after: Tensor, ids: Tensor) -> tuple[float, float, float]:
    """Return mean losses before and after and mean KL of a window; logits (T, V), whose last row predicts nothing."""
    targets = ids[1:].to(before.device)  # (T − 1,)
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(targets), ROWS):
        rows = slice(start, min(start + ROWS, len(targets)))
        log_before = before[rows].float().log_softmax(-1)  # (R, V)
        log_after = after[rows].float().log_softmax(-1)
        target = targets[rows, None]  # (R, 1)
        sums[0] -= log_before.gather(1, target).double().sum().cpu()
        sums[1] -= log_after.gather(1, target).double().sum().cpu()
        sums[2] += functional.kl_div(log_after, log_before, reduction="sum", log_target=True).double().cpu()
    nll_before, nll_after, kl = (sums / len(targets)).tolist()
    return nll_before, nll_after, kl
