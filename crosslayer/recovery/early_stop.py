"""When a stage ends before its last step: when the moving average of its loss no longer falls.

    ema_k = β ema_{k−1} + (1 − β) loss_k,   divided by 1 − β^k, so that the first losses do not weigh too little

It ends after k logged losses where the lowest of the last `patience` averages is not below the lowest before them by
the share `least` of it. Without `least` a plateau would never end, since an average goes on falling towards it. In
Algorithm 1 of arXiv 2502.00439 W_c trains until the average stops to fall; it says no more than that.
"""

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def averages(losses: Sequence[float], smoothing: float) -> list[float]:
    """Return the exponential moving average after every loss, corrected for its start; `smoothing` is β."""
    values, sum_, weight = [], 0.0, 0.0
    for loss in losses:
        sum_ = smoothing * sum_ + (1 - smoothing) * loss
        weight = smoothing * weight + (1 - smoothing)
        values.append(sum_ / weight)
    return values


def has_stopped_falling(losses: Sequence[float], smoothing: float, patience: int, least: float) -> bool:
    """Return whether the average has not fallen by the share `least` within the last `patience` losses."""
    if len(losses) <= patience:
        return False
    values = averages(losses, smoothing)
    return min(values[-patience:]) > (1 - least) * min(values[:-patience])


class EarlyStop(TrainerCallback):
    """Ends a run by the rule; what a resumed run must know is in the log that its checkpoint holds."""

    def __init__(self, smoothing: float, patience: int, least: float):
        self.rule = (smoothing, patience, least)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at all losses so far."""
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        if "loss" in state.log_history[-1] and has_stopped_falling(losses, *self.rule):
            control.should_training_stop = True
