"""The attention implementations of training runs, which avoid a dense mask over packed rows.

`sdpa` computes one document at a time (decoder/packed.py), and `flash` is FlashAttention-2, which receives the document
boundaries. A method that changes the mask (cross-attention, chosen tokens) needs a dense one, and capped scores need
eager attention.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, TrainingArguments
from transformers.utils.import_utils import is_flash_attn_2_available

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.packed import attend_within_documents, document_mask
from crosslayer.core.method import Mixing
from crosslayer.core.transformers_versions import attention_that_caps
from crosslayer.wiring.fields import layer_types_of

Attention = Literal["sdpa", "flash"]
WITHIN_DOCUMENTS, FLASH = "sdpa_within_documents", "flash_attention_2"
NAMES = {"sdpa": WITHIN_DOCUMENTS, "flash": FLASH}  # transformers' names
# layer types with a state that is carried from token to token, so also from a document to the next one in a row
STATES = {"linear_attention", "conv", "mamba", "hybrid"}

AttentionInterface.register(WITHIN_DOCUMENTS, attend_within_documents)
AttentionMaskInterface.register(WITHIN_DOCUMENTS, document_mask)


def check_attention(implementation: Attention | None, device: torch.device) -> None:
    """Refuse attention that cannot train on a device."""
    if implementation == "flash" and (device.type == "cpu" or not is_flash_attn_2_available()):
        raise ValueError("model.attention: flash needs a GPU and the package flash-attn; use sdpa")


def set_attention(model: PreTrainedModel, implementation: Attention | None, arguments: TrainingArguments) -> None:
    """Make a model attend within documents, by an implementation; None: SDPA per document if possible."""
    check_attention(implementation, arguments.device)
    config: Any = model.config.get_text_config()
    if not isinstance(config, CrossLayerConfig) and (model._is_stateful or STATES & set(layer_types_of(config))):
        raise ValueError(
            "model.start: must have softmax attention in all layers; the states of linear attention, convolutions and "
            "Mamba would cross document boundaries"
        )
    if arguments.torch_compile and isinstance(config, CrossLayerConfig) and config.linear_layers:
        raise ValueError("train.torch_compile: compiled linear attention would cross document boundaries; remove it")

    caps = attention_that_caps(config, "sdpa") != "sdpa"
    dense = any(isinstance(module, Mixing) and module.needs_mask for module in model.modules())
    if implementation == "sdpa" and caps:
        raise ValueError("model.attention: sdpa cannot cap scores as this model does; use null")
    if implementation == "flash" and dense:
        raise ValueError("model.attention: flash cannot apply the mask that the method changes; use sdpa")
    if implementation == "flash" and not (arguments.bf16 or arguments.fp16):
        raise ValueError("model.attention: flash computes in half precision; set train.bf16: true")

    if implementation is None and config._attn_implementation == "sdpa":
        # what `document_mask` makes is no tensor, and must reach the attention unchanged, as the masks of flex do
        passes_masks_on = isinstance(config, CrossLayerConfig) or model._supports_flex_attn
        implementation = "sdpa" if passes_masks_on else None
    if implementation is not None and not (implementation == "sdpa" and dense):
        model.set_attn_implementation(NAMES[implementation])


@contextlib.contextmanager
def readable_masks(model: PreTrainedModel) -> Iterator[None]:
    """Make a model use explicit attention masks inside the block, so that attention can be measured."""
    config: Any = model.config.get_text_config()
    implementation = config._attn_implementation
    if implementation in NAMES.values():
        model.set_attn_implementation(attention_that_caps(config, "sdpa") or "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
