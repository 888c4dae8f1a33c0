"""Checkpoints that are whole or not there: staged, marked complete, renamed.

A run's folder holds `checkpoint-N` after step N, which transformers' Trainer writes, and `complete.json` in it: size
and SHA-256 of every file. While a checkpoint is written it lies in `.partial`. What stands under its final name can
still be damaged later; `last_good` reads everything and then goes back to the one before.
"""

import contextlib
import hashlib
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MARK = "complete.json"
PARTIAL = ".partial"  # of a run's folder: what is being written
NAME = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
LARGEST = 2**24  # bytes of a mark; a thousand ranks need less


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
    return next(
        (f"{name} is changed" for name, file in mark.files.items() if _digest(present[name]) != file.sha256), None
    )


def stage(folder: Path) -> Path:
    """Return the empty folder in which a run's next checkpoint is written; what a killed process left there goes."""
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(folder: Path, step: int, keep: int | None) -> None:
    """Mark the staged checkpoint of a step complete, give it its name, and remove the oldest beyond `keep`.

    A checkpoint of the same step goes, and so do those of later steps: the run has gone back to an earlier one, and
    what it had written since is not its own past any more.

    Args:
        folder: the run's.
        step: whose checkpoint lies in the staging folder.
        keep: how many checkpoints stay; None: all.

    """
    staged, target = folder / PARTIAL / f"checkpoint-{step}", folder / f"checkpoint-{step}"
    files = _files(staged)
    for path in files.values():
        sync(path)
    listed = {name: File(bytes=path.stat().st_size, sha256=_digest(path)) for name, path in files.items()}
    text = Mark(schema="crosslayer/checkpoint/1", files=listed).model_dump_json(by_alias=True, indent=1)
    (staged / MARK).write_text(text, encoding="utf-8")
    sync(staged / MARK)
    if target.exists():
        target.rename(folder / PARTIAL / "replaced")
    staged.rename(target)
    sync(folder)
    there = checkpoints(folder)
    past = [path for number, path in there.items() if number <= step]
    later = [path for number, path in there.items() if number > step]
    for path in (folder / PARTIAL, *later, *past[: -keep if keep else 0]):
        shutil.rmtree(path, ignore_errors=True)


def _files(checkpoint: Path) -> dict[str, Path]:
    """Return the regular files of a checkpoint by name, but its mark; links are none."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {name: path for path in paths if (name := path.relative_to(checkpoint).as_posix()) != MARK}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, written to the disk; where folders cannot be opened, do without."""
    with contextlib.suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
