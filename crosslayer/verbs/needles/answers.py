"""Answers of a model: greedy continuations of prompts, in batches that are padded on the left."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
        model: a causal language model; its generation_config counts for nothing but special tokens.
        tokenizer: its own; what it says is decoded without special tokens.
        prompts: token ids; those of a batch may differ in length.
        new_tokens: tokens that are generated at most.
        batch: prompts at once; the answers are the same with any number, up to rounding.
        new_cache: makes the cache of each batch; by default transformers makes it.

    """
    end = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padding = end if isinstance(end, int) else 0  # any token: it is masked
    settings = model.generation_config
    for start in range(0, len(prompts), batch):
        ids, mask = padded(prompts[start : start + batch], padding)  # (B, T) each
        model.generation_config = GenerationConfig(  # generate reads the folder's wherever it is not told otherwise
            bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id, do_sample=False
        )
        try:
            sequences = model.generate(  # type: ignore[operator]
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                past_key_values=None if new_cache is None else new_cache(),
                max_new_tokens=new_tokens,
                pad_token_id=padding,
            )  # (B, T + N)
        finally:
            model.generation_config = settings
        yield [str(tokenizer.decode(row, skip_special_tokens=True)) for row in sequences[:, ids.shape[1] :]]


def padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask, (B, T) each, of prompts, padded on the left, where the mask is 0."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
