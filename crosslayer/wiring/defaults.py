"""Write `config_defaults.json`: what `plain_config` knows of transformers' config classes.

    python -m crosslayer.wiring.defaults    # transformers of the newest supported version

An entry stands only if the plain way and the class give the same wiring, or the same refusal: for the class's own
defaults, for a config.json that names the model type alone, and with each of its fields changed, one at a time.
"""

import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from crosslayer.wiring import plain_config
from crosslayer.wiring.read import read_wiring
from crosslayer.wiring.transformers_config import is_encoder_type

# fields that some class takes without declaring them, and that decide on the types of layers
UNDECLARED = ("sliding_window_pattern", "full_attention_interval", "attn_layer_period", "attn_layer_offset")
LONGEST_PERIOD = 8
DEPTHS = (1, 2, 3, 5, 8, 13, 48)  # numbers of layers for which a period is checked
# defaults that a class has without declaring the field
BESIDE: dict[str, dict[str, Any]] = dict.fromkeys(("gemma4_text", "gemma4_unified_text"), {"global_head_dim": 512})
READ_FIRST = ("use_sliding_window", "attention_k_eq_v")  # by the plain way itself
OURS = ("crosslayer",)
# fields that classes derive and that the plain way does without, or deduces itself
DEDUCED = ("num_key_value_heads", "head_dim", "dtype", "layers_block_type", "kv_sharing_modes", "model_type")


class Recorder:
    """A config that notes which of its fields are read."""

    def __init__(self, config: PreTrainedConfig, names: Counter[str]):
        self.config, self.names = config, names

    def __getattr__(self, name: str) -> Any:
        if name == "get_text_config":
            return lambda decoder: Recorder(self.config.get_text_config(decoder=decoder), self.names)
        if name == "per_layer_config":
            return [Recorder(layer, self.names) for layer in self.config.per_layer_config]
        self.names[name] += 1
        return getattr(self.config, name)


def wiring_of(config: Any) -> Any:
    """Return what is read of a config, or the reason why it is refused."""
    try:
        return read_wiring(config)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def by_class(values: dict[str, Any]) -> Any:
    """Return the wiring that transformers' class gives a config.json, None if it refuses the fields."""
    try:
        return wiring_of(CONFIG_MAPPING[values["model_type"]].from_dict(values))
    except Exception:  # each class has errors of its own
        return None


def plainly(values: dict[str, Any]) -> Any:
    """Return the wiring that the plain way gives a config.json, None if it leaves that to transformers."""
    config = plain_config.plain_config(values)
    return None if config is None else wiring_of(config)


def agrees(values: dict[str, Any]) -> bool:
    """Return whether the plain way says what the class says, or nothing."""
    expected, plain = by_class(values), plainly(values)
    return (
        plain is None or expected is None or plain == expected or isinstance(plain, str) and isinstance(expected, str)
    )


def changes(model_type: str) -> Iterator[tuple[str, Any]]:
    """Yield other values of the fields of a model type."""
    for declared in dataclasses.fields(CONFIG_MAPPING[model_type]):
        value = declared.default
        if isinstance(value, bool):
            yield declared.name, not value
        elif isinstance(value, int):
            yield declared.name, 2 * value + 1 if value < 8 else value // 2
            yield declared.name, None
        elif value is None:
            yield from ((declared.name, other) for other in (4, True, "auto"))
    yield from ((name, period) for name in UNDECLARED for period in range(2, LONGEST_PERIOD))


def period_of(model_type: str) -> list[str] | None:
    """Return the types of the first layers if they repeat through all numbers of layers, otherwise None."""
    kind: Any = CONFIG_MAPPING[model_type]
    deepest = kind(num_hidden_layers=max(DEPTHS)).layer_types
    for period in range(1, LONGEST_PERIOD + 1):
        unit = list(deepest[:period])
        shapes = ((depth, kind(num_hidden_layers=depth).layer_types) for depth in DEPTHS)
        if all(list(types) == (unit * depth)[:depth] for depth, types in shapes):
            return unit
    return None


