"""Early stopping of a stage: it ends when the moving average of its loss no longer falls.

    ema_k = β ema_{k−1} + (1 − β) loss_k,   divided by 1 − β^k, which corrects the bias of the first averages

An average that is below the best one by the share `least` of it becomes the new best; a stage ends after `patience`
averages in a row that are not. The first best is the average of 1 / (1 − β) losses: one of fewer is too noisy, and
after a low one nothing would come below it. Without `least` a plateau would never end, since an average keeps
approaching it.
In Algorithm 1 of arXiv 2502.00439 W_c trains until the average stops falling; no further details are given.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.signal import lfilter
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def averages(losses: Sequence[float], smoothing: float) -> list[float]:
    """Return the exponential moving average after every loss; `smoothing` is β."""
    sums = np.asarray(lfilter([1 - smoothing], [1, -smoothing], losses))
    return (sums / (1 - smoothing ** np.arange(1, len(losses) + 1))).tolist()


def end_of(losses: Sequence[float], smoothing: float, patience: int, least: float) -> int | None:
    """Return the number of losses after which a stage ends, None if their average still falls."""
    first = math.ceil(1 / (1 - smoothing) - 1e-9)  # the loss whose average is the first best
    best, waited = math.inf, 0
    for number, value in enumerate(averages(losses, smoothing)[first - 1 :], first):
        if value < (1 - least) * best:
            best, waited = value, 0
        else:
            waited += 1
        if waited == patience:
            return number
    return None


class EarlyStop(TrainerCallback):
    """Ends a run by this rule, computed from its log, which checkpoints contain."""

    def __init__(self, smoothing: float, patience: int, least: float):
        self.rule = smoothing, patience, least

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the run, without a checkpoint of the last step, from which a resumed run would train on."""
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        if end_of(losses, *self.rule) is not None:
            control.should_training_stop, control.should_save = True, False
