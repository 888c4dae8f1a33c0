"""What an effect is asked for, checked as a whole before a model is loaded."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from crosslayer.core.plan import parse_layers
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.intervene.kinds import Intervention, Kind, load_intervention, positions_of

DEEPEST = 10_000  # layers that no model has: what a layer's number may be before the model is known


class Request(Options):
    """The options of `crosslayer.intervene`; see there.

    Raises:
        ValueError: an option is wrong; there is no intervention; a position is behind the last token; there are more
            probes than sequences.

    """

    interventions: tuple[Kind, ...]
    scan: str | tuple[tuple[int, ...], ...] = "auto"
    controls: int = Field(2, ge=0)
    probes: int | None = Field(None, ge=1)
    sequences: int = Field(8, ge=1)
    length: int = Field(512, ge=2)
    seed: Seed = 0
    bos: str = "auto"

    @field_validator("interventions", mode="before")
    @classmethod
    def _load_entries(cls, interventions: Any) -> Any:
        """Build interventions from plain data, as a record holds it."""
        if isinstance(interventions, Intervention | Mapping):
            raise ValueError("interventions is a single intervention; give a list, such as [waiver(255)]")
        if not isinstance(interventions, Iterable):
            raise ValueError(f"interventions is {interventions!r}; give a list, such as [waiver(255)]")
        return tuple(load_intervention(each) if isinstance(each, Mapping) else each for each in interventions)

    @field_validator("scan", mode="before")
    @classmethod
    def _read_groups(cls, scan: Any) -> Any:
        """Take groups of any kind, ranges for example; refuse text that is no list of ranges."""
        if isinstance(scan, str):
            scan_groups(scan, DEEPEST)
            return scan
        if not isinstance(scan, Iterable):
            raise ValueError(f"scan is {scan!r}; give auto, none, ranges such as '0-2,3-29', or groups of layers")
        groups = tuple(scan)
        for group in groups:
            if isinstance(group, str) or not isinstance(group, Iterable):
                raise ValueError(f"scan holds {group!r}; give groups of layers, such as [[0, 1, 2], [3, 4]]")
        return tuple(tuple(group) for group in groups)

    @model_validator(mode="after")
    def _check_positions(self) -> "Request":
        """Refuse what does not fit into the sequences."""
        if not self.positions:
            raise ValueError("there is nothing to do; give an intervention, such as waiver(255)")
        last = max(self.positions)
        if last >= self.length:
            raise ValueError(f"position {last} is outside of the sequences of {self.length} tokens")
        if self.probes is not None and self.probes > self.sequences:
            raise ValueError(
                f"`probes` {self.probes} are more than the {self.sequences} sequences; use at most that many"
            )
        return self

    @property
    def positions(self) -> tuple[int, ...]:
        """All positions intervened on, in the order in which they are named."""
        return tuple(position for intervention in self.interventions for position in positions_of(intervention))

    @property
    def probe_count(self) -> int:
        """How many sequences scan and controls run on: two by default, if there are so many."""
        return min(2, self.sequences) if self.probes is None else self.probes


def scan_groups(text: str, layers: int) -> list[list[int]] | None:
    """Read the groups of a scan: "auto" (None), "none" (empty), or ranges such as "0-11,12-29", which may overlap.

    Raises:
        ValueError: the text is none of these, or a layer does not exist.

    """
    if text == "auto":
        return None
    return [] if text == "none" else [parse_layers(part, layers)[0] for part in text.split(",")]
