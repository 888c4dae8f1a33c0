"""A config.json without transformers' config classes, whose import takes seconds.

`config_defaults.json` has what is known of each model type, written and compared by `make defaults`. A
config is read here only if each of its fields is known for its type; all others are left to transformers.
"""

import functools
import json
from pathlib import Path
from typing import Any

from crosslayer.wiring.fields import KNOWN

DEFAULTS = Path(__file__).with_name("config_defaults.json")


class PlainConfig:
    """Fields of a config by name; what is not set, and has no default, is missing."""

    def __init__(
        self,
        values: dict[str, Any],
        text: "PlainConfig | None" = None,
        layers: "list[PlainConfig] | None" = None,
    ):
        self.architectures: list[str] | None = None
        self.is_encoder_decoder = False
        self.dtype: str | None = None
        self.model_type = ""
        self.num_hidden_layers: int | None = None
        vars(self).update(values)
        self._text, self._layers = text, layers

    def get_text_config(self, decoder: bool = False) -> "PlainConfig":
        """Return the config of the language model, as transformers' configs do."""
        return self._text or self

    @property
    def per_layer_config(self) -> list["PlainConfig"]:
        """The config of each layer: this one, unless they differ."""
        return self._layers or [self] * (self.num_hidden_layers or 0)


class GgufConfig(PlainConfig):
    """The config in the metadata of a GGUF file."""


@functools.cache
def table() -> dict[str, Any]:
    """Return the table: `types`, see `defaults`, and `inert`, see there."""
    return json.loads(DEFAULTS.read_text(encoding="utf-8"))


def defaults() -> dict[str, dict[str, Any]]:
    """Return what is known of each model type.

    - `values`: defaults of fields that the wiring is read from;
    - `names`: other names of these fields → their names here;
    - `needed`: fields that a class derives, so that config.json must have them;
    - `types`: the types of the first layers, which repeat, where config.json has none;
    - `fixed`: fields that change the wiring in other ways → the value for which they do not;
    - `known`: further fields of the type, which do not change the wiring;
    - `text`: the field with the config of the language model, and that config's type;
    - `any_text`: whether that config can be of another type;
    - `masked`: whether it is a masked language model, which keeps no cache.
    """
    return table()["types"]


@functools.cache
def inert() -> frozenset[str]:
    """Return the fields that change the wiring of no model type."""
    return frozenset(table()["inert"])


def plain_config(values: dict[str, Any]) -> PlainConfig | None:
    """Return a config.json's fields with the defaults of its model type; None if only transformers can tell them."""
    entry = defaults().get(str(values.get("model_type")))
    if entry is None or not _is_known(values, entry):
        return None
    if "text" in entry:
        field, model_type = entry["text"]
        part = values.get(field) or {}
        if not isinstance(part, dict) or part.get("model_type", model_type) != model_type and not entry.get("any_text"):
            return None
        text = plain_config({"model_type": model_type, **part})
        if text is None:
            return None
        text.dtype = text.dtype or values.get("dtype") or values.get("torch_dtype")
        return PlainConfig({**entry["values"], **_own(values)}, text)
    return _flat(values, entry)


def _is_known(values: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Return whether the model type has each field of a config.json, and none has a value that its class acts on."""
    fixed, names = entry.get("fixed", {}), entry.get("names", {})
    parts = ("values", "names", "needed", "fixed", "known")
    known = {"model_type", *names.values(), *(name for part in parts for name in entry.get(part, ()))}
    if "types" in entry:
        known |= {"layer_types"}
    if not values.keys() - inert() <= known:
        return False
    if any(name in values and values[name] != values[other] for other, name in names.items() if other in values):
        return False
    return all(values.get(name, value) == value for name, value in fixed.items())


def _own(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a config of several models has itself."""
    names = ("model_type", "architectures", "dtype", "is_encoder_decoder")
    own = {name: values[name] for name in names if values.get(name) is not None}
    return {"dtype": values.get("torch_dtype"), **own}


def _flat(values: dict[str, Any], entry: dict[str, Any]) -> PlainConfig | None:
    names = entry.get("names", {})
    own = {names.get(name, name): value for name, value in values.items()}  # null is a value: no window
    own["dtype"] = own.get("dtype") or own.get("torch_dtype")
    merged = {**entry["values"], **own}
    if any(merged.get(name) is None for name in entry.get("needed", ())):
        return None
    layers = merged.get("num_hidden_layers")
    if "types" in entry and own.get("layer_types") is None:
        if not isinstance(layers, int):
            return None
        unit = entry["types"]
        merged["layer_types"] = (unit * (layers // len(unit) + 1))[:layers]
    types = merged.get("layer_types")
    for named in (types, merged.get("layers_block_type")):
        if named is None:
            continue
        if not isinstance(named, list) or len(named) != layers or not all(one in KNOWN for one in named):
            return None  # the class knows older names, and fewer or more layers
    merged["masked"] = entry.get("masked", False)
    if "global_head_dim" in merged and types is not None and types[-1] != "full_attention":
        return None  # the class changes the last layer
    if merged.get("use_sliding_window") is False:
        merged["sliding_window"] = None
    return PlainConfig(merged, layers=_global_layers(merged))


def _global_layers(values: dict[str, Any]) -> list[PlainConfig] | None:
    """Return the config of each layer where those without a window have heads of their own size (Gemma 4)."""
    if "global_head_dim" not in values or values.get("layer_types") is None:
        return None
    heads = values.get("num_global_key_value_heads") if values.get("attention_k_eq_v", True) else None
    own = {"head_dim": values["global_head_dim"], "num_key_value_heads": heads or values.get("num_key_value_heads")}
    full = PlainConfig({**values, **own})
    limited = PlainConfig(values)
    return [full if layer_type == "full_attention" else limited for layer_type in values["layer_types"]]
