"""The command-line options of `intervene` that name interventions, one option for each."""

from collections.abc import Sequence
from typing import Any

FORMS = {  # the fields of each intervention, separated by colons; in the order of the options below
    "waiver": ("positions",),
    "forbid": ("positions",),
    "scale_values": ("positions", "factor"),
    "position_swap": ("position", "source", "norm"),
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
    layers: str | None = None,
) -> list[Any]:
    """Return the interventions of a command line; the report describes the first position given.

    Args:
        waiver: POSITIONS: let these tokens attend only to themselves, such as 255 or 255,300.
        forbid: POSITIONS: let no other token attend to these.
        scale_values: POSITIONS:FACTOR: multiply the values of these tokens by a factor.
        position_swap: POSITION:ROW[:NORM]: use another row of a learned position table, scaled to a norm.
        token_swap: POSITION:TOKEN: replace a token by an id, bos or random.
        ablate: LAYER:POSITION[:zero|mean]: replace the output of a layer by zero or the mean of other tokens.
        layers: layers in which waiver, forbid and scale-values act, such as 0-11; default: all.
    """
    # these import torch, which help and usage errors do not need
    from crosslayer.core.options import parse_layers
    from crosslayer.verbs.intervene.kinds import load_intervention
    from crosslayer.verbs.intervene.run import DEEPEST

    chosen = None if layers is None else [layer for group in parse_layers(layers, DEEPEST) for layer in group]
    typed = waiver, forbid, scale_values, position_swap, token_swap, ablate
    entries: list[dict[str, Any]] = []
    for (kind, names), texts in zip(FORMS.items(), typed, strict=True):
        optional = 1 if kind in ("ablate", "position_swap") else 0  # its value, its norm
        for text in texts:
            values = text.split(":")
            if not len(names) - optional <= len(values) <= len(names):
                form = ":".join(names).upper()
                option = kind.replace("_", "-")
                raise ValueError(f"--{option} must be {form}, with commas between positions, got {text!r}")
            entry: dict[str, Any] = {"kind": kind, **dict(zip(names, values, strict=False))}
            if "positions" in entry:
                entry["positions"] = entry["positions"].split(",")
                if chosen is not None:
                    entry["layers"] = list(chosen)
            entries.append(entry)

    if chosen is not None and not any("positions" in entry for entry in entries):
        raise ValueError("--layers needs --waiver, --forbid or --scale-values")
    if not entries:
        raise ValueError("an intervention is missing; give at least one, such as --waiver 255")
    return [load_intervention(entry) for entry in entries]
