"""What records have in common."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Measure(BaseModel):
    """A measure by layer: mean over n sequences and 95 % Student-t interval, a pair [low, high] for each entry."""

    model_config = ConfigDict(extra="forbid")
    mean: list[Any]
    ci95: list[Any] | None = Field(description="None for a single sequence")
    n: int = Field(ge=1)


class Frozen(BaseModel):
    """A part of a record: it does not change, and holds no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Machine(Frozen):
    """The kind of machine that a result was made on, without its name."""

    system: str
    processor: str
    cores: int | None
    threads: int
    gpu: str | None


class Environment(Frozen):
    """What `crosslayer.environment.environment` returns: versions of packages, None where missing, and the machine."""

    versions: dict[str, str | None]
    machine: Machine


class Options(BaseModel):
    """What a verb is asked to do: checked as a whole when it is built.

    Raises:
        ValueError: an option is wrong; the message is one line.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **options: Any):
        try:
            super().__init__(**options)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            own = first["msg"].removeprefix("Value error, ") if first["type"] == "value_error" else None
            raise ValueError(own or f"{place}: {first['msg']}") from None


def dumps(record: dict[str, Any]) -> str:
    """Write a record as JSON; a NaN or an infinity is an error, never a value."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)
