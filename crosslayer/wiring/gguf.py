"""Header of a GGUF file: the config of its model, and the size of its weights, which are never read themselves.

The format is described in ggml's docs/gguf.md. What a file does not say, such as which layers of an architecture have a
window, is llama.cpp's own rule, by its sources (llama-hparams, llama-model, models/*).
"""

import math
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type → struct
STRING, ARRAY = 8, 9
# A damaged or hostile header may claim more than fits in memory. Vocabularies have 2**18 items.
MOST_ITEMS = 2**24  # of metadata, or of an array
LONGEST_STRING = 2**24
# Items of an array that are kept: one for each layer. A vocabulary is read to its end, because only the lengths of its
# texts lead to the next field.
KEPT = 4097
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # of a file that is split
# The files of these architectures do not state which layers have a window; llama.cpp's loader has these periods.
# architecture → layers after which the pattern repeats; the last attends to all tokens, the others to a window
PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "olmo2": 4, "exaone4": 4, "afmoe": 4}
TYPES = {"gemma3": "gemma3_text"}  # architecture → transformers' name of the language model, where it differs
CHUNKED = {"llama4": (8192, 4)}  # architecture → tokens of a chunk, and the period
# Their files may name a window, which llama.cpp ignores.
NO_WINDOW = ("llama", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2", "mistral3")
GEMMA_3N_OWN = 20  # layers with keys and values of their own in Gemma 3n, whose files do not state it
# general.type, or the architecture of older files → what a file holds that is not a model
OTHERS = {"adapter": "a LoRA adapter", "imatrix": "an importance matrix", "mmproj": "a projector"}
OTHERS["clip"] = OTHERS["mmproj"]
# Architectures with other states than keys and values: recurrent ones, T5's encoder, or several kinds in a layer.
UNREAD = ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "falcon-h1", "t5", "t5encoder", "deepseek4")


class GgufConfig(SimpleNamespace):
    """The config in the metadata of a GGUF file, by the names that transformers gives its fields."""

    is_encoder_decoder = False

    def get_text_config(self, decoder: bool = False) -> "GgufConfig":
        """Return the config of the language model, as transformers' configs do."""
        return self


