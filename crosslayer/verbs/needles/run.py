"""Tests whether a model, and a baseline, retrieve needles from a haystack: same samples, greedy answers, intervals."""

import time
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

from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import quiet_transformers
from crosslayer.eviction.running import NewCache, SmallerCache
from crosslayer.models.pair import Loadable, Named, pair
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import evaluating
from crosslayer.verbs.needles.record import ModelAnswers, NeedlesSettings, Question, is_retrieved
from crosslayer.verbs.needles.result import Needles
from crosslayer.verbs.needles.sample import Sample, Samples, prompt_ids


def needles(
    model: Named,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    baseline: Named | None = None,
    lengths: Sequence[int] = (256, 512, 1024),
    depths: Sequence[int] = (0, 25, 50, 75, 100),
    keys: int = 4,
    samples: int = 20,
    new_tokens: int = 32,
    batch: int = 8,
    evict: str | None = None,
    kv_bits: str | None = None,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Needles:
    """Hide numbers in long texts and ask a model for one of them (RULER), by length and depth.

    The task is NIAH with one or several keys of RULER (arXiv 2404.06654). The text is from embedded novels; a sample
    is determined by seed, length, depth, number of keys and index.

    Args:
        model: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        tokenizer: in Python, tokenizer of a loaded model.
        baseline: a model to compare with, given like `model`. In Python a loaded one uses the tokenizer of `model`.
        lengths: tokens of prompt and answer together; at least 256.
        depths: position of the needle in percent of the text: 0 (beginning) to 100 (end).
        keys: needles in a text; one of them is asked for, the others are distractors.
        samples: samples per length and depth.
        new_tokens: maximum tokens of an answer.
        batch: batch size.
        evict: eviction policy of the candidate's KV cache, such as h2o:0.4; the baseline keeps all tokens.
        kv_bits: bits of the candidate's KV cache: 8, 4, 3, 2, fp8, or by layer, such as 8@0-11,4@12-29.
        seed: seed of all random choices.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python only for models given by name or path.
        device: cpu, cuda, …; default the GPU if there is one. In Python only for models given by name or path.

    Raises:
        ValueError: an option is wrong, a model cannot be loaded, is not a causal language model or has fewer positions
            than a length, there is no tokenizer, or a length is too short for the needles.

    """
    settings = NeedlesSettings(
        lengths=lengths,  # type: ignore[arg-type]
        depths=depths,  # type: ignore[arg-type]
        keys=keys,
        samples=samples,
        new_tokens=new_tokens,
        batch=batch,
        evict=evict,
        kv_bits=kv_bits,
        seed=seed,
    )
    sources = pair("needles", model, baseline, tokenizer, dtype=dtype, device=device)
    longest = max(settings.lengths)
    for source in sources:
        if longest > source.positions:
            raise ValueError(f"length {longest} exceeds the {source.positions} positions of {source.name}")
    drawn = _samples(sources[0].tokenizer, settings)
    prompts = [_prompts(source, drawn, new_tokens) for source in sources]
    models, seconds = [], 0.0
    caches = SmallerCache(evict, settings.kv_bits), SmallerCache()  # the baseline has its own
    for source, ids, cache in zip(sources, prompts, caches, strict=False):
        model = source.load()
        started = time.monotonic()
        models.append(_ask(model, source, drawn, ids, settings, cache))
        seconds += time.monotonic() - started
        del model
    return Needles(
        settings=settings,
        questions=tuple(Question(**sample.model_dump(exclude={"text", "prefix"})) for sample in drawn),
        candidate=models[0],
        baseline=models[1] if baseline is not None else None,
        seconds=round(seconds, 1),
    )


def _samples(tokenizer: PreTrainedTokenizerBase, settings: NeedlesSettings) -> list[Sample]:
    generator, samples = Samples(tokenizer, settings.keys, settings.new_tokens, settings.seed), []
    total = len(settings.cells) * settings.samples
    with progress("hiding needles", total) as meter:
        for cell in settings.cells:
            for index in range(settings.samples):
                samples.append(generator.sample(*cell, index))
                meter.step(len(samples), total)
    return samples


def _prompts(source: Loadable, samples: Sequence[Sample], new_tokens: int) -> list[list[int]]:
    """Return the prompts as ids of a model's own tokenizer, which may differ between candidate and baseline."""
    prompts = [prompt_ids(source.tokenizer, sample.prompt) for sample in samples]
    largest, longest = max(map(max, prompts)), max(map(len, prompts)) + new_tokens
    size = source.config.get_text_config().vocab_size
    if largest >= size:
        raise ValueError(
            f"token id {largest} is not in the vocabulary of {source.name} ({size} tokens); use its own tokenizer"
        )
    if longest > source.positions:
        raise ValueError(
            f"prompt and answer take {longest} tokens of {source.name}'s tokenizer, above its {source.positions} "
            "positions; use shorter `lengths`"
        )
    return prompts


def _ask(
    model: PreTrainedModel,
    source: Loadable,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    settings: NeedlesSettings,
    cache: SmallerCache,
) -> ModelAnswers:
    """Ask a model all questions, length by length."""
    responses: list[str] = []
    options = {"new_tokens": settings.new_tokens, "batch": settings.batch}
    with (
        quiet_transformers(),
        evaluating(model),
        cache.running(model) as new_cache,
        progress(f"asking {source.name}", len(samples)) as meter,
    ):
        for length in settings.lengths:
            of_length = [pair for pair in zip(prompts, samples, strict=True) if pair[1].length == length]
            ids, values = [ids for ids, _ in of_length], [sample.value for _, sample in of_length]
            for texts in answers(model, source.tokenizer, ids, values, **options, new_cache=new_cache):
                responses += texts
                meter.step(len(responses), len(samples), f"{length} tokens")
    return ModelAnswers(**source.facts(model, cache.named), answers=tuple(responses))


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
