"""Fields, checks and reading that all records share."""

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

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

# A record may come from anyone, so its size, its depth and its whole numbers have limits.
LARGEST = 2**28  # bytes of a record; a diagnosis of 30 layers has 0.8 MB
DEEPEST = 32  # nested lists and objects, far more than any record has
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch takes no larger seed
PYDANTIC = "Input should be "  # how most of pydantic's messages begin


def _unique(values: Any, field: ValidationInfo) -> Any:
    # a text is iterable too, and would become a list of its characters
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{field.field_name} must be a list, got {values!r}")
    unique = tuple(dict.fromkeys(values))
    if not unique:
        raise ValueError(f"{field.field_name} must have at least one value, got none")
    return unique


SEVERAL = BeforeValidator(_unique)  # for an option that is a list; duplicates are removed


class Frozen(BaseModel):
    """A component of a record: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Measure(Frozen):
    """A measure, usually by layer: mean over n sequences and 95% interval, a pair [low, high] for each entry."""

    mean: Any
    ci95: list[Any] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)
    over: Literal["sequences", "documents"] = Field(default="sequences", description="Student's t, or a bootstrap")

    @field_validator("mean", "ci95")
    @classmethod
    def _check_numbers(cls, numbers: Any) -> Any:
        if numbers is not None and not _are_numbers(numbers):
            raise ValueError("it must hold only numbers and null")
        return numbers

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a measure whose mean or interval has another shape."""
        if self.array().shape != shape:
            raise ValueError(f"{name} must have the shape {shape} for this model, got {self.array().shape}")
        interval = self.interval()
        if interval is not None and interval.shape != (*shape, 2):
            raise ValueError(f"{name}: its interval must have the shape {(*shape, 2)}, got {interval.shape}")

    def array(self) -> np.ndarray:
        """Return the mean as float64, NaN where a layer has no such sublayer."""
        return np.array(self.mean, dtype=float)

    def interval(self) -> np.ndarray | None:
        """Return the ends of the 95% interval, (…, 2) for a mean of shape (…), None for a single sequence."""
        return None if self.ci95 is None else np.array(self.ci95, dtype=float)


def _are_numbers(entry: Any) -> bool:
    """Return whether nested lists hold only finite numbers and None."""
    if isinstance(entry, list | tuple):
        return all(map(_are_numbers, entry))
    # `type` and not isinstance: True is an int too
    return entry is None or type(entry) in (int, float) and math.isfinite(entry)


class PositionBins(Frozen):
    """A quantity by position, averaged over bins that widen with the position.

    `edges` holds the first position of each bin, `length` the tokens of a sequence, `mean` (L, bins) the mean over
    the positions of each bin.
    """

    edges: list[int] = Field(min_length=1)
    length: int = Field(ge=1)
    mean: list[list[float | None]]

    @model_validator(mode="after")
    def _check_bins(self) -> Self:
        """Refuse rows that do not have an entry for each bin."""
        for row in self.mean:
            if len(row) != len(self.edges):
                raise ValueError(f"a row must have an entry for each of {len(self.edges)} bins, got {len(row)}")
        return self


class SameLengths(Frozen):
    """A component whose lists have the same length, except those that are left at their default."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = {}
        for name, entries in self:
            if isinstance(entries, list | tuple) and entries != type(self).model_fields[name].default:
                lengths[name] = len(entries)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the lists must have the same length, got {lengths}")
        return self


class ModelFacts(Frozen):
    """A model that was measured; a verb may add fields."""

    name: str = Field(description="the last part of its folder or of its name on the hub, or its class")
    class_: str = Field(alias="class")
    layers: int = Field(ge=1)
    parameters: int = Field(ge=0)
    dtype: str
    device: str


class Options(BaseModel):
    """The options of a verb, checked together: an error names every option that is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **options: Any):
        try:
            super().__init__(**options)
        except ValidationError as error:
            wrong: dict[Any, str] = {}
            for index, details in enumerate(error.errors()):
                # a ValueError of ours names the option already
                ours = details.get("ctx", {}).get("error")
                message = str(ours) if ours else validation_message(error, index)
                # pydantic has an error for each type that an option may have; only the first counts
                wrong.setdefault(details["loc"][:1], message)
            raise ValueError("; ".join(wrong.values())) from None

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Return the options as they were given, of whatever type: the class converts and checks them."""
        return cls(**options)


def validation_message(error: ValidationError, index: int = 0) -> str:
    """Return an error of untrusted data in one line: the path of its key, if any, and a valid type or range."""
    details = error.errors()[index]
    message = details["msg"].removeprefix("Value error, ")
    # keys are untrusted too: control characters could control the terminal
    path = ".".join(map(str, details["loc"]))
    path = path if path.isprintable() else repr(path)
    if message.startswith(PYDANTIC):
        rule = message.removeprefix(PYDANTIC).partition(", unable to parse")[0]
        # a list or an object may be of any size, and is not shown; reprlib shortens a long text
        value = details["input"]
        got = f", got {reprlib.repr(value)}" if isinstance(value, str | int | float | None) else ""
        return f"{path or 'it'} must be {rule}{got}"
    return f"{path}: {message}" if path else message


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns, which `pandas.DataFrame` takes; the names of what is nested are joined: kl_value, kl_low.

    A row without an entry has None.
    """

    def flat(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
        for name, value in row.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{name}_")
            elif value is not None or prefix:
                yield prefix + name, value

    entries = [dict(flat(row)) for row in rows]
    return {name: [row.get(name) for row in entries] for name in dict.fromkeys(name for row in entries for name in row)}


def dumps(record: dict[str, Any]) -> str:
    """Write a record as JSON; a NaN or an infinity is an error, never a value."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)


def read_record(folder: Path) -> dict[str, Any]:
    """Read the untrusted `record.json` of a folder; the caller checks its keys."""
    path = folder / "record.json"
    if not path.is_file():
        raise ValueError(f"{folder.name!r} holds no record.json; name a folder that crosslayer wrote")
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST:,} bytes")
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, parse_int=_integer)
        if not isinstance(record, dict):
            raise ValueError("it must hold a JSON object")

        # level by level, since a recursive check could itself be nested too deeply
        level: list[Any] = [record]
        for _ in range(DEEPEST):
            inner = [entry.values() if isinstance(entry, dict) else entry for entry in level]
            level = [child for children in inner for child in children if isinstance(child, dict | list)]
        if level:
            raise ValueError("it is nested too deeply")
    # the parser's own limit, which comes first where nesting is far deeper
    except RecursionError:
        raise ValueError("record.json: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"record.json: {error}") from None
    return record


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}, which is not valid JSON")


def _integer(digits: str) -> int:
    """Return a whole number; refuse one of more than 64 bits."""
    # the length first: of thousands of digits, `int` raises an error of its own
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"it holds {digits[:20]}…, a whole number of more than 64 bits")
    return int(digits)
