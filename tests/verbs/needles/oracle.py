"""A model that looks the answer up in its prompt, and one of random weights."""

import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosslayer.judge.hidden import PHRASINGS
from tests.helpers.bytelevel import byte_level

TOKENIZER = byte_level()
SIZES = {
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.5,  # answers that depend on the prompt
}


def config():
    return LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def random_model(dtype=torch.float64):
    torch.manual_seed(0)
    return LlamaForCausalLM(config()).to(dtype).eval()


def pattern(sentence):
    """The sentence as a regular expression, with a group for the key and one for the value."""
    return re.escape(sentence).replace(r"\{key\}", r"([\w-]+)").replace(r"\{value\}", r"(\d+)")


class Oracle(LlamaForCausalLM):
    """Answers with the number that the prompt names for the key of its question, or with `stray`, another key's."""

    stray = False

    def answer(self, prompt):
        (phrasing,) = [one for one in PHRASINGS if one.introduction in prompt]
        asked = re.search(pattern(phrasing.question), prompt)[1]
        numbers = dict(re.findall(pattern(phrasing.needle), prompt))
        others = [number for key, number in numbers.items() if key != asked]
        return others[0] if self.stray else numbers[asked]

    def generate(self, ids, attention_mask, max_new_tokens, pad_token_id, **options):
        prompts = [TOKENIZER.decode(row[seen.bool()]) for row, seen in zip(ids, attention_mask, strict=True)]
        said = [TOKENIZER.encode(f" {self.answer(prompt)}.", add_special_tokens=False) for prompt in prompts]
        assert max(map(len, said)) <= max_new_tokens
        rows = [row + [pad_token_id] * (max_new_tokens - len(row)) for row in said]
        return torch.cat([ids, torch.tensor(rows)], dim=1)


def oracle(stray=False):
    model = Oracle(config())
    model.stray = stray
    return model
