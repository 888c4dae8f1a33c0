"""The schema of every result, and folders that are written whole or not at all."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Measure(BaseModel):
    """A measure by layer: mean over n sequences and 95 % Student-t interval, a pair [low, high] for each entry."""

    model_config = ConfigDict(extra="forbid")
    mean: list[Any]
    ci95: list[Any] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)


class DiagnosisRecord(BaseModel):
    """What `record.json` of a diagnosis holds; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: str = Field(alias="schema", pattern="^crosslayer/diagnosis/1$")
    model: dict[str, Any]
    settings: dict[str, Any]
    measures: dict[str, Measure]
    importance_by_position: dict[str, Any]
    top_tokens: list[list[dict[str, Any]]]
    position_table: dict[str, Any] | None
    verdict: dict[str, Any]
    seconds: float
    environment: dict[str, Any]


def dumps(record: dict[str, Any]) -> str:
    """Write a record as JSON; a NaN or an infinity is an error, never a value."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)


@contextlib.contextmanager
def whole_folder(target: Path, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when the block ends, and disappears if it fails or is interrupted.

    Raises:
        ValueError: `target` exists and `force` is not set, or it cannot be written.

    """
    target = target.expanduser()
    check_target(target, force)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            target.rename(old / "old")
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(target: Path, force: bool) -> None:
    """Refuse an output folder early, before any computation."""
    target = target.expanduser()
    if target.exists() and not target.is_dir():
        raise ValueError(f"--out {str(target)!r} is a file; name a folder")
    if target.exists() and not force:
        raise ValueError(f"--out {str(target)!r} exists; give another name, or --force to replace it")
    if target.exists() and any(target.iterdir()) and not (target / "record.json").is_file():
        raise ValueError(f"--out {str(target)!r} was not written by crosslayer, so --force does not replace it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".crosslayer-", dir=target.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out {str(target)!r} cannot be written: {error.strerror or error}") from None
