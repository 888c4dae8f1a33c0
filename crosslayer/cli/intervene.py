"""What only a shell does for `intervene`: interventions are typed, kind by kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMS = {  # what is written for each kind, with colons between; in the order of the options below
    "waiver": ("positions",),
    "forbid": ("positions",),
    "scale_values": ("positions", "factor"),
    "position_swap": ("position", "source"),
    "token_swap": ("position", "token"),
    "ablate": ("layer", "position", "value"),
}


def interventions(
    *,
    waiver: Sequence[str] = (),
    forbid: Sequence[str] = (),
    scale_values: Sequence[str] = (),
    position_swap: Sequence[str] = (),
    token_swap: Sequence[str] = (),
    ablate: Sequence[str] = (),
    file: str | None = None,
    layers: str | None = None,
) -> list[Any]:
    """Return the interventions of a command line; the report is about the first position that is named.

    Args:
        waiver: positions that attend only to themselves, as 255 or 255,300.
        forbid: positions that no other token may attend to.
        scale_values: POSITIONS:FACTOR: scale value states.
        position_swap: POSITION:ROW of a learned position table.
        token_swap: POSITION:TOKEN: an id, bos or random.
        ablate: LAYER:POSITION[:zero|mean]: hidden states.
        file: more interventions, as JSON or YAML; they come last.
        layers: where waiver, forbid and scale-values act, as 0-11.

    """
    from crosslayer.core.plan import parse_layers
    from crosslayer.verbs.intervene.entries import read_interventions
    from crosslayer.verbs.intervene.kinds import load_intervention
    from crosslayer.verbs.intervene.request import DEEPEST

    chosen = None if layers is None else [layer for group in parse_layers(layers, DEEPEST) for layer in group]
    typed = waiver, forbid, scale_values, position_swap, token_swap, ablate
    entries = [_entry(kind, text, chosen) for kind, texts in zip(FORMS, typed, strict=True) for text in texts]
    if chosen is not None and not any("positions" in entry for entry in entries):
        raise ValueError("--layers does nothing without --waiver, --forbid or --scale-values; leave it out")
    read = [] if file is None else read_interventions(Path(file))
    if not entries and not read:
        raise ValueError("there is nothing to do; give an intervention, such as --waiver 255")
    return [*map(load_intervention, entries), *read]


def _entry(kind: str, text: str, layers: Sequence[int] | None) -> dict[str, Any]:
    """Read an intervention in the form that `FORMS` lists, "255,300" or "0:0.5" for example, as plain data."""
    words, names = text.split(":"), FORMS[kind]
    optional = 1 if kind == "ablate" else 0  # its value
    if not len(names) - optional <= len(words) <= len(names):
        raise ValueError(f"{kind} {text!r}: write {':'.join(names)}, with commas between positions")
    entry: dict[str, Any] = {"kind": kind, **dict(zip(names, words, strict=False))}
    if "positions" in entry:
        entry["positions"] = entry["positions"].split(",")
        if layers is not None:
            entry["layers"] = list(layers)
    return entry
