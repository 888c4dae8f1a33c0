"""The manifest of a saved model: a SHA-256 of every file, the plan, and logits on fixed ids as a fingerprint.

It is not a signature: whoever can change the files can write a new manifest. It detects damage and later edits.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.plan import DepthPlan
from crosslayer.environment import environment
from crosslayer.output.folder import write_whole
from crosslayer.output.record import validation_message
from crosslayer.probe.model import evaluating, layer_stack, positions

NAME = "manifest.json"
NOT_LISTED = (NAME, ".gitattributes")  # the hub adds .gitattributes to every repository
CLIENT = ".cache/huggingface/"  # where the hub's client records what it downloaded into a folder
IDS, LOGITS = 24, 16  # tokens of the fingerprint, and how many logits of the last token it keeps
LARGEST = 2**24  # bytes of a manifest; 100,000 files need less


class Fingerprint(BaseModel):
    """Logits of the last of `ids` at `LOGITS` evenly spaced entries of the vocabulary; `std` is that of all of them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ids: list[int] = Field(min_length=1, max_length=IDS)
    dtype: Literal["float32"]
    logits: list[float] = Field(min_length=LOGITS, max_length=LOGITS)
    std: float = Field(gt=0)


class Manifest(BaseModel):
    """The content of `manifest.json`; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    schema_: Literal["crosslayer/manifest/1"] = Field(alias="schema")
    files: dict[str, str]
    plan: DepthPlan | None
    methods: list[dict[str, Any]] | None
    fingerprint: Fingerprint
    versions: dict[str, str | None]


def write_manifest(folder: Path, model: PreTrainedModel, config: PreTrainedConfig | None = None) -> None:
    """Write `manifest.json` into the folder of a saved model, after all other files.

    `config` is that of the folder, if its layers are not those of the model: a DeciLM lacks layers without sublayers.
    """
    config = config or model.config
    files = _entries(folder)
    odd = [name for name, path in files.items() if not path.is_file()]
    if odd:
        raise ValueError(f"{folder.name!r} holds {odd[0]!r}, which is not a regular file; a manifest lists files")
    manifest = Manifest(
        schema="crosslayer/manifest/1",
        files={name: file_digest(path) for name, path in files.items()},
        plan=plan_of(config),
        methods=methods_of(config),
        fingerprint=fingerprint(model),
        versions=environment().versions,
    )
    text = json.dumps(manifest.model_dump(by_alias=True), ensure_ascii=False, allow_nan=False, indent=1)
    write_whole(folder / NAME, text)


def read_manifest(folder: Path) -> Manifest:
    """Read and check an untrusted `manifest.json`."""
    path = folder / NAME
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise ValueError(f"it is not a file, or has more than {LARGEST:,} bytes")
        manifest = Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        message = validation_message(error)
        raise ValueError(f"{NAME}: {'it is nested too deeply' if 'recursion limit' in message else message}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{NAME}: {error}") from None
    for name in manifest.files:
        inside = PurePosixPath(name)
        if not name or inside.is_absolute() or ".." in inside.parts or "\\" in name or "\0" in name:
            raise ValueError(f"{NAME}: {name!r} is not a path inside the folder")
    return manifest


def check_files(folder: Path) -> list[str]:
    """Return a line for each file that is missing, changed, or not listed in the folder's manifest.

    Only files in the folder are read, whatever names the manifest lists.
    """
    digests, paths = read_manifest(folder).files, _entries(folder)
    problems = [f"{name} is missing" for name in digests if name not in paths]
    for name, path in paths.items():
        if name not in digests:
            problems.append(f"{name} is not listed")
        elif not path.is_file() or file_digest(path) != digests[name]:
            problems.append(f"{name} is changed")
    return sorted(problems)


def plan_of(config: PreTrainedConfig) -> DepthPlan | None:
    """Return the plan of a crosslayer model, or None for a stock model."""
    return config.plan if isinstance(config, CrossLayerConfig) else None


def methods_of(config: PreTrainedConfig) -> list[dict[str, Any]] | None:
    """Return the methods of a crosslayer model as JSON data, or None for a stock model."""
    return json.loads(json.dumps(config.cross_layer)) if isinstance(config, CrossLayerConfig) else None


@torch.no_grad()
def fingerprint(model: PreTrainedModel, ids: list[int] | None = None) -> Fingerprint:
    """Compute the fingerprint in float32; `ids` default to a fixed sequence."""
    text = model.config.get_text_config(decoder=True)
    size = text.vocab_size
    if ids is None:
        ids = [(7 + 7919 * i) % size for i in range(min(IDS, positions(model)))]
    if not all(0 <= i < size for i in ids):
        raise ValueError(f"the fingerprint's ids must be below {size}, the size of the vocabulary, got {max(ids)}")
    with evaluating(model), _in_float32(model):
        logits: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]  # (V)
    kept = [logits.shape[0] * i // LOGITS for i in range(LOGITS)]
    return Fingerprint(ids=ids, dtype="float32", logits=logits[kept].tolist(), std=logits.std().item())


@contextlib.contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Run a model in float32 inside the block; layers are cast one at a time, so only one needs extra memory."""
    layers, stored = layer_stack(model), {}
    inside = set(layers.parameters()) | set(layers.buffers())
    outside = [tensor for tensor in _tensors(model) if tensor not in inside]

    def cast(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                stored[tensor], tensor.data = tensor.data, tensor.data.float()

    def restore(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor in stored:
                tensor.data = stored.pop(tensor)

    hooks: list[RemovableHandle] = []
    try:
        cast(outside)
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(lambda layer, _: cast(_tensors(layer))))
            hooks.append(layer.register_forward_hook(lambda layer, *_: restore(_tensors(layer))))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore(list(stored))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _entries(folder: Path) -> dict[str, Path]:
    """Return all files below a folder except the manifest and what the hub and its client add.

    A link to a folder is an entry; it is not followed.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in names.items() if name not in NOT_LISTED and not name.startswith(CLIENT)}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
