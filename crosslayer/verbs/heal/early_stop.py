"""When a stage ends before its last step: when the moving average of its loss no longer falls.

    ema_k = β ema_{k−1} + (1 − β) loss_k,   divided by 1 − β^k, so that the first losses do not weigh too little

An average that is below the mark by the share `least` of it is the next mark; a stage ends when `patience` averages in
a row are not. The first mark is that of 1 / (1 − β) losses: an average of fewer is hardly one, and where noise has made
it low, nothing would come below it. Without `least` a plateau would never end, since an average goes on falling towards
it. In Algorithm 1 of arXiv 2502.00439 W_c trains until the average stops to fall; it says no more than that.
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
    """Return after how many losses a stage ends, None where their average still falls."""
    first = math.ceil(1 / (1 - smoothing) - 1e-9)  # number of the loss whose average is the first mark
    mark, waited = math.inf, 0
    for number, value in enumerate(averages(losses, smoothing)[first - 1 :], first):
        if value < (1 - least) * mark:
            mark, waited = value, 0
        else:
            waited += 1
        if waited == patience:
            return number
    return None


class EarlyStop(TrainerCallback):
    """Ends a run by the rule, from its log, which a checkpoint holds too."""

    def __init__(self, smoothing: float, patience: int, least: float):
        self.rule = smoothing, patience, least

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the run; no checkpoint is saved of the last step, from which a resumed run would go on."""
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        if end_of(losses, *self.rule) is not None:
            control.should_training_stop, control.should_save = True, False
