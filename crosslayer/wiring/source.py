"""Where a config comes from: a hub name, a folder, a config.json, a GGUF file, standard input; no weights are read.

A config.json is read by transformers' own class for its model type. It is refused if the class ignores a field that
makes layers share, or a size under another name.
"""

import contextlib
import copy
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig

from crosslayer.hub import hub_source, is_hub_name
from crosslayer.models.embedded import EMBEDDED, check_known, embedded_files
from crosslayer.models.errors import check_layers, one_line_errors
from crosslayer.wiring.classes import declared, in_model_code
from crosslayer.wiring.gguf import GgufConfig, gguf_config, not_a_model, read_header

STDIN = "-"
MARK = "\ufeff"  # editors and shells on Windows begin texts with it
LARGEST = 2**26  # bytes of a config.json
INDEX = "model.safetensors.index.json"
ALTERNATIVES = f"use a hub name, a folder, a config.json, a .gguf file, - for standard input, or {', '.join(EMBEDDED)}"
LATENT_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types")
# All names that classes have for them. No code reads `n_layers` in a Llama's file, and the class takes its default, 32.
NAMES = {name: name for name in SIZES} | {
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "layers"), "num_hidden_layers"),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_embd", "d_model", "dim", "emb_dim", "embed_dim"), "hidden_size"),
    **dict.fromkeys(("n_head", "n_heads", "attention_heads"), "num_attention_heads"),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), "num_attention_heads"),
    "num_attention_groups": "num_key_value_heads",
    **dict.fromkeys(("attention_head_dim", "kv_channels"), "head_dim"),
    "layers_block_type": "layer_types",
}
READ = ("model_type", "torch_dtype", "per_layer_config")  # by all classes, without being declared
# Fields that make layers share have a word of each set in their names; two of them do not.
SHARING = ("use_cla", "cla_share_factor")
SHARED = {"share", "shared", "sharing", "reuse"}
OF_WHAT = {"kv", "key", "keys", "cache", "attention", "attn", "layer", "layers"}
NO_TEXT = ("vision", "visual", "audio", "speech", "image", "encoder", "draft", "mtp")  # in names of other parts
DECILM = "nemotron-nas"
OURS = "crosslayer"
BLOCK = ("no_op", "replace_with_linear", "n_heads_in_group")  # what is counted of a DeciLM's attention
# bits of a number by its type in the hub's list of weights; all other types have 8
WEIGHT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16}


class Source(NamedTuple):
    """A config, transformers' own or a GGUF file's with the same fields, the size of its weights, and its name."""

    config: Any
    weights_bytes: int | None = None
    parameters: int | None = None
    name: str = ""


def read_source(name: str, like: str | None = None) -> Source:
    """Return the config that a name stands for; a config.json is read as one of the model type `like`, if it is set.

    Raises:
        ValueError: the config does not exist, cannot be read, or cannot be read as `like`.
    """
    parts = embedded_files(name) if name in EMBEDDED else [Path(name).expanduser()]
    path = parts[0]
    if path.is_file() and path.suffix == ".safetensors":
        path = path.parent
    if name == STDIN:
        source = _source(sys.stdin.read(LARGEST + 1), "standard input", like)
    elif name in EMBEDDED and EMBEDDED[name].sha256:  # a file that packages carry in parts; the first has the header
        config, _, elements = gguf_config(path)
        source = Source(config, sum(part.stat().st_size for part in parts), elements)
    elif path.suffix == ".gguf" and path.is_file():
        source = Source(*gguf_config(path))
    elif path.is_file():
        source = _source(_text(path), name, like)
    elif path.is_dir():
        source = _folder(path, name, like)
    else:
        source = _hub(name, like)
    if like is not None and isinstance(source.config, GgufConfig):
        raise ValueError("--like must come with a config.json, got a GgufConfig; leave it out")
    return source._replace(name=name)


def _folder(folder: Path, name: str, like: str | None) -> Source:
    file = folder / "config.json"
    if file.is_file():
        return _source(_text(file), name, like, _weights_bytes(folder))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ValueError(f"{name!r} has no config.json and no .gguf file; {ALTERNATIVES}")
    # Folders may also hold projectors and importance matrices; if there is no model, the error names the first file.
    models = (file for file in files if not_a_model(read_header(file)[0]) is None)
    return Source(*gguf_config(next(models, files[0])))


