"""Where a config comes from: a hub name, a folder, a config.json, a GGUF file, standard input; no weights are read."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from crosslayer.hub import hub_source, is_hub_name
from crosslayer.models.embedded import EMBEDDED, embedded_files
from crosslayer.wiring.config_class import class_config
from crosslayer.wiring.gguf import GgufConfig, gguf_config, not_a_model, read_header

STDIN = "-"
LARGEST = 2**26  # bytes of a config.json
INDEX = "model.safetensors.index.json"
ALTERNATIVES = f"use a hub name, a folder, a config.json, a .gguf file, - for standard input, or {', '.join(EMBEDDED)}"


class Source(NamedTuple):
    """A config, transformers' own or a GGUF file's with the same fields, the size of its weights, and its name."""

    config: Any
    weights_bytes: int | None = None
    parameters: int | None = None
    name: str = ""


def read_source(name: str, like: str | None = None) -> Source:
    """Return the config that a name stands for; a config.json is read as one of the model type `like`, if it is set.

    Raises:
        ValueError: there is none, or it cannot be read, or not as `like`.
    """
    source = _read(name, like)
    if like is not None and isinstance(source.config, GgufConfig):
        raise ValueError("--like must come with a config.json, got a GgufConfig; leave it out")
    return source._replace(name=name)


def _read(name: str, like: str | None) -> Source:
    if name == STDIN:
        return _source(sys.stdin.read(LARGEST + 1), "standard input", like)
    parts = embedded_files(name) if name in EMBEDDED else [Path(name).expanduser()]
    path = parts[0]
    if name in EMBEDDED and EMBEDDED[name].sha256:  # the first part has the header
        config, _, elements = gguf_config(path)
        return Source(config, sum(part.stat().st_size for part in parts), elements)
    if path.suffix == ".gguf" and path.is_file():
        return Source(*gguf_config(path))
    if path.is_file() and path.suffix == ".safetensors":
        path = path.parent
    if path.is_file():
        return _source(_text(path), name, like)
    if path.is_dir():
        return _folder(path, name, like)
    return _hub(name, like)


def _folder(folder: Path, name: str, like: str | None) -> Source:
    file = folder / "config.json"
    if file.is_file():
        return _source(_text(file), name, like, _weights_bytes(folder))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ValueError(f"{name!r} has no config.json and no .gguf file; {ALTERNATIVES}")
    models = (file for file in files if not_a_model(read_header(file)[0]) is None)
    return Source(*gguf_config(next(models, files[0])))


def _weights_bytes(folder: Path) -> int | None:
    """Return the bytes of a folder's safetensors files: those of the index, if there is one."""
    index = folder / INDEX
    if index.is_file():
        size = _parsed(_text(index), INDEX).get("metadata", {}).get("total_size")
        if isinstance(size, int):
            return size
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or None


def _hub(name: str, like: str | None) -> Source:
    if not is_hub_name(name):
        raise ValueError(f"{name!r} does not exist; {ALTERNATIVES}")
    try:
        source = hub_source(name)
    except ValueError as error:
        raise ValueError(f"{error}; {ALTERNATIVES}") from error
    if source != name:  # the hub is away, and the cache has the model
        return _folder(Path(source), name, like)
    file = Path(hf_hub_download(name, "config.json"))
    return _source(_text(file), name, like, _hub_weights_bytes(name))


def _hub_weights_bytes(name: str) -> int | None:
    """Return the bytes of a hub model's weights, None if the hub does not know them."""
    bits = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16}  # all others have 8
    try:
        info = HfApi().model_info(name, expand=["safetensors"], timeout=5).safetensors
    except (HfHubHTTPError, OSError):
        return None
    return None if info is None else sum(count * bits.get(kind, 8) // 8 for kind, count in info.parameters.items())


def _text(file: Path) -> str:
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes, too many for a config")
    return file.read_text(encoding="utf-8", errors="replace")


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name!r} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name!r} is not a config: it holds a {type(values).__name__}, not an object")
    return values


def _source(text: str, name: str, like: str | None, weights_bytes: int | None = None) -> Source:
    values = _parsed(text, name)
    if like is not None:
        values["model_type"] = like
    return Source(class_config(values, name), weights_bytes)
