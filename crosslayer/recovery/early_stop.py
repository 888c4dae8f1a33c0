"""When a stage ends before its last step: when the moving average of its loss no longer falls.

    ema_k = β ema_{k−1} + (1 − β) loss_k,   divided by 1 − β^k, so that the first losses do not weigh too little

It ends where the lowest average lies `patience` logged losses back. UniAttn (arXiv 2502.00439, Algorithm 1) trains W_c
so, without saying which β or patience.
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


def has_stopped_falling(losses: Sequence[float], smoothing: float, patience: int) -> bool:
    """Return whether the lowest average was reached `patience` losses ago, or before that."""
    values = averages(losses, smoothing)
    return bool(values) and len(values) - 1 - values.index(min(values)) >= patience


class EarlyStop(TrainerCallback):
    """Ends a run by the rule; what a resumed run must know is in the log that its checkpoint holds."""

    def __init__(self, smoothing: float, patience: int):
        self.smoothing, self.patience = smoothing, patience

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at all losses so far."""
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        if "loss" in state.log_history[-1] and has_stopped_falling(losses, self.smoothing, self.patience):
            control.should_training_stop = True
