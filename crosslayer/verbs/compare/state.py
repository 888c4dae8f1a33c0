"""What a folder of trained runs keeps beside them in `grid.json`: the budget, its steps, and the runs that diverged."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from crosslayer.output.record import Frozen
from crosslayer.verbs.compare.record import Budget

STATE = "grid.json"
LARGEST = 2**24  # bytes; a thousand runs have a tenth of it


class Stopped(Frozen):
    """A run that diverged: how, and by which recipe (its SHA-256), so that another one is trained."""

    what: str
    recipe: str


class State(Frozen):
    """What a folder of runs keeps beside them, so that they can be resumed and read."""

    schema_: Literal["crosslayer/grid/1"] = Field(
        "crosslayer/grid/1", validation_alias="schema", serialization_alias="schema"
    )
    budget: Budget | None = None
    steps: dict[str, int] = Field({}, description="of every arm in every setting, where the budget decides them")
    stopped: dict[str, Stopped] = Field({}, description="runs that diverged, by their names")
    judged: tuple[tuple[int, ...], ...] = Field((), description="seeds of each page that could give verdicts")

    def before(self, seeds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the seeds of each page that came before the page of these seeds, and to which they add."""
        before = self.judged[: self.judged.index(seeds)] if seeds in self.judged else self.judged
        return tuple(fewer for fewer in before if set(fewer) < set(seeds))


def read_state(folder: Path) -> State | None:
    """Return what a folder keeps beside its runs; None where it keeps nothing.

    Raises:
        ValueError: `grid.json` is no such file, or a damaged one.

    """
    path = folder / STATE
    if not path.is_file():
        return None
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{STATE} has more than {LARGEST:,} bytes, which no comparison writes")
    try:
        return State.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{STATE}: {place if place.isprintable() else repr(place)}: {first['msg']}") from None