def _weights_bytes(folder: Path) -> int | None:
    """Return the bytes of the safetensors that transformers reads: one file, else those of the index, else all."""
    single, index = folder / "model.safetensors", folder / INDEX
    # transformers reads only this file; shards next to it are of an earlier save.
    if single.is_file():
        return single.stat().st_size
    if index.is_file():
        values = _parsed(_text(index), INDEX)
        metadata, parts = values.get("metadata"), values.get("weight_map")
        files = {folder / str(part) for part in parts.values()} if isinstance(parts, dict) else set()
        if files and all(file.is_file() for file in files):
            return sum(file.stat().st_size for file in files)
        if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
            return metadata["total_size"]
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or None


def _hub(name: str, like: str | None) -> Source:
    check_known(name)
    if not is_hub_name(name):
        raise ValueError(f"{name!r} does not exist; {ALTERNATIVES}")
    try:
        source = hub_source(name)
    except ValueError as error:
        raise ValueError(f"{error}; {ALTERNATIVES}") from error
    if source != name:  # the hub is away, and the cache has the model
        return _folder(Path(source), name, like)
    file = Path(hf_hub_download(name, "config.json"))

    # The hub counts weights by their types. If it does not know them or cannot be reached, the plan has none.
    weights_bytes = None
    with contextlib.suppress(HfHubHTTPError, OSError):
        info = HfApi().model_info(name, expand=["safetensors"], timeout=5).safetensors
        if info is not None:
            weights_bytes = sum(count * WEIGHT_BITS.get(kind, 8) // 8 for kind, count in info.parameters.items())
    return _source(_text(file), name, like, weights_bytes)


def _text(file: Path) -> str:
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes, too many for a config")
    return file.read_text(encoding="utf-8", errors="replace")


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        values = json.loads(text.removeprefix(MARK))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name!r} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name!r} is not a config: it holds a {type(values).__name__}, not an object")
    return values


class DeciLMAsLlama(LlamaConfig):
    """The config of a DeciLM by Llama's fields, some of which differ by layer."""

    model_type = DECILM


def _source(text: str, name: str, like: str | None, weights_bytes: int | None = None) -> Source:
    """Return the config that transformers reads from the text of a config.json; code in its folder is never run.

    Raises:
        ValueError: the model type is unknown, its class refuses the fields, or does not read one that makes layers
            share, or a size under another name.
    """
    values = _parsed(text, name)
    if like is not None:
        values["model_type"] = like
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{name!r} is not the config of a model: it has no model_type; try --like TYPE")
    check_layers(values)
    if model_type == OURS:
        import crosslayer.core.decoder.configuration  # noqa: F401  registers our class
    if model_type == DECILM:
        kind, values = DeciLMAsLlama, _llama_values(values)
    elif model_type in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model_type]
    else:
        raise ValueError(
            f"{name!r}: transformers {transformers.__version__} has no model type {model_type!r}; try a .gguf file of "
            "the model, or --like TYPE with a type of transformers whose fields mean the same, such as llama"
        )
    # Without MLA the sizes of latents are 0 or null, which classes refuse.
    if values.get("use_mla") is False:
        values = {field: value for field, value in values.items() if field not in LATENT_SIZES}
    try:
        with one_line_errors(name):
            config = kind.from_dict(copy.deepcopy(values))  # which takes fields out of what it is given
    except ValueError:
        # A pruned model may still list the types of all layers; this message replaces the class's own.
        for part in (values, *(part for part in values.values() if isinstance(part, dict))):
            types, layers = part.get("layer_types"), part.get("num_hidden_layers")
            if isinstance(types, list) and isinstance(layers, int) and len(types) != layers:
                raise ValueError(
                    f"{name!r}: layer_types must have an entry for each of {layers} layers (num_hidden_layers), got "
                    f"{len(types)}; list the types of the layers that are left"
                ) from None
        raise
    _check_ignored(values, config, name)
    return Source(config, weights_bytes)


