"""What a training run tells while it runs: a line of JSON for each measurement, and progress for people."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosslayer.output.progress import Meter, Steps

LOG = "log.jsonl"


class JsonLog(TrainerCallback):
    """Writes `log.jsonl` into the run's folder: what Trainer logs, an object a line, each with its `step`.

    A run that is resumed takes back the lines after its checkpoint. Numbers that are not finite are null.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the lines up to the checkpoint; a new run begins with none."""
        if state.is_world_process_zero:
            path = _path(args)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{LOG}.partial")
            partial.write_text("".join(map(_line, state.log_history)), encoding="utf-8")
            partial.replace(path)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Have the last step logged, whatever the number of steps between two lines."""
        if state.global_step == state.max_steps:
            control.should_log = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Append the newest line."""
        if state.is_world_process_zero:
            with _path(args).open("a", encoding="utf-8") as file:
                file.write(_line(state.log_history[-1]))


class Shown(TrainerCallback):
    """Shows steps, the time that is left, loss and tokens a second, on the first process."""

    def __init__(self, meter: Meter):
        self.meter, self.stack = meter, contextlib.ExitStack()
        self.steps: Steps | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the meter."""
        if state.is_world_process_zero:
            self.steps = self.stack.enter_context(self.meter("training", state.max_steps))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the step; where there is something to log, `on_log` does."""
        if self.steps is not None and not control.should_log:
            self.steps.step(state.global_step, state.max_steps)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the step with what was measured in it."""
        newest = state.log_history[-1]
        if self.steps is not None and "loss" in newest:
            words = f"loss {newest['loss']:.4f}, {newest['tokens_per_second']:,.0f} tokens/s"
            self.steps.step(state.global_step, state.max_steps, words)

    def close(self) -> None:
        """Close the meter, however the training ended."""
        self.stack.close()
        self.steps = None


def _path(args: TrainingArguments) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / LOG


def _line(values: dict[str, Any]) -> str:
    """Return a line of JSON; what is not finite has no number there."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
