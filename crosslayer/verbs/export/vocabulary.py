"""The tokenizer of a GGUF file: byte-level BPE with a pre-tokenizer that llama.cpp knows by name."""

import json
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {**GPT2, "use_regex": False}
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's name of a pre-tokenizer → its steps in tokenizer.json
KNOWN = {
    "gpt-2": [GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, GPT2],
    "llama-bpe": [rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}", BYTES],
    "qwen2": [rf"{LETTERS}|\p{{N}}|{REST}", BYTES],
}
WHOLE_WORDS = ("llama-bpe",)  # pre-tokenizers for which a word in the vocabulary is not merged


def bpe(tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> tuple[str, dict[str, Any]]:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer, and the tokenizer as plain data."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("gguf needs a tokenizer.json, and this model has none")
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model = data["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"gguf: the tokenizer is {model['type']}; only byte-level BPE can be written")
    name = next((name for name, steps in KNOWN.items() if _steps(data["pre_tokenizer"]) == steps), None)
    if name is None or bool(model.get("ignore_merges")) != (name in WHOLE_WORDS):
        raise ValueError(f"gguf: the pre-tokenizer must be that of {', '.join(KNOWN)}, got another")
    largest = max([*model["vocab"].values(), *(token["id"] for token in data["added_tokens"])])
    if largest >= vocabulary:
        raise ValueError(f"gguf: the tokenizer has a token id {largest}, and the model a vocabulary of {vocabulary}")
    return name, data


def add_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
    """Write tokens, their types, merges, special tokens and the chat template.

    Ids up to `vocabulary` that the tokenizer does not use become unused tokens.
    """
    name, data = bpe(tokenizer, vocabulary)
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    types = [TokenType.UNUSED] * vocabulary
    for text, number in data["model"]["vocab"].items():
        tokens[number], types[number] = text, TokenType.NORMAL
    for token in data["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]])
    assert tokenizer is not None, "bpe() refuses None"
    ids = tokenizer("a")["input_ids"]
    assert isinstance(ids, list)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    add = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, write in add.items():
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            write(number)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _steps(pre: dict[str, Any] | None) -> list[Any]:
    """Return the steps of a pre-tokenizer; for a split into the matches of a pattern, only the pattern."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = []
    for step in [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]:
        if {**step, "pattern": None} == {**split, "pattern": None}:
            steps.append(step["pattern"].get("Regex"))
        else:
            steps.append({**step, "trim_offsets": True} if step["type"] == "ByteLevel" else step)  # changes no id
    return steps
