"""What a checkpoint must be for a run to go on from it: of that step, of the same batch, and readable throughout.

That its files are those that were written, `checkpoints.damage` says; here a checkpoint may come from anyone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer_pt_utils import safe_globals

from crosslayer.verbs.train.checkpoints import NAME
from crosslayer.verbs.train.record import curve_of, training_seconds

STATE, KEPT = "trainer_state.json", "crosslayer"
LOG = TypeAdapter(list[dict[str, float | None]])
SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")
LONGEST = 160  # characters of what another library says


class Kept(BaseModel):
    """What `trainer_state.json` keeps under `KEPT` beside Trainer's own."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sequences: int = Field(ge=1, description="of a step, over all processes")
    loss: float = Field(description="sum of the losses since the newest that was logged")
    logged: int = Field(ge=0, description="the step of that one")
    order: Literal["drawn"] = Field(description="of rows; earlier releases computed another")


def step_sequences(args: TrainingArguments) -> int:
    """Return how many sequences a step reads, over all processes and the batches that it accumulates."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run goes on, after `step`."""

    checkpoint: Path
    step: int
    kept: Kept

    @classmethod
    def read(cls, checkpoint: Path, args: TrainingArguments) -> Self:
        """Check a checkpoint before anything of it is loaded.

        Raises:
            ValueError: a file of it cannot be read, or it is of another step or another batch.

        """
        try:
            state = TrainerState.load_from_json(str(checkpoint / STATE))
            kept = Kept.model_validate((state.stateful_callbacks or {})[KEPT])  # type: ignore[call-overload]
            LOG.validate_python(state.log_history)
            curve_of(state.log_history)
            if not (isinstance(state.global_step, int) and math.isfinite(training_seconds(state.log_history))):
                raise ValueError
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            raise _refused(checkpoint, f"{STATE} is damaged, or of an older release") from None
        _check_batch(checkpoint, kept.sequences, args)  # with another one a run by tokens has other steps, too
        named = NAME.fullmatch(checkpoint.name)
        if state.global_step > args.max_steps or named is not None and int(named[1]) != state.global_step:
            raise _refused(checkpoint, f"{STATE} is of step {state.global_step}")
        for path in sorted(checkpoint.glob("*.pt*")):
            try:
                with safe_globals():
                    torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # many kinds, by what is wrong
                raise _refused(checkpoint, f"{path.name} is damaged") from error
        return cls(checkpoint, state.global_step, kept)

    def check_weights(self, model: nn.Module, loaded: Any) -> None:
        """Refuse weights that lack a parameter, tied ones apart, or hold others; `loaded` is what PyTorch says."""
        named = dict(model.named_parameters(remove_duplicate=False))
        there = {id(parameter) for name, parameter in named.items() if name not in loaded.missing_keys}
        lacking = [name for name in loaded.missing_keys if name in named and id(named[name]) not in there]
        for name in (*lacking, *loaded.unexpected_keys):
            words = "lack" if name in lacking else "have, beyond the model,"
            raise _refused(self.checkpoint, f"its weights {words} {name}")

    def check_schedule(self, at: int, exact: bool) -> None:
        """Refuse a learning rate that is that of another step; unless `exact`, where steps may be left out, a later."""
        if at > self.step or exact and at < self.step:
            raise _refused(self.checkpoint, f"the learning rate is that of step {at}")

    def check_optimizer(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Refuse states of other shapes than their parameters': fused kernels read and write beyond their ends."""
        for parameter, state in states.items():
            for name, value in state.items():
                shape = value.shape if isinstance(value, Tensor) else ()
                if name in SHAPED and shape != parameter.shape or name == "step" and math.prod(shape) != 1:
                    raise _refused(self.checkpoint, f"its optimizer has {name} of shape {list(shape)}")

    def explain(self, error: Exception) -> ValueError:
        """Return what is said where loading, or the first step after it, failed."""
        if isinstance(error, ValueError) and str(error).startswith(self.checkpoint.name):
            return error
        words = " ".join(str(error).split())
        return _refused(self.checkpoint, f"{type(error).__name__}: {words[:LONGEST]}")


def _check_batch(checkpoint: Path, sequences: int, args: TrainingArguments) -> None:
    """Refuse a batch of another size, which would read other rows; say which accumulation keeps it."""
    if step_sequences(args) == sequences:
        return
    size = args.train_batch_size * args.world_size
    what = f"train.gradient_accumulation_steps={sequences // size} keeps that"
    if sequences % size:
        what = (
            f"no train.gradient_accumulation_steps keeps that with {args.world_size} processes of "
            f"{args.train_batch_size}; use another number of processes, or train.per_device_train_batch_size"
        )
    raise ValueError(
        f"{checkpoint.name} was trained on {sequences} sequences a step, and this run reads {step_sequences(args)}: "
        f"{what}"
    )


def _refused(checkpoint: Path, fault: str) -> ValueError:
    return ValueError(
        f"{checkpoint.name} cannot be resumed: {fault}; where it is broken, remove it to go on from the one before"
    )
