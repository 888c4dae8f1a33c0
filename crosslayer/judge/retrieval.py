"""Numbers hidden in long texts, in several phrasings: the answers of a model, and which numbers it retrieves."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from crosslayer.cache.running import NewCache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import quiet_transformers
from crosslayer.judge.hidden import PHRASINGS, Phrasing, Sample, Samples, is_retrieved, prompt_ids
from crosslayer.output.progress import progress
from crosslayer.probe.model import evaluating, positions

LENGTHS = (256, 512, 1024, 2048)
QUICK_LENGTHS = (512,)
# For models that choose tokens: the damage at the same share of tokens falls with the length.
LONG_LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTHS = (0, 25, 50, 75, 100)  # of a hidden number, percent
SAMPLES = 2  # at each depth of a length
# Of an answer. RULER's 128 would leave no room for text at a length of 256.
NEW_TOKENS = 32


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
    # Any token may pad, since it is masked.
    end = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padding = end if isinstance(end, int) else 0
    settings = model.generation_config
    for start in range(0, len(prompts), batch):
        ids, mask = padded(prompts[start : start + batch], padding)  # (B, T) each
        retrieved = _Retrieved(tokenizer, values[start : start + batch], ids.shape[1])
        # `generate` fills in from the model's folder what its call leaves out: penalties, beams, time limits.
        model.generation_config = GenerationConfig(
            bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id, do_sample=False
        )
        try:
            sequences = model.generate(  # type: ignore[operator]
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                # Trainers save configs with False, and then `generate` would read the whole text at every step.
                use_cache=True,
                **{CACHE: None if new_cache is None else new_cache()},
                max_new_tokens=new_tokens,
                logits_processor=LogitsProcessorList([_Finite()]),
                stopping_criteria=StoppingCriteriaList([retrieved]),
                pad_token_id=padding,
            )  # (B, T + N)
        finally:
            model.generation_config = settings
        yield [str(tokenizer.decode(row, skip_special_tokens=True)) for row in sequences[:, ids.shape[1] :]]


class _Finite(LogitsProcessor):
    """Refuses logits with NaN, from which `generate` would silently pick tokens: a wrong answer like any other."""

    def __call__(self, input_ids: Any, scores: Tensor) -> Any:
        """Return the logits (B, V) as they are."""
        if scores.isnan().any():
            raise ValueError("the logits are not finite; check the model's weights, which may hold NaN")
        return scores


@dataclass(frozen=True)
class _Retrieved(StoppingCriteria):
    """Whether the answers, from column `start`, contain the values that were asked for."""

    tokenizer: PreTrainedTokenizerBase
    values: Sequence[str]
    start: int

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return whether each answer is complete, (B,)."""
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :], skip_special_tokens=True)
        complete = [is_retrieved(str(text), value) for text, value in zip(texts, self.values, strict=True)]
        return torch.tensor(complete, device=input_ids.device)


def padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask of prompts, (B, T) each, padded on the left, where the mask is 0."""
    # On the left, since what is generated must follow the prompt's last token.
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")


def hidden_samples(
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    each: int = SAMPLES,
    seed: int = 0,
    *,
    depths: Sequence[int] = DEPTHS,
    keys: int = 1,
    new_tokens: int = NEW_TOKENS,
    phrasings: Sequence[Phrasing] = PHRASINGS,
) -> list[Sample]:
    """Return samples with `keys` hidden numbers, `each` at every depth of a length; phrasings take turns.

    A model that was fitted on text in one phrasing may fail in another, so no length or depth has a single one.
    """
    makers = [Samples(tokenizer, keys, new_tokens, seed, phrasing) for phrasing in phrasings]
    drawn: list[Sample] = []
    total = len(lengths) * len(depths) * each
    with progress("hiding numbers", total) as bar:
        for length in lengths:
            for turn in range(len(depths) * each):
                depth, index = divmod(turn, each)
                # Another phrasing comes first at twice the length, so that no depth has the same one at all lengths.
                maker = makers[(turn + length.bit_length()) % len(makers)]
                drawn.append(maker.sample(length, depths[depth], index))
                bar.step(len(drawn), total)
    return drawn


def askable_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    lengths: Sequence[int] = LENGTHS,
    seed: int = 0,
) -> list[Sample]:
    """Return samples that a model can be asked, ten at each length.

    Lengths that exceed the model's positions, or that the question alone fills, are left out. The result is empty
    without a tokenizer, and if the tokenizer has tokens that the model does not know.
    """
    if tokenizer is None or not model.can_generate():
        return []
    samples = []
    for length in lengths:
        if length > positions(model):
            continue
        # Raised where the question alone fills the length, as with a tokenizer of bytes.
        with suppress(ValueError):
            of_length = hidden_samples(tokenizer, [length], seed=seed)
            largest = max(max(prompt_ids(tokenizer, sample.prompt)) for sample in of_length)
            samples += of_length if largest < model.config.get_text_config().vocab_size else []
    return samples


def responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    new_cache: NewCache | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
    batch: int = 1,
    doing: str = "asking for hidden numbers",
) -> list[str]:
    """Return a model's greedy answers to samples, in order; a batch has samples of one length.

    Samples are asked one at a time by default: on a CPU padding costs more than a batch saves, and any cache takes one
    text. `new_cache` makes an empty cache for each batch.
    """
    # Ten prompts of 2,048 tokens take 60 s one by one and 99 s in padded batches of eight, whose explicit mask makes
    # attention compute every pair; at 1,024 tokens both take as long, and at 256 batches are faster.
    texts: list[str] = []
    options: dict[str, Any] = {"new_tokens": new_tokens, "batch": batch, "new_cache": new_cache}
    with progress(doing, len(samples)) as bar, quiet_transformers(), evaluating(model):
        for _, of_length in itertools.groupby(samples, key=lambda sample: sample.length):
            asked = list(of_length)
            prompts = [prompt_ids(tokenizer, sample.prompt) for sample in asked]
            for answered in answers(model, tokenizer, prompts, [sample.value for sample in asked], **options):
                texts += answered
                bar.step(len(texts), len(samples))
    return texts


def found_in(texts: Sequence[str], samples: Sequence[Sample]) -> list[bool]:
    """Return whether each answer has the number that its sample asks for."""
    return [is_retrieved(text, sample.value) for text, sample in zip(texts, samples, strict=True)]
