"""Write `crosslayer/wiring/config_defaults.json`: what `plain_config` knows of transformers' config classes.

    python -m benchmarks.config_defaults    # transformers of the newest supported version

An entry stands only if the plain way and the class give the same wiring, or the same refusal: for the class's own
defaults, for a config.json that names the model type alone, and with each of its fields changed, one at a time. A field
that the class's code mentions counts as known if changing it did no harm. A test changes several under all their names.
"""

import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from crosslayer.wiring import plain_config
from crosslayer.wiring.read import read_wiring
from crosslayer.wiring.transformers_config import in_model, is_encoder_type, mentioned

# fields that some class takes without declaring them, and that decide on the types of layers
UNDECLARED = ("sliding_window_pattern", "full_attention_interval", "attn_layer_period", "attn_layer_offset")
LONGEST_PERIOD = 8
DEPTHS = (1, 2, 3, 5, 8, 13, 48)  # numbers of layers for which a period is checked
# defaults that a class has without declaring the field
BESIDE: dict[str, dict[str, Any]] = dict.fromkeys(("gemma4_text", "gemma4_unified_text"), {"global_head_dim": 512})
READ_FIRST = ("use_sliding_window", "attention_k_eq_v")  # by the plain way itself
OURS = ("crosslayer",)
PUBLISHED = ("max_window_layers",)  # in files whose class does not read it
# fields that classes derive and that the plain way does without, or deduces itself
DEDUCED = ("num_key_value_heads", "head_dim", "dtype", "layers_block_type", "kv_sharing_modes", "model_type")
TEXTS = ("text_config", "thinker_config", "llm_config")
# fields that classes mention, or that published files have beside them, and that never decide on the wiring
INERT = (
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "attention_bias", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id", "cache_implementation",
    "dtype", "eos_token_id", "ep_size", "experts_per_token", "gradient_checkpointing", "hidden_act",
    "hidden_activation", "id2label", "image_token_id", "image_token_index", "initial_context_length",
    "initializer_range", "intermediate_size", "is_encoder_decoder", "is_llama_config", "label2id",
    "max_position_embeddings", "mlp_bias", "mlp_layer_types", "mlp_only_layers", "moe_intermediate_size",
    "moe_layer_freq", "n_ctx", "n_positions", "name_or_path", "num_experts", "num_experts_per_tok", "num_labels",
    "num_local_experts", "num_nextn_predict_layers", "original_max_position_embeddings", "output_attentions",
    "pad_token_id", "partial_rotary_factor", "pretraining_tp", "quantization_config", "rope_interleaved",
    "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "scoring_func", "seq_aux",
    "task_specific_params", "tie_word_embeddings", "topk_method", "torch_dtype", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_mrope", "use_return_dict", "video_token_id",
    "vision_config",
)  # fmt: skip


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
        return wiring_of(CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values))))
    except Exception:  # each class has errors of its own
        return None


def plainly(values: dict[str, Any]) -> Any:
    """Return the wiring that the plain way gives a config.json, None if it leaves that to transformers."""
    config = plain_config.plain_config(values)
    return None if config is None else wiring_of(config)


def verdict(values: dict[str, Any]) -> bool | None:
    """Return whether the plain way says what the class says; None if one of them says nothing."""
    plain = plainly(values)
    expected = None if plain is None else by_class(values)
    if plain is None or expected is None:
        return None
    return plain == expected or isinstance(plain, str) and isinstance(expected, str)


def agrees(values: dict[str, Any]) -> bool:
    """Return whether the plain way says what the class says, or nothing."""
    return verdict(values) is not False


