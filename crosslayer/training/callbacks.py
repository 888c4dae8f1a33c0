"""Callbacks of a run: a log in JSON lines, a clean stop at Ctrl-C, and early stopping.

A stage ends early when the moving average of its loss no longer falls:

    ema_k = β ema_{k−1} + (1 − β) loss_k,   divided by 1 − β^k, which corrects the bias of the first averages

An average that is below the best one by the share `least` of it becomes the new best; a stage ends after `patience`
averages in a row that are not. The first best is the average of 1 / (1 − β) losses: one of fewer is too noisy, and
after a low one nothing would come below it (this ended a fifth to a half of simulated runs by noise). Without `least` a
plateau would never end, since an average keeps approaching it.
In Algorithm 1 of arXiv 2502.00439 W_c trains until the average stops falling; no further details are given.
"""

import contextlib
import json
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from scipy.signal import lfilter
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosslayer._path import NAME
from crosslayer._start import interrupts
from crosslayer.output.folder import write_whole
from crosslayer.output.progress import Steps, progress
from crosslayer.training.checkpoints import checkpoints

LOG = "log.jsonl"
NOTICE = f"{NAME}: interrupted; finishing and saving the current step (Ctrl-C again stops immediately)\n"


def _line(values: dict[str, Any]) -> str:
    # JSON has no NaN, and other readers refuse Python's
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


@dataclass(eq=False)
class Log(TrainerCallback):
    """Writes Trainer's log into `log.jsonl`, one object with its `step` per line, and shows progress.

    A resumed run removes the lines after its checkpoint. Numbers that are not finite are null. Only the first process
    writes and shows progress.
    """

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    steps: Steps | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the lines up to the checkpoint; a new run starts without lines."""
        if state.is_world_process_zero:
            path = Path(str(args.output_dir)) / LOG
            path.parent.mkdir(parents=True, exist_ok=True)
            # a resumed run may have logged steps after its checkpoint, which it trains again
            write_whole(path, "".join(map(_line, state.log_history)))
            self.steps = self.stack.enter_context(progress("training", state.max_steps))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the last step, and show progress for steps that are not logged."""
        # else the record's final loss would be that of up to `logging_steps` steps before
        control.should_log |= state.global_step == state.max_steps
        if self.steps is not None and not control.should_log:
            self.steps.step(state.global_step, state.max_steps)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Append the newest line, and show loss and speed."""
        if state.is_world_process_zero:
            newest = state.log_history[-1]
            with (Path(str(args.output_dir)) / LOG).open("a", encoding="utf-8") as file:
                file.write(_line(newest))
            if self.steps is not None and "loss" in newest:
                doing = f"loss {newest['loss']:.4f}, {newest['tokens_per_second']:,.0f} tokens/s"
                self.steps.step(state.global_step, state.max_steps, doing)

    def close(self) -> None:
        """End the progress, however the training ended."""
        self.stack.close()
        self.steps = None


class Interruption(TrainerCallback):
    """Handles Ctrl-C while a single process trains; several would stop at different steps and wait for one another."""

    pressed = False

    @contextlib.contextmanager
    def handled(self, args: TrainingArguments) -> Iterator[None]:
        """Raise KeyboardInterrupt at the end of the block if Ctrl-C was pressed within, or at a second press."""
        before = signal.getsignal(signal.SIGINT)
        self.pressed = False
        # only the main thread may set a handler; and a signal that is ignored, as in a shell's background, stays so
        main = threading.current_thread() is threading.main_thread()
        if not main or args.world_size > 1 or not callable(before):
            yield
            return

        def press(number: int, frame: FrameType | None) -> None:
            if self.pressed:
                before(number, frame)
            self.pressed = True
            # not print: a handler may interrupt another write into the same buffer, which Python refuses
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


@dataclass(eq=False)
class LastStep(TrainerCallback):
    """Skips checkpoint and evaluation of the last step of a stage, whose model is written and measured next.

    If the run is interrupted in that step, the checkpoint is kept.
    """

    interruption: Interruption

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Override the decisions of Trainer."""
        if state.global_step >= state.max_steps:
            control.should_save, control.should_evaluate = self.interruption.pressed, False


@contextlib.contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Make the message of an interrupted command name the checkpoint from which the run can be resumed."""
    interrupts.advice = ""
    try:
        yield
    except KeyboardInterrupt:
        interrupts.caught()
        last = next(reversed(checkpoints(folder).values()), None)
        state = "no checkpoint was written yet" if last is None else f"--resume continues from {last.name}"
        interrupts.advice = f"; {state}"
        raise


def averages(losses: Sequence[float], smoothing: float) -> list[float]:
    """Return the exponential moving average after every loss; `smoothing` is β."""
    sums = np.asarray(lfilter([1 - smoothing], [1, -smoothing], losses))
    return (sums / (1 - smoothing ** np.arange(1, len(losses) + 1))).tolist()


def end_of(losses: Sequence[float], smoothing: float, patience: int, least: float) -> int | None:
    """Return the number of losses after which a stage ends, None if their average still falls."""
    # the loss whose average is the first best; 1 / (1 − 0.9) is a little above 10 in floating point
    first = math.ceil(1 / (1 - smoothing) - 1e-9)
    best = math.inf
    waited = 0
    for count, average in enumerate(averages(losses, smoothing)[first - 1 :], first):
        if average < (1 - least) * best:
            best = average
            waited = 0
        else:
            waited += 1
        if waited == patience:
            return count
    return None


@dataclass(eq=False)
class EarlyStop(TrainerCallback):
    """Ends a run by this rule, computed from its log, which checkpoints contain; arguments as `end_of`."""

    smoothing: float
    patience: int
    least: float

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the run, without a checkpoint of the last step, from which a resumed run would train on."""
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        if end_of(losses, self.smoothing, self.patience, self.least) is not None:
            control.should_training_stop, control.should_save = True, False
