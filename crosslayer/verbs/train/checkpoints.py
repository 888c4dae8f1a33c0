"""Checkpoints that are whole or not there: staged, marked complete, renamed.

A run's folder holds `checkpoint-N` after step N, which transformers' Trainer writes, and `complete.json` in it: size
and SHA-256 of every file. While a checkpoint is written it lies in `.partial`. What stands under its final name can
still be damaged later; `last_good` reads everything and then goes back to the one before. A checkpoint may also come
from anyone: `Resumed` checks that it is of the run's step and batch, and readable throughout.
"""

import contextlib
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer_pt_utils import safe_globals

from crosslayer.output.manifest import file_digest
from crosslayer.verbs.train.arguments import step_sequences
from crosslayer.verbs.train.record import curve_of, training_seconds

MARK = "complete.json"
PARTIAL = ".partial"  # of a run's folder: what is being written
NAME = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
LARGEST = 2**24  # bytes of a mark; a thousand ranks need less
STATE, KEPT = "trainer_state.json", "crosslayer"
LOG = TypeAdapter(list[dict[str, float | None]])
SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")
LONGEST = 160  # characters of what another library says


class File(BaseModel):
    """A file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True)
    bytes: int = Field(ge=0)
    sha256: str


class Mark(BaseModel):
    """What `complete.json` holds; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    schema_: Literal["crosslayer/checkpoint/1"] = Field(alias="schema")
    files: dict[str, File] = Field(min_length=1)


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a run's folder by their step, the earliest first; nothing says that they are good."""
    matches = {path: NAME.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    steps = {int(match[1]): path for path, match in matches.items() if match is not None and path.is_dir()}
    return dict(sorted(steps.items()))


def last_good(folder: str | Path) -> Path | None:
    """Return the newest checkpoint in a run's folder that is complete and undamaged, None where there is none.

    Each newer one that is not good is passed over with a warning.
    """
    for path in reversed(checkpoints(Path(folder)).values()):
        fault = damage(path)
        if fault is None:
            return path
        warnings.warn(f"{path.name} is passed over: {fault}", stacklevel=2)
    return None


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint: the first file that is missing, cut off or changed; None if it is good.

    Only what lies in the folder is read: names in the mark are looked up among the files that are there.
    """
    path = checkpoint / MARK
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return f"it has no {MARK}, so it was not written to its end"
        mark = Mark.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return f"{MARK} cannot be read"
    present = _files(checkpoint)
    for name, file in mark.files.items():
        if name not in present:
            return f"{name} is missing"
        size = present[name].stat().st_size
        if size != file.bytes:
            return f"{name} has {size:,} bytes instead of {file.bytes:,}"
    changed = (name for name, file in mark.files.items() if file_digest(present[name]) != file.sha256)
    return next((f"{name} is changed" for name in changed), None)


def stage(folder: Path) -> Path:
    """Return the empty folder in which a run's next checkpoint is written; what a killed process left there goes."""
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(folder: Path, step: int, keep: int | None) -> None:
    """Mark the staged checkpoint of a step complete, give it its name, and remove the oldest beyond `keep`.

    A checkpoint of the same step goes, and so do those of later steps: the run has gone back to an earlier one, and
    what it had written since is not its own past any more. With None for `keep` all stay.
    """
    staged, target = folder / PARTIAL / f"checkpoint-{step}", folder / f"checkpoint-{step}"
    files = _files(staged)
    for path in files.values():
        sync(path)
    listed = {name: File(bytes=path.stat().st_size, sha256=file_digest(path)) for name, path in files.items()}
    text = Mark(schema="crosslayer/checkpoint/1", files=listed).model_dump_json(by_alias=True, indent=1)
    (staged / MARK).write_text(text, encoding="utf-8")
    sync(staged / MARK)
    if target.exists():
        target.rename(folder / PARTIAL / "replaced")
    staged.rename(target)
    sync(folder)
    past = [path for number, path in checkpoints(folder).items() if number <= step]
    later = [path for number, path in checkpoints(folder).items() if number > step]
    for path in (folder / PARTIAL, *later, *past[: -keep if keep else 0]):
        shutil.rmtree(path, ignore_errors=True)


def _files(checkpoint: Path) -> dict[str, Path]:
    """Return the regular files of a checkpoint by name, but its mark; links are none."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {name: path for path in paths if (name := path.relative_to(checkpoint).as_posix()) != MARK}


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, written to the disk; where folders cannot be opened, do without."""
    with contextlib.suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Kept(BaseModel):
    """What `trainer_state.json` keeps under `KEPT` beside Trainer's own."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sequences: int = Field(ge=1, description="of a step, over all processes")
    loss: float = Field(description="sum of the losses since the newest that was logged")
    logged: int = Field(ge=0, description="the step of that one")
    order: Literal["drawn"] = Field(description="of rows; earlier releases computed another")


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run goes on, after `step`."""

    checkpoint: Path
    step: int
    kept: Kept

    @classmethod
    def read(cls, checkpoint: Path, args: TrainingArguments) -> Self:
        """Check a checkpoint before anything of it is loaded."""
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