def others(value: Any) -> tuple[Any, ...]:
    """Return other values of a field whose default is `value`."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (2 * value + 1 if value < 8 else value // 2, None)
    if isinstance(value, float):
        return (2 * value,)
    return (4, True, "auto") if value is None else ()


def changes(model_type: str) -> Iterator[tuple[str, Any]]:
    """Yield other values of the fields of a model type."""
    for one in dataclasses.fields(CONFIG_MAPPING[model_type]):
        yield from ((one.name, value) for value in others(one.default))
    periods = [name for name in UNDECLARED if name in mentioned(CONFIG_MAPPING[model_type])]
    yield from ((name, period) for name in periods for period in range(2, LONGEST_PERIOD))


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
    used = names_of(kind, names)
    values = {used.get(name, name): value for name, value in declared.items()}
    values |= {name: getattr(kind, name) for name in names if isinstance(vars(kind).get(name), int)}
    kept = {name: value for name, value in values.items() if name in names and isinstance(value, int | float | str)}
    kept = {name: value for name, value in kept.items() if (name, value) != ("is_encoder_decoder", False)}
    entry: dict[str, Any] = {"values": kept, "known": sorted({*declared, *kind.attribute_map} - set(kept) - set(used))}
    if used:
        entry["names"] = used
    if is_encoder_type(model_type):
        entry["masked"] = True
    entry["values"] |= BESIDE.get(model_type, {})
    text = config.get_text_config(decoder=True)
    if text is config:
        beside = {name for name in {*names, *PUBLISHED} - mentioned(kind) if name in PUBLISHED or in_model(kind, name)}
        entry["known"] = sorted({*entry["known"], *beside} - set(kept) - set(used))
    else:
        part = next((name for name in TEXTS if getattr(config, name, None) is text), None)
        if part is None:
            return None
        if not issubclass(kind.sub_configs_defaults[part].config_class, PreTrainedConfig):
            entry["any_text"] = True
        return {**entry, "text": [part, text.model_type]}
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


def names_of(kind: type[PreTrainedConfig], names: Counter[str]) -> dict[str, str]:
    """Return the other names of the fields that are read → their names here."""
    found = {}
    for alias, stored in kind.attribute_map.items():
        if alias in names and (stored not in names or alias == "layer_types"):
            found[stored] = alias
        elif stored in names:
            found[alias] = stored
    return found


def write_table() -> dict[str, Any]:
    """Return the table, which is also the one in use."""
    names: Counter[str] = Counter(READ_FIRST)
    readable = []
    for model_type in sorted(set(CONFIG_MAPPING) - set(OURS)):
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # a class without defaults
            continue
        wiring = wiring_of(Recorder(config, names))
        if isinstance(wiring, dict) and (wiring["caches"] or is_encoder_type(model_type)):
            readable.append(model_type)
    kinds = [CONFIG_MAPPING[model_type] for model_type in readable]
    declared = {one.name for kind in kinds for one in dataclasses.fields(kind)}
    decisive = {*names, *UNDECLARED}.union(*(names_of(kind, names) for kind in kinds), *map(mentioned, kinds))
    generation = vars(GenerationConfig()).keys() - names.keys()
    table = plain_config.table()
    table["inert"] = sorted(declared - decisive | generation | {*INERT})
    plain_config.inert.cache_clear()
    known = table["types"]
    known.clear()  # with what an earlier version wrote
    for model_type in readable:
        entry = entry_of(model_type, names)
        if entry is not None:
            known[model_type] = entry
    for model_type in sorted(known, key=lambda name: "text" in known[name]):
        _fix(model_type)
        if not all(map(agrees, _samples(model_type))):
            del known[model_type]
    for model_type in [name for name, entry in known.items() if "text" in entry and entry["text"][1] not in known]:
        del known[model_type]
    return table


def _samples(model_type: str) -> Iterator[dict[str, Any]]:
    yield {"model_type": model_type}
    yield smallest(model_type)
    yield CONFIG_MAPPING[model_type]().to_dict()


def smallest(model_type: str) -> dict[str, Any]:
    """Return a config.json with no more fields than the plain way needs."""
    values, config = {"model_type": model_type}, CONFIG_MAPPING[model_type]().to_dict()
    return values | {name: config.get(name) for name in plain_config.defaults()[model_type].get("needed", ())}


def _fix(model_type: str) -> None:
    """Note the fields that change the wiring in ways that the plain way does not know, and forget those not tested."""
    entry, kind = plain_config.defaults()[model_type], CONFIG_MAPPING[model_type]
    neutral = {one.name: one.default for one in dataclasses.fields(kind)}
    fixed: dict[str, Any] = {}
    agreeing: dict[str, Any] = {}
    least = smallest(model_type)
    entry["known"] += UNDECLARED
    for name, value in changes(model_type):
        if name in least or name in plain_config.inert():
            continue
        right = verdict({**least, name: value})
        if right:
            agreeing[name] = value
        elif right is False:
            fixed[name] = neutral.get(name)
    fixed |= {name: agreeing.get(name) for name in UNDECLARED if name in fixed and name not in neutral}
    for alias, stored in kind.attribute_map.items():
        fixed |= {alias: fixed[stored]} if stored in fixed else {stored: fixed[alias]} if alias in fixed else {}
    if fixed:
        entry["fixed"] = fixed
    directly = {*kind.sub_configs_defaults, "layer_types", "layers_block_type"}
    untested = mentioned(kind) - agreeing.keys() - directly | {*UNDECLARED} - neutral.keys()
    untested |= {alias for alias, stored in kind.attribute_map.items() if stored in untested}
    skipped = {*untested, *fixed, *plain_config.inert()}
    entry["known"] = [name for name in entry["known"] if name not in skipped]


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    table = write_table()
    lines = [f'"{name}": {json.dumps(entry, sort_keys=True)}' for name, entry in sorted(table["types"].items())]
    text = '{"inert": ' + json.dumps(table["inert"]) + ',\n"types": {\n' + ",\n".join(lines) + "\n}}\n"
    plain_config.DEFAULTS.write_text(text, encoding="utf-8")
    print(f"{len(lines)} model types in {plain_config.DEFAULTS.name}")


if __name__ == "__main__":
    main()
