"""Greedy answers of a model to prompts, batch by batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from crosslayer.cache.running import NewCache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.judge.hidden import is_retrieved


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    values: Sequence[str],
    *,
    new_tokens: int = 32,
    batch: int = 8,
    new_cache: NewCache | None = None,
) -> Iterator[list[str]]:
    """Yield the greedy answers of a model in evaluation mode to N prompts (token ids), in order, batch by batch.

    An answer ends as soon as it contains its value (N), which decides its score.
    Prompts of a batch are padded on the left; the answers do not depend on `batch`, up to rounding. Only the special
    tokens of the model's generation_config are used. `new_cache` makes the cache of each batch.
    """
    end = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padding = end if isinstance(end, int) else 0  # any token: it is masked
    settings = model.generation_config
    for start in range(0, len(prompts), batch):
        ids, mask = padded(prompts[start : start + batch], padding)  # (B, T) each
        retrieved = _Retrieved(tokenizer, values[start : start + batch], ids.shape[1])
        model.generation_config = GenerationConfig(  # otherwise generate uses defaults from the model's folder
            bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id, do_sample=False
        )
        try:
            sequences = model.generate(  # type: ignore[operator]
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                **{CACHE: None if new_cache is None else new_cache()},
                max_new_tokens=new_tokens,
                stopping_criteria=StoppingCriteriaList([retrieved]),
                pad_token_id=padding,
            )  # (B, T + N)
        finally:
            model.generation_config = settings
        yield [str(tokenizer.decode(row, skip_special_tokens=True)) for row in sequences[:, ids.shape[1] :]]


class _Retrieved(StoppingCriteria):
    """Whether the answers, from column `start`, contain the values that were asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, values: Sequence[str], start: int):
        self.tokenizer, self.values, self.start = tokenizer, values, start

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return whether each answer is complete, (B,)."""
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :], skip_special_tokens=True)
        found = [is_retrieved(str(text), value) for text, value in zip(texts, self.values, strict=True)]
        return torch.tensor(found, device=input_ids.device)


def padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask of prompts, (B, T) each, padded on the left, where the mask is 0."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
