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
from crosslayer.output.record import dumps, validation_message
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
    # such as a link to a folder, which is not followed, or a pipe, whose end may never come
    odd = [name for name, path in files.items() if not path.is_file()]
    if odd:
        raise ValueError(f"{folder.name!r} holds {odd[0]!r}, which is not a regular file; a manifest lists files")
    plan, methods = plan_and_methods(config)
    manifest = Manifest(
        schema="crosslayer/manifest/1",
        files={name: file_digest(path) for name, path in files.items()},
        plan=plan,
        methods=methods,
        fingerprint=fingerprint(model),
        versions=environment().versions,
    )
    write_whole(folder / NAME, dumps(manifest.model_dump(by_alias=True)))


def read_manifest(folder: Path) -> Manifest:
    """Read and check an untrusted `manifest.json`."""
    path = folder / NAME
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise ValueError(f"it is not a file, or has more than {LARGEST:,} bytes")
        manifest = Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        message = validation_message(error)
        # the words of pydantic's parser
        raise ValueError(f"{NAME}: {'it is nested too deeply' if 'recursion limit' in message else message}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{NAME}: {error}") from None
    # names are untrusted: whoever opens a listed file must stay inside the folder, on Windows too
    for name in manifest.files:
        inside = PurePosixPath(name)
        if not name or inside.is_absolute() or ".." in inside.parts or "\\" in name or "\0" in name:
            raise ValueError(f"{NAME}: {name!r} is not a path inside the folder")
    return manifest


def check_files(folder: Path) -> list[str]:
    """Return a line for each file that is missing, changed, or not listed in the folder's manifest.

    Only files in the folder are read, whatever names the manifest lists.
    """
    digests = read_manifest(folder).files
    paths = _entries(folder)
    problems = [f"{name} is missing" for name in digests if name not in paths]
    for name, path in paths.items():
        if name not in digests:
            problems.append(f"{name} is not listed")
        elif not path.is_file() or file_digest(path) != digests[name]:
            problems.append(f"{name} is changed")
    return sorted(problems)


def plan_and_methods(config: PreTrainedConfig) -> tuple[DepthPlan | None, list[dict[str, Any]] | None]:
    """Return the plan of a crosslayer model and its methods as JSON data, or None and None for a stock model."""
    if not isinstance(config, CrossLayerConfig):
        return None, None
    # through JSON: tuples become lists, as in a manifest that is read again
    return config.plan, json.loads(json.dumps(config.cross_layer))


@torch.no_grad()
def fingerprint(model: PreTrainedModel, ids: list[int] | None = None) -> Fingerprint:
    """Compute the fingerprint in float32; `ids` default to a fixed sequence."""
    size = model.config.get_text_config(decoder=True).vocab_size
    if ids is None:
        # a prime step, so that the ids differ in any vocabulary
        ids = [(7 + 7919 * i) % size for i in range(min(IDS, positions(model)))]
    if not all(0 <= i < size for i in ids):
        raise ValueError(f"the fingerprint's ids must be below {size}, the size of the vocabulary, got {max(ids)}")
    with evaluating(model), _in_float32(model):
        logits: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]  # (V)
    entries = [logits.shape[0] * i // LOGITS for i in range(LOGITS)]
    return Fingerprint(ids=ids, dtype="float32", logits=logits[entries].tolist(), std=logits.std().item())


@contextlib.contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Run a model in float32 inside the block; layers are cast one at a time, so only one needs extra memory."""
    layers = layer_stack(model)
    stored: dict[Tensor, Tensor] = {}

    def cast(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                stored[tensor], tensor.data = tensor.data, tensor.data.float()

    def before(layer: nn.Module, _: Any) -> None:
        cast([*layer.parameters(), *layer.buffers()])

    def after(layer: nn.Module, *_: Any) -> None:
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor in stored:
                tensor.data = stored.pop(tensor)

    inside = {*layers.parameters(), *layers.buffers()}
    hooks: list[RemovableHandle] = []
    try:
        cast(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in inside)
        for layer in layers:
            hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        # those outside the layers, and those of a layer that raised an error, so that `after` did not run
        for tensor, data in stored.items():
            tensor.data = data


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