def entry_of(model_type: str, names: Counter[str]) -> dict[str, Any] | None:
    """Return the entry of a model type, None if the plain way is not right for it."""
    kind = CONFIG_MAPPING[model_type]
    config = kind()
    declared = {one.name: one.default for one in dataclasses.fields(kind)}
    renamed = {stored: name for name, stored in kind.attribute_map.items()}
    values = {renamed.get(name, name): value for name, value in declared.items()}
    values |= {name: getattr(kind, name) for name in names if isinstance(vars(kind).get(name), int)}
    kept = {name: value for name, value in values.items() if name in names and isinstance(value, int | float | str)}
    kept = {name: value for name, value in kept.items() if (name, value) != ("is_encoder_decoder", False)}
    entry: dict[str, Any] = {"values": kept}
    used = {stored: name for stored, name in renamed.items() if name in names}
    if used:
        entry["names"] = used
    if is_encoder_type(model_type):
        entry["masked"] = True
    entry["values"] |= BESIDE.get(model_type, {})
    text = config.get_text_config(decoder=True)
    if text is not config:
        fields = [
            name for name in ("text_config", "thinker_config", "llm_config") if getattr(config, name, None) is text
        ]
        if not fields:
            return None
        return {**entry, "text": [fields[0], text.model_type]}
    derived = [name for name in names if values.get(name) is None and _set(config, name)]
    if "layer_types" in derived:
        try:
            unit = period_of(model_type)
        except Exception:  # a class that wants other fields to fit
            unit = None
        if unit is not None:
            entry["types"] = unit
            derived.remove("layer_types")
    needed = [name for name in derived if name not in DEDUCED]
    if needed:
        entry["needed"] = sorted(needed)
    return entry


def _set(config: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # of configs whose layers differ
        return True


def table() -> dict[str, dict[str, Any]]:
    """Return all entries that hold."""
    names: Counter[str] = Counter(READ_FIRST)
    readable = []
    for model_type in sorted(set(CONFIG_MAPPING) - set(OURS)):
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # a class without defaults
            continue
        if isinstance(wiring_of(Recorder(config, names)), dict):
            readable.append(model_type)
    known = plain_config.defaults()
    known.clear()
    for model_type in readable:
        entry = entry_of(model_type, names)
        if entry is not None:
            known[model_type] = entry
    for model_type in list(known):
        if "text" not in known[model_type]:
            _fix(model_type)
        if not all(map(agrees, _samples(model_type))):
            del known[model_type]
    for model_type in [name for name, entry in known.items() if "text" in entry and entry["text"][1] not in known]:
        del known[model_type]
    return known


def _samples(model_type: str) -> Iterator[dict[str, Any]]:
    yield {"model_type": model_type}
    yield _smallest(model_type)
    yield CONFIG_MAPPING[model_type]().to_dict()


def _smallest(model_type: str) -> dict[str, Any]:
    """Return a config.json with no more fields than the plain way needs."""
    values, config = {"model_type": model_type}, CONFIG_MAPPING[model_type]().to_dict()
    return values | {name: config.get(name) for name in plain_config.defaults()[model_type].get("needed", ())}


def _fix(model_type: str) -> None:
    """Note the fields that change the wiring in ways that the plain way does not know."""
    entry = plain_config.defaults()[model_type]
    neutral = {one.name: one.default for one in dataclasses.fields(CONFIG_MAPPING[model_type])}
    fixed: dict[str, Any] = {}
    agreeing: dict[str, Any] = {}
    smallest = _smallest(model_type)
    for name, value in changes(model_type):
        if name in smallest:
            continue
        if agrees({**smallest, name: value}):
            agreeing[name] = value
        else:
            fixed[name] = neutral.get(name)
    fixed |= {name: agreeing.get(name) for name in UNDECLARED if name in fixed and name not in neutral}
    if fixed:
        entry["fixed"] = fixed


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines = [f'"{name}": {json.dumps(entry, sort_keys=True)}' for name, entry in sorted(table().items())]
    plain_config.DEFAULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(lines)} model types in {plain_config.DEFAULTS.name}")


if __name__ == "__main__":
    main()
