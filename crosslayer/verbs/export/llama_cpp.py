"""A GGUF file for llama.cpp, with its architecture "llama", or "deci" if layers differ.

In `deci` the numbers of heads are arrays over layers: with 0 heads a layer has no attention; with 0 key-value heads it
has "linear attention", whose only weight is applied to the normalized input and added: the linear compensation (W_c).
A layer without MLP would lose its attention too, and head sizes are read only if the first layer has heads: both are
refused.

llama.cpp rotates queries and keys in pairs of neighbors, transformers in halves, so their rows are permuted.

The tokenizer must be byte-level BPE with a pre-tokenizer that llama.cpp knows by name.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as TensorType
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.families import rotary
from crosslayer.verbs.export.layers import LAYER, RemainingLayer, remaining_layers, renumbered, rope

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
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {**GPT2, "use_regex": False}
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# A file names its pre-tokenizer and does not hold its rules. So all steps are compared: by the rules of another one, a
# model would read other tokens without any error.
# llama.cpp's name of a pre-tokenizer → its steps in tokenizer.json
KNOWN = {
    "gpt-2": [GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, GPT2],
    "llama-bpe": [rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}", BYTES],
    "qwen2": [rf"{LETTERS}|\p{{N}}|{REST}", BYTES],
}
WHOLE_WORDS = ("llama-bpe",)  # pre-tokenizers for which a word in the vocabulary is not merged


def write(
    model: PreTrainedModel, config: CrossLayerConfig, tokenizer: PreTrainedTokenizerBase | None, name: str, folder: Path
) -> None:
    """Write the file into a folder, matrices in the model's dtype and vectors in float32.

    `model` is a crosslayer model or has the same weight names; `refusal` must accept `config`, its crosslayer config.
    """
    assert config.head_dim is not None
    layers = remaining_layers(config)
    writer = gguf.GGUFWriter(folder / FILE, architecture(layers))
    try:
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[model.dtype])
        _add_shape(writer, config, layers)
        add_vocabulary(writer, tokenizer, config.vocab_size)
        for key, weight in renumbered(model.state_dict(), layers).items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            # llama.cpp rotates pairs of neighbors, transformers two halves: interleave the halves of each head's rows.
            if ".q_proj." in key or ".k_proj." in key:
                halves = weight.unflatten(0, (-1, 2, config.head_dim // 2))  # (heads, 2, D / 2, …)
                weight = halves.transpose(1, 2).flatten(0, 2)
            stored = TENSOR_TYPES[weight.dtype] if weight.dim() > 1 else TensorType.F32
            values = weight.detach().cpu().float().contiguous().numpy()
            data = values if stored == TensorType.F32 else gguf.quants.quantize(values, stored)
            module, _, parameter = key.rpartition(".")
            inner = LAYER.fullmatch(module)
            module = OUTER[module] if inner is None else f"blk.{inner[1]}.{INNER[inner[2]]}"
            writer.add_tensor(f"{module}.{parameter}", data, raw_dtype=stored)
        # llama.cpp does not compute this scaling: it divides each frequency by a stored number.
        if rope(config)["rope_type"] == "llama3":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
            plain = rope(config)["rope_theta"] ** -exponents  # (D / 2,)
            with torch.device("cpu"):
                table = rotary(config)
            assert table is not None
            divisors = (plain / table.inv_freq.double()).float()
            writer.add_tensor("rope_freqs.weight", divisors.numpy())
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


def bpe(tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> tuple[str, dict[str, Any]]:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer, and the tokenizer as plain data."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("gguf needs a tokenizer.json, and this model has none")
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model = data["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"gguf: the tokenizer is {model['type']}; only byte-level BPE can be written")

    # Steps of the pre-tokenizer are compared as they are, except for a split by a pattern, which counts as the pattern.
    before = data["pre_tokenizer"]
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps: list[Any] = []
    for step in [] if before is None else before["pretokenizers"] if before["type"] == "Sequence" else [before]:
        if {**step, "pattern": None} == {**split, "pattern": None}:
            steps.append(step["pattern"].get("Regex"))
        else:
            # `trim_offsets` does not change ids.
            steps.append({**step, "trim_offsets": True} if step["type"] == "ByteLevel" else step)
    name = next((name for name, known in KNOWN.items() if known == steps), None)
    # With `ignore_merges` a word in the vocabulary is taken whole. Both programs must do the same, or ids differ.
    if name is None or bool(model.get("ignore_merges")) != (name in WHOLE_WORDS):
        raise ValueError(f"gguf: the pre-tokenizer must be that of {', '.join(KNOWN)}, got a different one")
    largest = max([*model["vocab"].values(), *(token["id"] for token in data["added_tokens"])])
    if largest >= vocabulary:
        raise ValueError(f"gguf: token ids must be below {vocabulary}, the model's vocabulary size, got {largest}")
    return name, data


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
    """Write tokens, their types, merges, special tokens and the chat template.

    Ids up to `vocabulary` that the tokenizer does not use become unused tokens.
    """
    name, data = bpe(tokenizer, vocabulary)
    tokens = [f"[PAD{index}]" for index in range(vocabulary)]
    types = [gguf.TokenType.UNUSED] * vocabulary
    for text, index in data["model"]["vocab"].items():
        tokens[index] = text
        types[index] = gguf.TokenType.NORMAL
    for token in data["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]])
    assert tokenizer is not None, "bpe() refuses None"
    # The post-processor decides whether these tokens are added, so a text is tokenized to find out.
    ids = tokenizer("a")["input_ids"]
    assert isinstance(ids, list)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
