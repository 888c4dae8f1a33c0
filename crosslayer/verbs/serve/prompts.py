"""A store of prompts for vLLM: what is refused before vLLM starts, and the argument that makes it use the store."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from crosslayer.codec.codec import Codec, load_codec
from crosslayer.codec.fingerprint import model_print, weights_print
from crosslayer.codec.states import check_config
from crosslayer.codec.store import PromptStore
from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.models.load import auto_class, load_model
from crosslayer.verbs.serve.caches import CACHE_TYPES, TENSOR_PARALLEL

CONNECTOR, MODULE = "PromptStoreConnector", "crosslayer.verbs.serve.connector"
OTHER_WEIGHTS = "a codec belongs to the weights and RoPE that it was fitted to"
# vLLM flags: values that a store of prompts allows, and the reason for refusing others. With wrong states vLLM would
# write wrong text without any error.
ALONE = {
    TENSOR_PARALLEL: (("1",), "a codec reads all heads of a layer together"),
    "pipeline-parallel-size": (("1",), "a codec reads each layer after the one below"),
    "decode-context-parallel-size": (("1",), "a codec reads all tokens of a block together"),
    "kv-cache-dtype": (("auto", *CACHE_TYPES), "a codec stores caches of 16 or 32 bits"),
    "quantization": ((), OTHER_WEIGHTS),
    "hf-overrides": ((), OTHER_WEIGHTS),
    "speculative-config": ((), "a codec does not cover the layers of a draft model"),
}


def transfer_config(codec: Codec, folder: str | Path, url: str | Path, limit: str | int | None) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for a store at `url`, once the model's weights are known to be the codec's.

    `folder` holds the codec; `limit` is the size of the store, such as "20GiB".
    """
    # The path is absolute, since vLLM's processes may have another working folder. With `checked`, the scheduler does
    # not read all weights again.
    options = {"store": str(url), "codec": str(Path(folder).expanduser().absolute()), "checked": codec.model_print}
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # a damaged block is a miss, and its prompt is computed
        "kv_connector_extra_config": options if limit is None else {**options, "limit": limit},
    }


def store_flags(
    source: str, config: PreTrainedConfig, flags: Mapping[str, str], url: str, folder: str, limit: str | None
) -> list[str]:
    """Return the flags that make vLLM use a store of prompts; reads all weights of the model once.

    `source` is the model's folder or hub name; `flags` are vLLM's, by name without dashes; `folder` is the codec's.

    Raises:
        ValueError: the codec is of another model, or the model or a flag does not go with a store.
    """
    if "kv-transfer-config" in flags:
        raise ValueError("`prompt_store` sets --kv-transfer-config; remove one of the two")
    codec = load_codec(folder)
    PromptStore(url, codec, limit)  # so that a wrong URL or limit is an error before vLLM starts
    check_served(codec, config, flags)
    check_weights(codec, source, config)
    return ["--kv-transfer-config", json.dumps(transfer_config(codec, folder, url, limit))]


def check_served(codec: Codec, config: PreTrainedConfig, flags: Mapping[str, str]) -> None:
    """Refuse a model or flags of vLLM (by name without dashes) with which a store cannot be used."""
    if isinstance(config, CrossLayerConfig):
        raise ValueError("`prompt_store` needs a model that was not converted; remove `prompt_store` and `codec`")
    check_config(config)
    if all(shape.window is not None for shape in codec.shapes):
        raise ValueError("`prompt_store` needs a layer without a sliding window: vLLM discards tokens outside windows")
    for name, (allowed, reason) in ALONE.items():
        if name in flags and flags[name] not in allowed:
            raise ValueError(
                f"`prompt_store` cannot be used with --{name} {flags[name]}: {reason}; remove one of the two"
            )


def check_weights(codec: Codec, source: str, config: PreTrainedConfig) -> None:
    """Refuse a model, a folder or hub name, other than that which the codec was fitted to."""
    # Quantized weights are other weights than those that the codec was fitted to, so they are not even read.
    is_quantized = getattr(config.get_text_config(), "quantization_config", None)
    if is_quantized or served_print(source, config) != codec.model_print:
        raise ValueError("the codec was fitted to different weights or RoPE; fit one to this model with fit-codec")


def served_print(source: str, config: PreTrainedConfig) -> str:
    """Return the fingerprint of a model's weights, read from its folder one tensor at a time.

    A model of the hub, or whose files name tensors in another way than its class, is loaded whole in 16 bits.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    # The fingerprint covers the parameters of the class, and each tied weight once.
    names = sorted(name for name, _ in model.named_parameters())
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(Path(source).glob("*.safetensors"))]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118  not a mapping
        if set(names) <= set(file_of):
            return weights_print(config, ((name, file_of[name].get_tensor(name)) for name in names))
    return model_print(load_model(source, dtype="bfloat16", device="cpu")[0])
