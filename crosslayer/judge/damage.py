"""What a changed model does to each token of a text, against the original, as means over windows.

    KL = mean over tokens of Σ p_before (log p_before − log p_after);   ratio = exp(mean(nll_after − nll_before))

`OF_TOKENS` is the list of what is measured at each token. `rows.py` makes quantities with intervals of it, for every
report.

Shapes: N windows, T tokens of a window, V vocabulary, R rows of logits at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.corpus.windows import Windows
from crosslayer.judge.report import ALL
from crosslayer.output.progress import progress

ROWS = 128  # of logits at a time, which avoids a second copy of a window's logits
BATCH_TOKENS = 512  # of a forward pass: larger ones are hardly faster, and logits are large
Run = Callable[[Tensor], Tensor | None]  # ids (B, T) → logits (B, T, V), or None of a model that has failed
MIN_WINDOWS = 16  # per domain: what verbs ask for
NO_TARGET = -1  # the next token of a last row, which the text does not show


def _loss_before(before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
    return -before.gather(1, targets).double().sum()


def _loss_after(before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
    return -after.gather(1, targets).double().sum()


def _kl(before: Tensor, after: Tensor) -> Tensor:
    return functional.kl_div(after, before, reduction="sum", log_target=True)


def _changed(before: Tensor, after: Tensor) -> Tensor:
    return (before.argmax(-1) != after.argmax(-1)).sum()


# Each returns a sum over R tokens, from the log-probabilities (R, V) of the original and of the changed model.
OF_TOKENS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _kl,
    "changed": _changed,  # 1 where the most likely next token is another one
}
# The same, where the next token (R, 1) is known too.
OF_TARGETS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"before": _loss_before, "after": _loss_after}


@dataclass(frozen=True)
class Losses:
    """Means over each window's tokens: of every entry of `OF_TOKENS` and `OF_TARGETS` by name, (N,).

    `documents` holds the document of each window, `domains` its domain (empty: a single one).
    """

    means: Mapping[str, np.ndarray]
    documents: tuple[int, ...]
    domains: tuple[str, ...] = ()

    def windows_of(self, domain: str) -> list[int]:
        """Return the numbers of a domain's windows; of "all", all."""
        count = len(self.documents)
        return [window for window in range(count) if domain == ALL or self.domains[window] == domain]

    def for_domain(self, domain: str) -> "Losses":
        """Return the windows of a domain, or all."""
        windows = self.windows_of(domain)
        means = {name: values[windows] for name, values in self.means.items()}
        domains = tuple(self.domains[window] for window in windows) if self.domains else ()
        return Losses(means, tuple(self.documents[window] for window in windows), domains)


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
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in after}
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
                for log_before, own, ids in zip(original, logits, batch, strict=True):
                    rows[name].append(compare(log_before[:-1], own[:-1], ids[1:]))
            done += len(batch)
            bar.step(done, len(windows))
    return {name: gathered(own, windows) for name, own in rows.items()}


def gathered(rows: Sequence[Mapping[str, float]], windows: Windows) -> Losses:
    """Return the losses of N windows, each compared by `compare`."""
    means = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return Losses(means, windows.documents, windows.domains)


def compare(before: Tensor, after: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the means over T tokens of all that is measured at a token, by name.

    `before` (T, V) are log-probabilities of the original, `after` (T, V) logits of the other model, `targets` (T,) the
    next tokens, `NO_TARGET` where none is known: losses leave such tokens out. Of vocabularies of different sizes, as
    matrices padded to other multiples have them (Qwen2.5: 151,936 and 152,064), the common tokens are compared, and
    the probabilities of each model add up to 1 over them.
    """
    common = min(before.shape[-1], after.shape[-1])
    if before.shape[-1] > common:
        before = before[:, :common].log_softmax(-1)
    after, targets = after[:, :common], targets.to(before.device)
    sums = dict.fromkeys([*OF_TARGETS, *OF_TOKENS], 0.0)
    for start in range(0, len(targets), ROWS):
        rows = slice(start, start + ROWS)
        log_before, log_after = before[rows], after[rows].float().log_softmax(-1)  # (R, V)
        known = (targets[rows] != NO_TARGET).nonzero()[:, 0]
        with_target = log_before[known], log_after[known], targets[rows][known, None]  # (K, V), (K, V), (K, 1)
        for name, of_targets in OF_TARGETS.items():
            sums[name] += float(of_targets(*with_target))
        for name, of_tokens in OF_TOKENS.items():
            sums[name] += float(of_tokens(log_before, log_after))
    count = int((targets != NO_TARGET).sum())
    return {name: total / (count if name in OF_TARGETS else len(targets)) for name, total in sums.items()}
