"""Starts vLLM's server, which replaces this process."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from crosslayer.core.methods import allowed_modules
from crosslayer.output.progress import say
from crosslayer.verbs.serve import engine
from crosslayer.verbs.serve.plugin import ALLOWED
from crosslayer.verbs.serve.prompts import store_flags

# A folder needs one of these files; without one, vLLM fails late, in a process of its own.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def serve(
    model: str,
    flags: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    kv_memory: float | None = None,
    max_length: int | None = None,
    dtype: str | None = None,
    prompt_store: str | None = None,
    codec: str | None = None,
    prompt_limit: str | None = None,
) -> NoReturn:
    """Serve a model with vLLM over an OpenAI-compatible HTTP API; layers that share a KV cache also share it in vLLM.

    Args:
        model: hub name, local folder, smollm2, qwen or gemma3.
        flags: flags of `vllm serve`, after --.
        host: address to listen on; 0.0.0.0 for all interfaces.
        port: port to listen on.
        kv_memory: GiB for the KV cache; default: chosen by vLLM.
        max_length: maximum tokens per request.
        dtype: float32, bfloat16, …; default: chosen by vLLM.
        prompt_store: folder or URL from which stored prompts are loaded instead of computed, and where new ones are
            saved; for unconverted models only. Needs `codec`.
        codec: folder of the model's codec, from fit-codec.
        prompt_limit: maximum size of the store, such as 20GiB; beyond it, the least recently used blocks are removed.

    Raises:
        ValueError: vLLM is missing or has an unsupported version, the model cannot be served, or an option is wrong.
    """
    passed = list(flags)
    engine.check_engine()
    served = engine.servable(model, kv_memory=kv_memory, length=max_length, dtype=dtype, flags=passed)
    folder = Path(served.source)  # a model of the hub is not checked
    has_tokenizer = not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZERS)
    if not has_tokenizer and "--tokenizer" not in passed:
        raise ValueError(f"{served.name} has no tokenizer; save one into its folder, or pass -- --tokenizer NAME")
    if prompt_store is not None and codec is not None:
        passed += store_flags(
            served.source, served.config, engine.flag_values(passed), prompt_store, codec, prompt_limit
        )
        # On a CPU, vLLM reserves one core more for a connector, or none at all if it has only two: with a store it
        # would then compute on other cores than without, in the scheduler's way.
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    elif (prompt_store, codec, prompt_limit) != (None, None, None):
        raise ValueError("`prompt_store` and `codec` must be given together, and `prompt_limit` with them")
    engine.check_port(host, port)
    command = engine.serve_command(
        served, host=host, port=port, kv_memory=kv_memory, max_length=max_length, dtype=dtype, flags=passed
    )
    # vLLM's processes import users' own methods again, and find their names in the environment.
    os.environ[ALLOWED] = ",".join(allowed_modules())
    say(f"python {shlex.join(command)}")
    warning = engine.memory_warning(kv_memory, passed)
    if warning is not None:
        say(warning)
    os.execv(sys.executable, [sys.executable, *engine.bounded_command(command, passed)])
