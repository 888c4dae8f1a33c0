"""Intervene on a model that is left as it is, and put everything back; read and write interventions.

    with intervene(model, waiver(255), PositionSwap(0, 100)): …

The kinds are in `interventions.py`, and imported here.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedModel

from crosslayer.environment import check_flex
from crosslayer.intervention.kinds import (
    Ablate,
    Forbid,
    PositionSwap,
    Running,
    ScaleValues,
    TokenSwap,
    Waiver,
)
from crosslayer.plan import parse_layers
from crosslayer.probe.intercept import layer_stack

__all__ = ["Ablate", "Forbid", "PositionSwap", "ScaleValues", "TokenSwap", "Waiver", "intervene", "waiver"]
FILE_LIMIT = 16_000_000  # bytes of a file of interventions; a record has some 100 kB
KINDS = Waiver | Forbid | ScaleValues | PositionSwap | TokenSwap | Ablate


def load_intervention(entry: Mapping[str, Any]) -> KINDS:
    """Build an intervention from plain data such as {"kind": "waiver", "positions": [255]}; `to_entry` undoes it.

    Raises:
        ValueError: the kind, an option or a value is not known.

    """
    kinds = {cls.__dataclass_fields__["kind"].default: cls for cls in KINDS.__args__}
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"intervention {kind!r} is not known; use one of {', '.join(kinds)}")
    try:
        return TypeAdapter(kinds[kind]).validate_python({str(name): value for name, value in entry.items()})
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{kind}: {'.'.join(map(str, first['loc']))}: {reason}") from None


WORDS = {
    "waiver": ("positions",),
    "forbid": ("positions",),
    "scale_values": ("positions", "factor"),
    "position_swap": ("position", "source"),
    "token_swap": ("position", "token"),
    "ablate": ("layer", "position", "value"),
}


def parse_intervention(kind: str, text: str, layers: Sequence[int] | None = None) -> KINDS:
    """Read an intervention from the command line: "255,300" or "0:0.5", what `WORDS` lists with colons between.

    Raises:
        ValueError: the text is not of that form, or a value is not known.

    """
    words, names = text.split(":"), WORDS[kind]
    optional = kind == "ablate"  # its value
    if not len(names) - optional <= len(words) <= len(names):
        raise ValueError(f"{kind} {text!r}: write {':'.join(names)}, with commas between positions")
    entry: dict[str, Any] = {"kind": kind, **dict(zip(names, words, strict=False))}
    if "positions" in entry:
        entry["positions"] = entry["positions"].split(",")
        entry |= {} if layers is None else {"layers": list(layers)}
    return load_intervention(entry)


def parse_interventions(
    texts: Mapping[str, Sequence[str] | None], file: Path | None, layers: str | None, depth: int
) -> list[KINDS]:
    """Read the interventions of a command line: texts by kind, then those of a file; `layers` as "0-11,20".

    Raises:
        ValueError: there is none, one is wrong, or `layers` is given and none acts by layer.

    """
    chosen = None if layers is None else [layer for group in parse_layers(layers, depth) for layer in group]
    interventions = [parse_intervention(kind, text, chosen) for kind, words in texts.items() for text in words or ()]
    if chosen is not None and not any(isinstance(each, Waiver | Forbid | ScaleValues) for each in interventions):
        raise ValueError("--layers does nothing without --waiver, --forbid or --scale-values; leave it out")
    interventions += [] if file is None else read_interventions(file)
    if not interventions:
        raise ValueError("there is nothing to do; give an intervention, such as --waiver 255")
    return interventions


def read_interventions(path: Path) -> list[KINDS]:
    """Read a list of interventions from JSON or YAML; a record of `crosslayer intervene` holds one too.

    Raises:
        ValueError: the file is missing, larger than `FILE_LIMIT` bytes, or holds no such list.

    """
    if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
        raise ValueError(f"interventions {path.name!r}: needed is a .json, .yaml or .yml file that exists")
    if path.stat().st_size > FILE_LIMIT:
        raise ValueError(f"interventions {path.name!r}: the file has over {FILE_LIMIT} bytes")
    try:
        read = json.loads if path.suffix == ".json" else yaml.safe_load
        entries = read(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"interventions {path.name!r}{_place(error)}") from None
    entries = entries.get("interventions") if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f'interventions {path.name!r}: write a list such as [{{"kind": "waiver", "positions": [255]}}]'
        )
    return [load_intervention(entry) for entry in entries]


def _place(error: Exception) -> str:
    """Return what is wrong with a file, and in which line if the error knows it."""
    if isinstance(error, json.JSONDecodeError):
        return f", line {error.lineno}: {error.msg}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f", line {error.problem_mark.line + 1}: {error.problem}"
    return f": {str(error).splitlines()[0]}"


def check_positions(interventions: Sequence[KINDS], length: int) -> None:
    """Refuse no interventions at all, or positions behind the last of `length` tokens."""
    positions = [position for each in interventions for position in positions_of(each)]
    if not positions:
        raise ValueError("there is nothing to do; give an intervention, such as waiver(255)")
    if max(positions) >= length:
        raise ValueError(f"position {max(positions)} is outside of the sequences of {length} tokens")


def positions_of(one: KINDS) -> tuple[int, ...]:
    """Return the positions that an intervention is about."""
    return one.positions if isinstance(one, Waiver | Forbid | ScaleValues) else (one.position,)


def to_entry(intervention: KINDS) -> dict[str, Any]:
    """Return plain data for JSON or YAML."""
    return dataclasses.asdict(intervention)


@contextmanager
def intervene(model: PreTrainedModel, *interventions: KINDS) -> Iterator[None]:
    """Run `model` with all `interventions`, the first outermost; it is bit-equal again on exit, whatever happened.

    Raises:
        ValueError: the model would ignore an edited mask (FlashAttention), a layer, position or table does not exist,
            or, on a clean exit, a position was outside of every sequence that was run.

    """
    kind = model.config.get_text_config()._attn_implementation or "eager"
    if "flash" in kind:
        raise ValueError(f"{kind} takes no edited mask; load the model with sdpa, eager or flex attention")
    check_flex(kind, model.device)
    running = Running()
    with ExitStack() as stack:
        layers = layer_stack(model)
        for module in model.modules():  # OPT's head skips the body and calls its decoder
            if isinstance(module, PreTrainedModel) and layers in module.modules():
                stack.callback(module.register_forward_pre_hook(running.begin, with_kwargs=True).remove)
        for one in interventions:
            one.enter(model, running, stack)
        yield
    idle = [(one, p) for one in interventions for p in positions_of(one) if (id(one), p) not in running.acted]
    if running.passes and idle:
        kind, position = idle[0][0].kind, idle[0][1]
        raise ValueError(f"{kind} did nothing: position {position} was outside of every sequence that was run")


def waiver(*positions: int, layers: Sequence[int] | None = None) -> Waiver:
    """Return the waiver of these positions, in all layers or in some."""
    chosen = {} if layers is None else {"layers": tuple(layers)}
    made = load_intervention({"kind": "waiver", "positions": positions, **chosen})
    assert isinstance(made, Waiver)
    return made
