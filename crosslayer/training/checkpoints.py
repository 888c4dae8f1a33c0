"""Checkpoints that are complete or absent: staged, marked complete, renamed.

After step N a run's folder holds `checkpoint-N`, which transformers' Trainer writes, with `complete.json`: size and
SHA-256 of every file. A checkpoint is written in `.partial` first. It can still be damaged later: `last_good` reads all
files, and falls back to the one before. Checkpoints may also be untrusted: `Resumed` checks that one is of the run's
step and batch size, and readable throughout.
"""

import contextlib
import math
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from transformers import TrainerState, TrainingArguments
from transformers.trainer_pt_utils import safe_globals

from crosslayer.output.manifest import file_digest
from crosslayer.training.arguments import step_sequences
from crosslayer.training.record import curve_of, training_seconds

MARK = "complete.json"
PARTIAL = ".partial"  # in a run's folder: the checkpoint that is being written
NAME = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
# bytes of complete.json; a thousand ranks need less, and a forged one must not fill the memory
LARGEST = 2**24
STATE, ENTRY = "trainer_state.json", "crosslayer"
LOG = TypeAdapter(list[dict[str, float | None]])


class File(BaseModel):
    """Size and hash of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    bytes: int = Field(ge=0)
    sha256: str


class Mark(BaseModel):
    """What `complete.json` holds; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    schema_: Literal["crosslayer/checkpoint/1"] = Field(alias="schema")
    files: dict[str, File] = Field(min_length=1)


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a run's folder by step, the earliest first, undamaged or not."""
    matches = {path: NAME.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    steps = {int(match[1]): path for path, match in matches.items() if match is not None and path.is_dir()}
    return dict(sorted(steps.items()))


def last_good(folder: str | Path) -> Path | None:
    """Return the newest complete and undamaged checkpoint in a run's folder; None if there is none.

    Newer ones that are damaged are skipped with a warning.
    """
    for path in reversed(checkpoints(Path(folder)).values()):
        problem = damage(path)
        if problem is None:
            return path
        warnings.warn(f"skipping {path.name}: {problem}", stacklevel=2)
    return None


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint: the first file that is missing, truncated or changed; None if nothing is.

    Only files in the folder are read, whatever names the mark holds.
    """
    path = checkpoint / MARK
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return f"{MARK} is missing, so it was not completed"
        mark = Mark.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return f"{MARK} cannot be read"

    # sizes of all files before any hash: a file that was cut short is found without reading gigabytes
    present = _files(checkpoint)
    for name, file in mark.files.items():
        if name not in present:
            return f"{name} is missing"
        size = present[name].stat().st_size
        if size != file.bytes:
            return f"{name} must have {file.bytes:,} bytes, got {size:,}"
    changed = (name for name, file in mark.files.items() if file_digest(present[name]) != file.sha256)
    return next((f"{name} has changed" for name in changed), None)


def stage(folder: Path) -> Path:
    """Return the empty folder for a run's next checkpoint; remnants of a killed process in it are deleted."""
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(folder: Path, step: int, keep: int | None) -> None:
    """Mark the staged checkpoint of a step complete, give it its name, and delete the oldest beyond `keep`.

    Checkpoints of the same step and of later ones are deleted too: the run was resumed from an earlier one, and they
    are not part of its history any more. With `keep` None, none is deleted for age.
    """
    staged = folder / PARTIAL / f"checkpoint-{step}"
    target = folder / f"checkpoint-{step}"

    # to disk before the mark, and the mark before the rename: after a power cut a mark must not vouch for lost bytes
    files = _files(staged)
    for path in files.values():
        sync(path)
    listed = {name: File(bytes=path.stat().st_size, sha256=file_digest(path)) for name, path in files.items()}
    text = Mark(schema="crosslayer/checkpoint/1", files=listed).model_dump_json(by_alias=True, indent=1)
    (staged / MARK).write_text(text, encoding="utf-8")
    sync(staged / MARK)

    # a folder is not renamed onto another: one that is there steps aside, into what is deleted below
    if target.exists():
        target.rename(folder / PARTIAL / "replaced")
    staged.rename(target)
    sync(folder)

    # last, when the new one has its name
    past = [path for saved, path in checkpoints(folder).items() if saved <= step]
    later = [path for saved, path in checkpoints(folder).items() if saved > step]
    for path in (folder / PARTIAL, *later, *past[: -keep if keep else 0]):
        shutil.rmtree(path, ignore_errors=True)


def _files(checkpoint: Path) -> dict[str, Path]:
    """Return the regular files of a checkpoint by name, without its mark and links."""
    # a link of an untrusted checkpoint may lead out of its folder
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {name: path for path in paths if (name := path.relative_to(checkpoint).as_posix()) != MARK}


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk; skipped where a folder cannot be opened."""
    with contextlib.suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class RunEntry(BaseModel):
    """Our entry in `trainer_state.json`, under `ENTRY`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sequences: int = Field(ge=1, description="per step, over all processes")
    loss: float = Field(description="sum of the losses since the last logged step")
    logged: int = Field(ge=0, description="the last logged step")
    order: Literal["drawn"] = Field(description="of rows; earlier releases had another")


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run is resumed, after `step`."""

    checkpoint: Path
    step: int
    entry: RunEntry

    @classmethod
    def read(cls, checkpoint: Path, args: TrainingArguments) -> Self:
        """Check a checkpoint before it is loaded.

        Another batch size would read other rows; its message says which accumulation keeps it.
        """
        try:
            state = TrainerState.load_from_json(str(checkpoint / STATE))
            entry = RunEntry.model_validate((state.stateful_callbacks or {})[ENTRY])  # type: ignore[call-overload]
            LOG.validate_python(state.log_history)
            curve_of(state.log_history)
            if not (isinstance(state.global_step, int) and math.isfinite(training_seconds(state.log_history))):
                raise ValueError
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            raise refused(checkpoint, f"{STATE} is damaged, or from an older release") from None

        # before the steps: in a run by tokens their number depends on the batch, and it is the batch that is wrong
        sequences = entry.sequences
        if sequences != step_sequences(args):
            size = args.train_batch_size * args.world_size
            hint = f"set train.gradient_accumulation_steps={sequences // size}"
            if sequences % size:
                hint = (
                    f"change the number of processes or train.per_device_train_batch_size, since {args.world_size} x "
                    f"{args.train_batch_size} does not divide {sequences}"
                )
            raise ValueError(
                f"the batch must be {sequences} sequences per step as in {checkpoint.name}, got "
                f"{step_sequences(args)}; {hint}"
            )

        named = NAME.fullmatch(checkpoint.name)
        if state.global_step > args.max_steps or named is not None and int(named[1]) != state.global_step:
            raise refused(checkpoint, f"{STATE} is of step {state.global_step}")

        # here, since the error of loading one later would not name the file
        for path in sorted(checkpoint.glob("*.pt*")):
            try:
                # weights only: a pickle runs code
                with safe_globals():
                    torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # of many types
                raise refused(checkpoint, f"{path.name} is damaged") from error
        return cls(checkpoint, state.global_step, entry)


def refused(checkpoint: Path, problem: str) -> ValueError:
    """Return the error of a checkpoint that cannot be resumed from."""
    return ValueError(
        f"{checkpoint.name} cannot be resumed: {problem}; if it is damaged, delete it to resume from the previous one"
    )
