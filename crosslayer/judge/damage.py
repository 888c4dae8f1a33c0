"""What a changed model does to each token of a text, against the original, as means over windows.

    KL = mean over tokens of Σ p_before (log p_before − log p_after);   ratio = exp(mean(nll_after − nll_before))

`OF_TOKENS` and `OF_TARGETS` name what is measured at each token, which `compare` computes. `rows.py` makes quantities
with intervals of it, for every report.

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

# Rows of logits that are compared at a time, which avoids a second copy of a window's logits.
ROWS = 128
# Tokens of a forward pass. Two windows of 256 tokens are 7% faster than one and four 12% (135M parameters), and the
# logits of every window more take 50 MB with a vocabulary of 49,152.
BATCH_TOKENS = 512
Run = Callable[[Tensor], Tensor | None]  # ids (B, T) → logits (B, T, V), or None of a model that has failed
# Windows of each domain that verbs ask for: with 16, the intervals (spread by Student's t) still cover 95%.
MIN_WINDOWS = 16
NO_TARGET = -1  # the next token of a last row, which the text does not show
OF_TOKENS = ("kl", "changed")  # at every token
OF_TARGETS = ("before", "after")  # losses of both models, at tokens whose next token is known


@dataclass(frozen=True)
class Losses:
    """Means over each window's tokens: of all that `OF_TOKENS` and `OF_TARGETS` name, (N,) each.

    `documents` holds the document of each window, `domains` its domain (empty: a single one).
    """

    means: Mapping[str, np.ndarray]
    documents: tuple[int, ...]
    domains: tuple[str, ...] = ()

    def for_domain(self, domain: str) -> "Losses":
        """Return the windows of a domain; of "all", all."""
        count = len(self.documents)
        windows = [window for window in range(count) if domain == ALL or self.domains[window] == domain]
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
    by_window: dict[str, list[dict[str, float]]] = {name: [] for name in after}
    done = 0
    with progress(doing, len(windows)) as bar:
        for batch in windows.ids.split(max(1, BATCH_TOKENS // windows.ids.shape[1])):
            reference = before(batch)
            assert reference is not None, "an original that fails raises"
            original = reference.float().log_softmax(-1)  # (B, T, V)
            for name, run in after.items():
                # A model that has failed is not asked again and has no losses: fewer windows could not be paired.
                logits = run(batch) if name in by_window else None
                if logits is None:
                    by_window.pop(name, None)
                    continue
                for log_before, of_window, ids in zip(original, logits, batch, strict=True):
                    # The last token's prediction is left out, since the window does not show its next token.
                    by_window[name].append(compare(log_before[:-1], of_window[:-1], ids[1:]))
            done += len(batch)
            bar.step(done, len(windows))
    return {name: gathered(means, windows) for name, means in by_window.items()}


def gathered(by_window: Sequence[Mapping[str, float]], windows: Windows) -> Losses:
    """Return the losses of N windows, each compared by `compare`."""
    means = {name: np.array([of_window[name] for of_window in by_window]) for name in by_window[0]}
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
        next_tokens = targets[rows][known, None]  # (K, 1)
        # In float64, since a sum over a window's tokens loses digits in float32.
        sums["before"] -= float(log_before[known].gather(1, next_tokens).double().sum())
        sums["after"] -= float(log_after[known].gather(1, next_tokens).double().sum())
        sums["kl"] += float(functional.kl_div(log_after, log_before, reduction="sum", log_target=True))
        # 1 where the most likely next token is another one.
        sums["changed"] += float((log_before.argmax(-1) != log_after.argmax(-1)).sum())
    count = int((targets != NO_TARGET).sum())
    return {name: total / (count if name in OF_TARGETS else len(targets)) for name, total in sums.items()}
