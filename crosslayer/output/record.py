"""What records have in common."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from crosslayer import _start

LARGEST = 2**28  # bytes of a record; a diagnosis of 30 layers has 0.8 MB
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch takes no larger seed
DEEPEST = 32  # lists and objects inside of each other, far more than any record has


def _unique(numbers: Any, field: ValidationInfo) -> Any:
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise ValueError(f"{field.field_name} is {numbers!r}; give a list of whole numbers")
    unique = tuple(dict.fromkeys(numbers))
    if not unique:
        raise ValueError(f"{field.field_name} is empty; give at least one")
    return unique


SEVERAL = BeforeValidator(_unique)  # of an option that takes any list of numbers, in their order, each once


class Frozen(BaseModel):
    """A part of a record: it does not change, and holds no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Measure(Frozen):
    """A measure by layer: mean over n sequences and 95 % Student-t interval, a pair [low, high] for each entry."""

    mean: list[Any]
    ci95: list[Any] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)

    @field_validator("mean", "ci95")
    @classmethod
    def _check_numbers(cls, rows: list[Any] | None) -> list[Any] | None:
        if rows is not None and not _are_numbers(rows):
            raise ValueError("it holds something else than numbers and null")
        return rows

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a measure of another shape, or whose interval is of another."""
        found, interval = self.array.shape, self.interval
        if found != shape:
            raise ValueError(f"{name} has the shape {found}, and with this model it is {shape}")
        if interval is not None and interval.shape != (*shape, 2):
            raise ValueError(f"{name} has the shape {shape}, and its interval {interval.shape}")

    @property
    def array(self) -> np.ndarray:
        """The mean as float64, NaN where a layer has no such sublayer."""
        return np.array(self.mean, dtype=float)

    @property
    def interval(self) -> np.ndarray | None:
        """The ends of the 95 % interval, (…, 2) for a mean of shape (…), None for a single sequence."""
        return None if self.ci95 is None else np.array(self.ci95, dtype=float)


def _are_numbers(entry: Any) -> bool:
    """Return whether nested lists hold finite numbers and None alone."""
    if isinstance(entry, list | tuple):
        return all(map(_are_numbers, entry))
    return entry is None or type(entry) in (int, float) and math.isfinite(entry)


class PositionBins(Frozen):
    """A quantity of single positions, averaged over bins that widen with the position.

    `edges` holds the first position of each bin, `length` the tokens of a sequence, `mean` (L, bins) the mean of one
    position in the bin.
    """

    edges: list[int] = Field(min_length=1)
    length: int = Field(ge=1)
    mean: list[list[float | None]]

    @model_validator(mode="after")
    def _check_bins(self) -> Self:
        """Refuse rows that do not have an entry for each bin."""
        for row in self.mean:
            if len(row) != len(self.edges):
                raise ValueError(f"a row has {len(row)} entries, and there are {len(self.edges)} bins")
        return self


class ModelFacts(Frozen):
    """A model that was measured; a verb adds to it what else it tells of a model."""

    name: str = Field(description="the last part of its folder or of its name on the hub, or its class")
    class_: str = Field(alias="class")
    layers: int = Field(ge=1)
    parameters: int = Field(ge=0)
    dtype: str
    device: str


class Options(BaseModel):
    """What a verb is asked to do: checked as a whole when it is built."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **options: Any):
        try:
            super().__init__(**options)
        except ValidationError as error:
            first = error.errors()[0]
            own = first.get("ctx", {}).get("error")  # which names the option
            given = "" if first["type"] == "missing" else f"; it is {first['input']!r:.60}"
            raise ValueError(str(own) if own else fault_of(error) + given) from None


def fault_of(error: ValidationError) -> str:
    """Return the first fault of what may come from anyone: the place, if it has any, and what is wrong there."""
    first = error.errors()[0]
    place, words = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{place if place.isprintable() else repr(place)}: {words}" if place else words


def typed_command() -> Any:
    """Return the field of a record that holds the command as it was typed; None of a call from Python."""
    return Field(default_factory=lambda: _start.command_line, description="as typed; None from Python")


def dumps(record: dict[str, Any]) -> str:
    """Write a record as JSON; a NaN or an infinity is an error, never a value."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)


def read_record(folder: Path) -> dict[str, Any]:
    """Read `record.json` of a folder, which may come from anyone; its keys are not checked here."""
    path = folder / "record.json"
    if not path.is_file():
        raise ValueError(f"{folder.name!r} holds no record.json; name a folder that crosslayer wrote")
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST:,} bytes")
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, parse_int=_integer)
        if not isinstance(record, dict):
            raise ValueError("it holds something else than a JSON object")
        _check_depth(record)
    except RecursionError:
        raise ValueError("record.json: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"record.json: {error}") from None
    return record


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}, which is no JSON")


def _integer(digits: str) -> int:
    """Return a whole number; one that no array holds is refused."""
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"it holds {digits[:20]}…, a whole number of more than 64 bits")
    return int(digits)


def _check_depth(record: dict[str, Any]) -> None:
    """Refuse lists and objects inside of each other beyond `DEEPEST`."""
    level: list[Any] = [record]
    for _ in range(DEEPEST):
        inner = [child.values() if isinstance(child, dict) else child for child in level]
        level = [part for children in inner for part in children if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")
