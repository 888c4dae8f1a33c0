"""`crosslayer serve`."""

import os
import shlex
import sys
from typing import Annotated

import typer

from crosslayer.cli.options import AllowMethods, Debug, importing
from crosslayer.output.progress import say


def command(
    model: Annotated[str, typer.Argument(help="Hub name, local folder, or smollm2 (embedded).")],
    flags: Annotated[list[str] | None, typer.Argument(help="Flags of `vllm serve`, behind --.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    kv_memory: Annotated[float | None, typer.Option(help="GiB for the KV cache; default as vLLM finds it.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest request.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, …; default vLLM's.")] = None,
    allow_methods: AllowMethods = None,
    debug: Debug = False,
) -> None:
    """Serve a model with vLLM over HTTP (OpenAI's interface), its cache as small as the method allows."""
    with importing():
        from crosslayer.methods import allowed_modules
        from crosslayer.serving.engine import (
            bounded_command,
            check_engine,
            check_flags,
            check_port,
            has_tokenizer,
            servable,
            serve_command,
        )
        from crosslayer.serving.plugin import ALLOWED
    check_engine()
    served = servable(model, kv_memory=kv_memory, length=max_length, dtype=dtype)
    check_flags(served, flags or [])
    if not has_tokenizer(served) and "--tokenizer" not in (flags or []):
        raise ValueError(f"{served.name} has no tokenizer, without which a server takes no text; save one beside it")
    check_port(host, port)
    words = serve_command(
        served, host=host, port=port, kv_memory=kv_memory, max_length=max_length, dtype=dtype, flags=flags or []
    )
    os.environ[ALLOWED] = ",".join(allowed_modules())
    say(f"python {shlex.join(words)}")
    os.execv(sys.executable, [sys.executable, *bounded_command(words, flags or [])])
