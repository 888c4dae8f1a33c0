"""Ctrl-C while a model is trained: the step under way is finished and saved, and the line says how to go on."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosslayer._path import NAME
from crosslayer._start import interrupts
from crosslayer.verbs.train.checkpoints import checkpoints

NOTICE = f"{NAME}: interrupted; the step under way is finished and saved first (Ctrl-C again ends at once)\n"


class Interruption(TrainerCallback):
    """Takes Ctrl-C while a single process trains; several would stop at different steps, and wait for one another."""

    def __init__(self):
        self.pressed = False

    @contextlib.contextmanager
    def heeded(self, args: TrainingArguments) -> Iterator[None]:
        """Raise KeyboardInterrupt at the end of the block if Ctrl-C was pressed within, or at a second press."""
        before, self.pressed = signal.getsignal(signal.SIGINT), False
        main = threading.current_thread() is threading.main_thread()
        if not main or args.world_size > 1 or not callable(before):
            yield
            return

        def press(number: int, frame: FrameType | None) -> None:
            if self.pressed:
                before(number, frame)
            self.pressed = True
            os.write(2, NOTICE.encode())

        signal.signal(signal.SIGINT, press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.pressed:
            raise KeyboardInterrupt

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop."""
        if self.pressed:
            control.should_save = control.should_training_stop = True


@contextlib.contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Have the line of an interrupted command say from which checkpoint of a run's folder it can go on."""
    interrupts.advice = ""
    try:
        yield
    except KeyboardInterrupt:
        interrupts.caught()
        last = next(reversed(checkpoints(folder).values()), None)
        told = "no checkpoint was written yet" if last is None else f"the last whole checkpoint is {last.name}"
        interrupts.advice = f"; {told}{'' if last is None else ', and --resume goes on from it'}"
        raise
