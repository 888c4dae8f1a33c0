"""Answers of a model: greedy continuations of prompts, in batches that are padded on the left."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.eviction.running import NewCache


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 32,
    batch: int = 8,
    new_cache: NewCache | None = None,
) -> Iterator[list[str]]:
    """Yield what a model in evaluation mode says to N prompts, batch by batch, in their order.

    Args:
        model: a causal language model.
        tokenizer: its own; what it says is decoded without special tokens.
        prompts: token ids; those of a batch may differ in length.
        new_tokens: tokens that are generated at most.
        batch: prompts at once; the answers are the same with any number, up to rounding.
        new_cache: makes the cache of each batch; by default transformers makes it.

    """
    end = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padding = end if isinstance(end, int) else 0  # any token: it is masked
    for start in range(0, len(prompts), batch):
        ids, mask = padded(prompts[start : start + batch], padding)
        chosen = continued(model, ids.to(model.device), mask.to(model.device), new_tokens, padding, new_cache)
        yield [str(tokenizer.decode(row, skip_special_tokens=True)) for row in chosen]


def padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask, (B, T) each, of prompts, padded on the left, where the mask is 0."""
    longest = max(len(prompt) for prompt in prompts)
    rows = [[padding] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(seen)


def continued(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, new_tokens: int, padding: int, new_cache: NewCache | None = None
) -> Tensor:
    """Return the likeliest new tokens (B, N) after prompts (B, T), whatever the folder's generation_config says."""
    settings = model.generation_config
    model.generation_config = GenerationConfig(  # generate reads the folder's wherever it is not told otherwise
        bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id, do_sample=False
    )
    try:
        sequences = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            past_key_values=None if new_cache is None else new_cache(),
            max_new_tokens=new_tokens,
            pad_token_id=padding,
        )  # (B, T + N)
    finally:
        model.generation_config = settings
    return sequences[:, ids.shape[1] :]
