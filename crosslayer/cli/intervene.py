"""The command-line options of `intervene` that name interventions, one option for each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE_LIMIT = 16_000_000  # bytes of a file of interventions; a record has about 300 kB

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
    file: str | None = None,
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
        file: a JSON or YAML file with more interventions, applied last.
        layers: layers in which waiver, forbid and scale-values act, such as 0-11; default all.
    """
    from crosslayer.core.options import parse_layers
    from crosslayer.verbs.intervene.kinds import load_intervention
    from crosslayer.verbs.intervene.run import DEEPEST

    chosen = None if layers is None else [layer for group in parse_layers(layers, DEEPEST) for layer in group]
    typed = waiver, forbid, scale_values, position_swap, token_swap, ablate
    entries = [_entry(kind, text, chosen) for kind, texts in zip(FORMS, typed, strict=True) for text in texts]
    if chosen is not None and not any("positions" in entry for entry in entries):
        raise ValueError("--layers needs --waiver, --forbid or --scale-values")
    entries += [] if file is None else _read(Path(file))
    if not entries:
        raise ValueError("an intervention is missing; give at least one, such as --waiver 255")
    return [load_intervention(entry) for entry in entries]


def _entry(kind: str, text: str, layers: Sequence[int] | None) -> dict[str, Any]:
    """Parse an intervention in the form of `FORMS`, such as "255,300" or "0:0.5", into plain data."""
    values, names = text.split(":"), FORMS[kind]
    optional = 1 if kind in ("ablate", "position_swap") else 0  # its value, its norm
    if not len(names) - optional <= len(values) <= len(names):
        raise ValueError(
            f"--{kind.replace('_', '-')} must be {':'.join(names).upper()}, with commas between positions, got {text!r}"
        )
    entry: dict[str, Any] = {"kind": kind, **dict(zip(names, values, strict=False))}
    if "positions" in entry:
        entry["positions"] = entry["positions"].split(",")
        if layers is not None:
            entry["layers"] = list(layers)
    return entry


def _read(path: Path) -> list[dict[str, Any]]:
    """Read a list of interventions as plain data from JSON or YAML, for example from a record of `intervene`.

    Raises:
        ValueError: the file is missing, larger than `FILE_LIMIT` bytes, or does not hold such a list.
    """
    import yaml

    if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
        raise ValueError(f"--file must be a .json, .yaml or .yml file that exists, got {path.name!r}")
    if path.stat().st_size > FILE_LIMIT:
        raise ValueError(f"--file must have at most {FILE_LIMIT:,} bytes, got {path.stat().st_size:,} in {path.name!r}")
    try:
        read = json.loads if path.suffix == ".json" else yaml.safe_load
        entries = read(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--file {path.name!r}, line {error.lineno}: {error.msg}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"--file {path.name!r}{line}: {error.problem}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--file {path.name!r}: {str(error).splitlines()[0]}") from None
    entries = entries.get("interventions") if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f'--file {path.name!r} has no list of interventions like {{"kind": "waiver", "positions": [0]}}'
        )
    return entries
