"""Checkpoints by the clock, beside those by steps: what a run that is cut off loses is bounded in minutes."""

import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class SaveByTime(TrainerCallback):
    """Has a checkpoint saved after the step that ends so many minutes after the last one; the first process decides."""

    def __init__(self, minutes: float):
        self.seconds, self.since = 60 * minutes, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self.since = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Have a checkpoint saved if it is due."""
        due = time.monotonic() - self.since >= self.seconds
        if args.world_size > 1:
            told = torch.tensor([due], device=args.device)
            dist.broadcast(told, 0)
            due = bool(told.item())
        control.should_save |= due

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock again."""
        self.since = time.monotonic()
