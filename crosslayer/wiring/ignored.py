"""Fields of a config.json that decide on the cache, and that transformers' class for its model type does not read."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from crosslayer.wiring.plain_config import defaults, inert
from crosslayer.wiring.transformers_config import in_model, mentioned
from crosslayer.wiring.values import field

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types")
READ = ("sliding_window", "attention_chunk_size", "layer_types", "use_mla")  # by caches, or here, whatever the type
SHARING = ("use_cla", "cla_share_factor")
SHARED = {"share", "shared", "sharing", "reuse"}
OF_WHAT = {"kv", "key", "keys", "cache", "attention", "attn", "layer", "layers"}
NO_TEXT = ("vision", "visual", "audio", "speech", "image", "encoder", "draft", "mtp")  # in names of other parts


def check_ignored(values: dict[str, Any], config: PreTrainedConfig, name: str, read: Callable[[Any], Any]) -> None:
    """Refuse a config.json if transformers' class, which made the config, ignores a field that decides on the cache.

    `read` returns the wiring of a config.

    Raises:
        ValueError: a field of the file decides on the cache, and the class does not read it.

    """
    kind = type(config)
    taken = {one.name for one in dataclasses.fields(kind)} | kind.attribute_map.keys() | mentioned(kind) | inert()
    beside = {other: value for other, value in values.items() if other not in taken and value is not None}
    flat = config.get_text_config(decoder=True) is config
    if flat:
        beside = {other: value for other, value in beside.items() if not in_model(kind, other)}
    ignored = _sharing(beside) or _unread_sizes(values, beside, config)
    if flat and not ignored:
        whole = _wiring(values, kind, read)
        for other in beside.keys() - {*READ}:
            if _wiring({one: value for one, value in values.items() if one != other}, kind, read) != whole:
                ignored.append(other)
    if ignored:
        raise ValueError(
            f"{name!r} has {', '.join(ignored)}, which transformers' class for {config.model_type} does not read, so "
            "that the size of its cache is not known; try a .gguf file of the model, or --like TYPE"
        )


def _sharing(beside: dict[str, Any]) -> list[str]:
    """Return the fields that make layers share keys and values; none if one of these fields is False."""
    found = {}
    for name, value in beside.items():
        words = set(name.split("_"))
        if name in SHARING or words & SHARED and words & OF_WHAT:
            found[name] = value
    if any(value is False for value in found.values()):
        return []
    return [name for name, value in found.items() if value is True or value not in (0, 1, [], {})]


def _unread_sizes(values: dict[str, Any], beside: dict[str, Any], config: PreTrainedConfig) -> list[str]:
    """Return the sizes in the file, or in a part of it, that are not those of the text model."""
    text = config.get_text_config(decoder=True)
    sizes: dict[str, str] = {}  # all names that some class has for them
    for entry in defaults().values():
        sizes |= {other: name for other, name in entry.get("names", {}).items() if name in SIZES}
    sizes |= {name: name for name in SIZES}
    parts = {name: part for name, part in values.items() if isinstance(part, dict)}
    parts = {name: part for name, part in parts.items() if not any(word in name for word in NO_TEXT)}
    said = [values, *(part for name, part in parts.items() if name not in beside)]
    read = {
        sizes[name] for part in said for name in part.keys() & sizes.keys() if part is not values or name not in beside
    }
    unread = []
    for name, value in beside.items():
        if name in sizes and sizes[name] not in read and _differs(value, field(text, sizes[name])):
            unread.append(name)
        for other in parts[name].keys() & sizes.keys() if name in parts else ():
            if _differs(parts[name][other], field(text, sizes[other])):
                unread.append(f"{name}.{other}")
    return unread


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list | tuple):  # some layer types have newer names
        return len(value) != len(other)
    return value is not None and value != other


def _wiring(values: dict[str, Any], kind: type[PreTrainedConfig], read: Callable[[Any], Any]) -> Any:
    try:
        return read(kind.from_dict(copy.deepcopy(values)))
    except Exception as error:  # each class has errors of its own
        return str(error)
