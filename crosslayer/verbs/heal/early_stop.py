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

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Average:
    """The exponential moving average of losses, corrected for its start; `smoothing` is β."""

    def __init__(self, smoothing: float):
        self.smoothing, self.sum, self.weight = smoothing, 0.0, 0.0

    def add(self, loss: float) -> float:
        """Take a loss, and return the average."""
        self.sum = self.smoothing * self.sum + (1 - self.smoothing) * loss
        self.weight = self.smoothing * self.weight + (1 - self.smoothing)
        return self.sum / self.weight


def averages(losses: Sequence[float], smoothing: float) -> list[float]:
    """Return the exponential moving average after every loss."""
    average = Average(smoothing)
    return [average.add(loss) for loss in losses]


class EarlyStop(TrainerCallback):
    """Ends a run by the rule; what a resumed run must know is in the log that its checkpoint holds."""

    def __init__(self, smoothing: float, patience: int, least: float):
        self.average, self.patience, self.least = Average(smoothing), patience, least
        self.first = math.ceil(1 / (1 - smoothing) - 1e-9)  # number of the loss whose average is the first mark
        self.losses, self.waited, self.mark = 0, 0, math.inf

    def falling(self, loss: float) -> bool:
        """Take a loss, and return whether the average still falls."""
        value, self.losses = self.average.add(loss), self.losses + 1
        if self.losses < self.first:
            return True
        if value < (1 - self.least) * self.mark:
            self.mark, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited < self.patience

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the losses of the parts before, where a run is resumed."""
        for entry in state.log_history:
            if "loss" in entry:
                self.falling(entry["loss"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the newest loss; no checkpoint is saved of the last step, from which a resumed run would go on."""
        newest = state.log_history[-1]
        if "loss" in newest and not self.falling(newest["loss"]):
            control.should_training_stop, control.should_save = True, False