def gguf_config(file: Path) -> tuple[GgufConfig, int, int]:
    """Return the config of a GGUF file, and the bytes and the elements of its weights in all of its parts.

    Raises:
        ValueError: the file is damaged or not a model, a part is missing, or its architecture cannot be read.
    """
    parts = [file]
    if (match := PART.fullmatch(file.name)) is not None:
        count = int(match[3])
        parts = [file.with_name(f"{match[1]}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise ValueError(f"{file.name} is one of {count} parts; {missing[0]} is missing")

    # The first part has the metadata of the model, each part the entries of its own tensors.
    headers = [read_header(part) for part in parts]
    metadata = headers[0][0]
    if (content := not_a_model(metadata)) is not None:
        raise ValueError(f"{file.name} is {content}, not a model; name the model's own file")

    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture in UNREAD:
        raise ValueError(f"{file.name}: the KV cache of architecture {architecture!r} cannot be read from GGUF")
    values = {name.removeprefix(f"{architecture}."): value for name, value in metadata.items()}
    config = _config(_Fields(values, architecture, file.name))
    size = sum(part.stat().st_size for part in parts)
    return config, size, sum(elements for _, elements in headers)


def not_a_model(metadata: dict[str, Any]) -> str | None:
    """Return what a GGUF file with this metadata holds instead of a model, None if it holds one."""
    kinds = (str(metadata.get(name)) for name in ("general.type", "general.architecture"))
    return next((OTHERS[kind] for kind in kinds if kind in OTHERS), None)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the metadata of a GGUF file, arrays with their first items alone, and the elements of its tensors.

    Raises:
        ValueError: the file is not GGUF, is damaged, or is cut off in the middle.
    """
    metadata: dict[str, Any] = {}
    elements = 0
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{file.name} is not a GGUF file")
        try:
            version = _number(opened, "I")
            # versions 2 and 3 with their bytes in the other order
            if version in (2 << 24, 3 << 24):
                raise ValueError(f"{file.name} is a big-endian GGUF file; only little-endian ones can be read")
            if version not in (2, 3):
                raise ValueError(f"{file.name} has GGUF version {version}; only 2 and 3 can be read")
            tensors = _count(opened)
            for _ in range(_count(opened)):
                name = _string(opened)
                metadata[name] = _value(opened, _number(opened, "I"))
            for _ in range(tensors):
                name = _string(opened)
                axes = _number(opened, "I")
                if axes > 4:  # as in ggml
                    raise _Damaged(f"its tensor {name!r:.60} has {axes} axes")
                elements += math.prod(_number(opened, "Q") for _ in range(axes))
                for kind in "IQ":  # type and offset
                    _number(opened, kind)
        except struct.error:
            known = f"; architecture {metadata['general.architecture']}" if "general.architecture" in metadata else ""
            raise ValueError(
                f"{file.name} ends in the middle of its header, after {len(metadata)} fields{known}"
            ) from None
        except _Damaged as error:
            raise ValueError(f"{file.name} is damaged: {error}") from None
    return metadata, elements


class _Damaged(Exception):
    """A size or a type that no file has."""


def _number(file: BinaryIO, kind: str) -> Any:
    size = struct.calcsize(kind)
    return struct.unpack(f"<{kind}", file.read(size))[0]


def _count(file: BinaryIO) -> int:
    count = _number(file, "Q")
    if count > MOST_ITEMS:
        raise _Damaged(f"it claims {count} items of metadata, or tensors")
    return count


def _string(file: BinaryIO) -> str:
    length = _number(file, "Q")
    if length > LONGEST_STRING:
        raise _Damaged(f"it claims a text of {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise struct.error  # as `_number` does at the end of the file
    return text.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind in SCALARS:
        return _number(file, SCALARS[kind])
    if kind != ARRAY:
        raise _Damaged(f"it has a value of type {kind}")
    item, count = _number(file, "I"), _count(file)
    if item in SCALARS:
        size = struct.calcsize(SCALARS[item])
        data = file.read(size * count)
        if len(data) < size * count:
            raise struct.error
        first = min(count, KEPT)
        return list(struct.unpack(f"<{first}{SCALARS[item]}", data[: size * first]))
    if item != STRING:
        raise _Damaged(f"it has an array of type {item}")
    texts = (_string(file) for _ in range(count))
    return [text for index, text in enumerate(texts) if index < KEPT]


class _Fields(NamedTuple):
    """The fields of a model in a file's metadata, and the names that messages need."""

    values: dict[str, Any]
    architecture: str
    file: str

    def whole(self, field: str, default: int | None = None) -> int:
        """Return a field that is a whole number."""
        value = self.values.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ValueError(f"{self.file}: {self.architecture}.{field} must be a whole number, got {value!r}")
        return value

    def by_layer(self, field: str, layers: int, default: list[int] | None = None) -> list[int]:
        """Return a field that is a whole number for each layer, or one for all of them."""
        value = self.values.get(field, default)
        entries = value if isinstance(value, list) else [value] * layers
        if len(entries) < layers or not all(isinstance(entry, int) and 0 <= entry < 2**31 for entry in entries):
            name = f"{self.architecture}.{field}"
            raise ValueError(f"{self.file}: {name} has no whole number for each of {layers} layers")
        return entries[:layers]


def _config(metadata: _Fields) -> GgufConfig:
    """Return the config by the names that transformers gives its fields."""
    values, architecture, file = metadata
    # llama.cpp also counts the layers that draft further tokens as blocks; the plan is of the model without them.
    layers = metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)
    if not 1 <= layers < KEPT:
        raise ValueError(f"{file}: {architecture}.block_count must be from 1 to {KEPT - 1}, got {layers}")
    heads = metadata.by_layer("attention.head_count", layers)
    kv_heads = metadata.by_layer("attention.head_count_kv", layers, heads)
    width = metadata.whole("embedding_length")
    windows, layer_types = _masks(metadata, kv_heads)
    causal = values.get("attention.causal", True) is not False
    own_kv = GEMMA_3N_OWN if architecture == "gemma3n" else layers - metadata.whole("attention.shared_kv_layers", 0)

    fields = {
        "model_type": TYPES.get(architecture, architecture),
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": max(heads) or None,
        "vocab_size": 1,  # a GGUF file's model is a language model, and its vocabulary does not matter here
        "architectures": None if causal else ["Encoder"],
        "is_decoder": causal,
        "layer_types": layer_types,
        "num_kv_shared_layers": max(0, layers - own_kv),
        "conv_L_cache": values.get("shortconv.l_cache"),
        "mamba_d_conv": values.get("ssm.conv_kernel"),
        "mamba_d_state": values.get("ssm.state_size"),
        "mamba_n_groups": values.get("ssm.group_count"),
        # The width of the states is given as a number of heads with one element: only their product counts.
        "mamba_n_heads": values.get("ssm.inner_size"),
        "mamba_d_head": 1,
        "mamba_expand": metadata.whole("ssm.inner_size", 0) / width,
        "dtype": "float16",
    }
    per_layer = []
    for layer in range(layers):
        swa = "_swa" if windows[layer] is not None and "attention.key_length_swa" in values else ""
        default = width // max(1, max(heads))
        # llama.cpp writes latent attention as one key-value head whose keys hold the values.
        latent = "attention.kv_lora_rank" in values and kv_heads[layer] == 1
        key_size = metadata.whole(f"attention.key_length{swa}", default)
        value_size = 0 if latent else metadata.whole(f"attention.value_length{swa}", default)
        of_layer = {
            "num_attention_heads": heads[layer] or None,
            "num_key_value_heads": kv_heads[layer] or None,
            "head_dim": key_size,
            "v_head_dim": value_size or None,
            "keys_hold_values": latent,
            "sliding_window": windows[layer],
            "attention_chunk_size": windows[layer],
        }
        per_layer.append(GgufConfig(**{**fields, **of_layer}))
    return GgufConfig(**fields, per_layer_config=per_layer)


def _masks(metadata: _Fields, kv_heads: list[int]) -> tuple[list[int | None], list[str]]:
    """Return each layer's window, None where it attends to all tokens, and its type."""
    values, architecture, file = metadata
    layers = range(len(kv_heads))
    window, pattern = values.get("attention.sliding_window"), values.get("attention.sliding_window_pattern")
    if architecture in CHUNKED:
        window, period = CHUNKED[architecture]
        limited = [(layer + 1) % period != 0 for layer in layers]
    elif not window or architecture in NO_WINDOW:
        limited = [False for _ in layers]
    elif isinstance(pattern, list) and len(pattern) >= len(layers):
        limited = pattern[: len(layers)]
    else:
        period = pattern if isinstance(pattern, int) and pattern > 0 else PERIODS.get(architecture)
        if period is None:
            raise ValueError(f"{file}: which layers of architecture {architecture!r} have a window is unknown")
        limited = [(layer + 1) % period != 0 for layer in layers]
    windows = [window if limit else None for limit in limited]

    # Layers without key-value heads are recurrent, and so are those between the full ones of an interval.
    interval = values.get("full_attention_interval")
    recurrent = "conv" if "shortconv.l_cache" in values else "linear_attention" if "ssm.state_size" in values else "mlp"
    within = "chunked_attention" if architecture in CHUNKED else "sliding_attention"
    types = []
    for layer in layers:
        skipped = isinstance(interval, int) and interval > 0 and (layer + 1) % interval != 0
        if kv_heads[layer] == 0 or skipped:
            types.append(recurrent)
        else:
            types.append("full_attention" if windows[layer] is None else within)
    return windows, types
