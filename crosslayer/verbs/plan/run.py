"""Which layers of a model share keys, values or attention, and how large its cache is, from its config alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from crosslayer.core.methods import Entry
from crosslayer.verbs.plan.result import Plan
from crosslayer.wiring.engines import parse_bytes
from crosslayer.wiring.read import model_plan, share
from crosslayer.wiring.source import read_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Any  # importing modeling code would take longer than the whole plan


def plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    *,
    length: Sequence[int] | int = (4096,),
    batch: int = 1,
    dtype: str | torch.dtype | None = None,
    kv_dtype: str | None = None,
    engine: str | None = None,
    memory: str | None = None,
    like: str | None = None,
    method: Sequence[Entry] | None = None,
) -> Plan:
    """Show the size of a model's KV cache, which layers share keys and values, the masks and the residual stream.

    Only the config is read or downloaded.

    Args:
        model: hub name, local folder, config.json, .gguf file, - for a config on standard input, smollm2, qwen, gemma3
            or minilm. In Python also a model or a config.
        length: tokens in the KV cache; several values give a table.
        batch: number of sequences.
        dtype: dtype of the model; default: from the config, else bfloat16.
        kv_dtype: type of keys and values: a dtype; fp8, int8, int4, int3 or int2 (as `kv_bits` of other commands);
            q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl (llama.cpp); default: that of the model.
        engine: count the allocation of transformers, vllm or llama.cpp; default: llama.cpp for a .gguf file, else
            transformers.
        memory: size such as 24GiB; shows how many tokens fit next to the weights (counted from the config if no file).
        like: read a config.json of unknown model type as this type of transformers.
        method: cross-layer method to apply, by name (with typical options) or as JSON, {"name": NAME, OPTION: VALUE};
            several are compared.

    Raises:
        ValueError: the model does not exist, or its config describes no attention layers or something unsupported.
    """
    limit = None if memory is None else parse_bytes(memory, "`memory`")
    named = isinstance(model, str | Path)
    if like is not None and not named:
        raise ValueError(f"--like must come with a config.json, got a {type(model).__name__}; leave it out")
    source = read_source(str(model), like) if named else model
    read = model_plan(source, length, dtype, kv_dtype=kv_dtype, batch=batch, engine=engine, memory=limit)
    result = Plan(**vars(read))
    if not method:
        return result
    return replace(result, shared=share(read, [method] if isinstance(method, str | Mapping | type) else method))
