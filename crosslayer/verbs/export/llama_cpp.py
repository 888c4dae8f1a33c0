"""A GGUF file for llama.cpp, with its architecture "llama", or "deci" if layers differ.

In `deci` the numbers of heads are arrays over layers: with 0 heads a layer has no attention; with 0 key-value heads it
has "linear attention", whose only weight is applied to the normalized input and added: the linear compensation (W_c).
A layer without MLP would lose its attention too, and head sizes are read only if the first layer has heads: both are
refused.

llama.cpp rotates queries and keys in pairs of neighbors, transformers in halves, so their rows are permuted.
"""

from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType as TensorType
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.families import rotary
from crosslayer.verbs.export.layers import LAYER, RemainingLayer, remaining_layers, renumbered, rope
from crosslayer.verbs.export.vocabulary import add_vocabulary

FILE = "model.gguf"
TENSOR_TYPES = {torch.float32: TensorType.F32, torch.float16: TensorType.F16, torch.bfloat16: TensorType.BF16}
FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "attn_compensation": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(
    model: PreTrainedModel, config: CrossLayerConfig, tokenizer: PreTrainedTokenizerBase | None, name: str, folder: Path
) -> None:
    """Write the file into a folder, matrices in the model's dtype and vectors in float32.

    `model` is a crosslayer model or has the same weight names; `config`, its crosslayer config, must pass `no_gguf`.
    """
    layers = remaining_layers(config)
    writer = gguf.GGUFWriter(folder / FILE, architecture(layers))
    try:
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[model.dtype])
        _add_shape(writer, config, layers)
        add_vocabulary(writer, tokenizer, config.vocab_size)
        for key, weight in renumbered(model.state_dict(), layers).items():
            if key != "lm_head.weight" or not config.tie_word_embeddings:
                weight = _permuted(key, weight, config)
                stored = TENSOR_TYPES[weight.dtype] if weight.dim() > 1 else TensorType.F32
                values = weight.detach().cpu().float().contiguous().numpy()
                data = values if stored == TensorType.F32 else gguf.quants.quantize(values, stored)
                writer.add_tensor(_tensor_name(key), data, raw_dtype=stored)
        if rope(config)["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", _slowed(config).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def architecture(layers: list[RemainingLayer]) -> str:
    """Return llama.cpp's name of the architecture."""
    return "llama" if all(layer.whole for layer in layers) else "deci"


def _add_shape(writer: gguf.GGUFWriter, config: CrossLayerConfig, layers: list[RemainingLayer]) -> None:
    heads, pairs, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    parameters = rope(config)
    assert pairs is not None and size is not None
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(layers))
    if architecture(layers) == "llama":
        writer.add_head_count(heads)
        writer.add_head_count_kv(pairs)
        writer.add_feed_forward_length(config.intermediate_size)
    else:
        writer.add_head_count([0 if layer.attention is None else heads for layer in layers])
        writer.add_head_count_kv([pairs if layer.attention == "own" else 0 for layer in layers])
        writer.add_feed_forward_length([config.intermediate_size] * len(layers))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(parameters["rope_theta"])
    if parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])


def _tensor_name(key: str) -> str:
    module, _, parameter = key.rpartition(".")
    match = LAYER.fullmatch(module)
    return f"{OUTER[module]}.{parameter}" if match is None else f"blk.{match[1]}.{INNER[match[2]]}.{parameter}"


def _permuted(key: str, weight: Tensor, config: CrossLayerConfig) -> Tensor:
    """Return a weight (D, …); for queries and keys, with the two halves of each head's rows interleaved."""
    if ".q_proj." not in key and ".k_proj." not in key:
        return weight
    assert config.head_dim is not None
    halves = weight.unflatten(0, (-1, 2, config.head_dim // 2))  # (heads, 2, D / 2, …)
    return halves.transpose(1, 2).flatten(0, 2)


def _slowed(config: CrossLayerConfig) -> Tensor:
    """Return the divisor of each rotary frequency, (D / 2,), in float32."""
    assert config.head_dim is not None
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = rope(config)["rope_theta"] ** -exponents
    with torch.device("cpu"):
        table = rotary(config)
    assert table is not None
    return (plain / table.inv_freq.double()).float()
