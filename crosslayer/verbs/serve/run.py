"""A server: vLLM's, whose process takes the place of this one."""

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
    """Serve a model with vLLM over HTTP (OpenAI's interface), its cache as small as the method allows.

    Args:
        model: hub name, local folder, or smollm2 (embedded).
        flags: of `vllm serve`, behind --.
        host: address to listen at; 0.0.0.0 for every one.
        port: port to listen at.
        kv_memory: GiB for the KV cache; default as vLLM finds it.
        max_length: tokens of the longest request.
        dtype: float32, bfloat16, …; default vLLM's.

    Raises:
        ValueError: vLLM is missing or another version, the model cannot be served, or an option is wrong.

    """
    words = list(flags)
    engine.check_engine()
    served = engine.servable(model, kv_memory=kv_memory, length=max_length, dtype=dtype)
    engine.check_flags(served, words)
    if not engine.has_tokenizer(served) and "--tokenizer" not in words:
        raise ValueError(f"{served.name} has no tokenizer, without which a server takes no text; save one beside it")
    engine.check_port(host, port)
    command = engine.serve_command(
        served, host=host, port=port, kv_memory=kv_memory, max_length=max_length, dtype=dtype, flags=words
    )
    os.environ[ALLOWED] = ",".join(allowed_modules())
    say(f"python {shlex.join(command)}")
    os.execv(sys.executable, [sys.executable, *engine.bounded_command(command, words)])
