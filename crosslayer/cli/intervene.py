"""What only a shell does for `intervene`: interventions are typed, kind by kind."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE_LIMIT = 16_000_000  # bytes of a file of interventions; a record has some 300 kB

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
    from crosslayer.verbs.intervene.kinds import load_intervention
    from crosslayer.verbs.intervene.trials import DEEPEST

    chosen = None if layers is None else [layer for group in parse_layers(layers, DEEPEST) for layer in group]
    typed = waiver, forbid, scale_values, position_swap, token_swap, ablate
    entries = [_entry(kind, text, chosen) for kind, texts in zip(FORMS, typed, strict=True) for text in texts]
    if chosen is not None and not any("positions" in entry for entry in entries):
        raise ValueError("--layers does nothing without --waiver, --forbid or --scale-values; leave it out")
    entries += [] if file is None else _read(Path(file))
    if not entries:
        raise ValueError("there is nothing to do; give an intervention, such as --waiver 255")
    return [load_intervention(entry) for entry in entries]


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


def _read(path: Path) -> list[dict[str, Any]]:
    """Read a list of interventions as plain data from JSON or YAML; a record of `intervene` holds such a list too.

    Raises:
        ValueError: the file is missing, larger than `FILE_LIMIT` bytes, or holds no such list.

    """
    import yaml

    if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
        raise ValueError(f"interventions {path.name!r}: needed is a .json, .yaml or .yml file that exists")
    if path.stat().st_size > FILE_LIMIT:
        raise ValueError(f"interventions {path.name!r}: the file has over {FILE_LIMIT} bytes")
    try:
        read = json.loads if path.suffix == ".json" else yaml.safe_load
        entries = read(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"interventions {path.name!r}, line {error.lineno}: {error.msg}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"interventions {path.name!r}{line}: {error.problem}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"interventions {path.name!r}: {str(error).splitlines()[0]}") from None
    entries = entries.get("interventions") if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f'interventions {path.name!r}: write a list such as [{{"kind": "waiver", "positions": [255]}}]'
        )
    return entries