def _llama_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return Llama's fields of a DeciLM; a layer without attention, or with a linear map instead, stores nothing."""
    blocks = values.get("block_configs")
    heads = values.get("num_attention_heads")
    if not isinstance(blocks, list) or len(blocks) != values.get("num_hidden_layers") or not isinstance(heads, int):
        raise ValueError(f"{DECILM}: the config lacks Llama's fields, or block_configs with an entry for each layer")
    layer_types = []
    by_layer: dict[int, dict[str, int]] = {}
    for layer, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise ValueError(f"{DECILM}: layer {layer}: block_configs must describe its attention, got {attention}")
        # Windows, sinks and sparse attention would change the cache, and Llama has no fields for them in single layers.
        beside = sorted(name for name, value in attention.items() if name not in BLOCK and value not in (None, False))
        if beside:
            raise ValueError(f"{DECILM}: layer {layer}: attention with {', '.join(beside)} is not counted")
        by_layer[layer] = {}
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layer_types.append("moe")
            continue
        group = attention.get("n_heads_in_group")
        if not isinstance(group, int) or group < 1 or heads % group:
            raise ValueError(f"{DECILM}: layer {layer}: n_heads_in_group must divide {heads} heads, got {group}")
        layer_types.append("full_attention")
        by_layer[layer] = {"num_key_value_heads": heads // group}
    # Published DeciLMs have null in both sizes, since each block has its own.
    others = ("block_configs", "num_key_value_heads", "intermediate_size")
    llama = {name: value for name, value in values.items() if name not in others}
    return {**llama, "layer_types": layer_types, "per_layer_config": by_layer}


def _check_ignored(values: dict[str, Any], config: PreTrainedConfig, name: str) -> None:
    """Refuse a config.json if its class ignores a field that makes layers share, or a size under another name.

    Without this, Step 3.7's flat config, Falcon's older names and `n_layers` would be miscounted silently.
    """
    kind = type(config)
    read = declared(kind) | {*READ}
    beside = {field: value for field, value in values.items() if field not in read and value is not None}
    # If the text model is not part of a larger config, all fields belong to it, and its code may read them.
    if config.get_text_config(decoder=True) is config:
        model = LlamaConfig if kind is DeciLMAsLlama else kind
        beside = {field: value for field, value in beside.items() if not in_model_code(model, field)}

    sharing = {}
    for field, value in beside.items():
        words = set(field.split("_"))
        if field in SHARING or words & SHARED and words & OF_WHAT:
            sharing[field] = value
    ignored = [field for field, value in sharing.items() if value is True or value not in (0, 1, [], {})]
    # One field that is False switches sharing off, whatever the others are.
    if any(value is False for value in sharing.values()):
        ignored = []
    ignored = ignored or _unread_sizes(values, beside, config)
    if ignored:
        raise ValueError(
            f"{name!r} has {', '.join(ignored)}, which transformers' class for {config.model_type} does not read, so "
            "the size of its cache is unknown; try a .gguf file of the model, or --like TYPE"
        )


def _unread_sizes(values: dict[str, Any], beside: dict[str, Any], config: PreTrainedConfig) -> list[str]:
    """Return the sizes in the file, or in a part of it, that are not those of the text model."""
    text = config.get_text_config(decoder=True)
    read = {NAMES[name] for name in values.keys() & NAMES.keys() - beside.keys()}
    in_parts = []  # name in the file, size, value
    for name, part in values.items():
        if not isinstance(part, dict) or any(word in name for word in NO_TEXT):
            continue
        sizes = [size for size in part if size in NAMES]
        if name in beside:
            in_parts += [(f"{name}.{size}", size, part[size]) for size in sizes]
        else:
            read |= {NAMES[size] for size in sizes}
    # If the file has a size twice, under two names, the one that the class reads counts.
    found = [(size, size, beside[size]) for size in beside if size in NAMES and NAMES[size] not in read]
    unread = []
    for name, size, value in [*found, *in_parts]:
        known = getattr(text, NAMES[size], None)
        if isinstance(value, list) and isinstance(known, list | tuple):
            # Classes translate the older names of some layer types, so only their number is compared.
            differs = len(value) != len(known)
        else:
            differs = value is not None and value != known
        if differs:
            unread.append(name)
    return unread
