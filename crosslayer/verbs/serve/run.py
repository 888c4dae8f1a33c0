"""Starts vLLM's server, which replaces this process."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from crosslayer.core.methods import allowed_modules
from crosslayer.output.progress import say
from crosslayer.verbs.serve import engine
from crosslayer.verbs.serve.plugin import ALLOWED


def serve(
    model: str,
    flags: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    kv_memory: float | None = None,
    max_length: int | None = None,
    dtype: str | None = None,
) -> NoReturn:
    """Serve a model with vLLM over an OpenAI-compatible HTTP API; layers that share a KV cache share it there too.

    Args:
        model: hub name, local folder, or smollm2 (embedded).
        flags: flags of `vllm serve`, after --.
        host: address to listen on; 0.0.0.0 for all interfaces.
        port: port to listen on.
        kv_memory: GiB for the KV cache; default chosen by vLLM.
        max_length: maximum tokens of a request.
        dtype: float32, bfloat16, …; default chosen by vLLM.

    Raises:
        ValueError: vLLM is missing or has an unsupported version, the model cannot be served, or an option is wrong.

    """
    passed = list(flags)
    engine.check_engine()
    served = engine.servable(model, kv_memory=kv_memory, length=max_length, dtype=dtype, flags=passed)
    engine.check_flags(served, passed)
    if not engine.has_tokenizer(served) and "--tokenizer" not in passed:
        raise ValueError(f"{served.name} has no tokenizer; save one into its folder, or pass -- --tokenizer NAME")
    engine.check_port(host, port)
    command = engine.serve_command(
        served, host=host, port=port, kv_memory=kv_memory, max_length=max_length, dtype=dtype, flags=passed
    )
    os.environ[ALLOWED] = ",".join(allowed_modules())
    say(f"python {shlex.join(command)}")
    os.execv(sys.executable, [sys.executable, *engine.bounded_command(command, passed)])
