"""Tests whether a model, and a baseline, retrieve needles from a haystack: same samples, greedy answers, intervals."""

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from crosslayer.cache.running import CacheOptions
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.hidden import RULER, Question, Sample, prompt_ids
from crosslayer.judge.judge import Judge
from crosslayer.judge.report import JudgedModel
from crosslayer.judge.retrieval import found_in, hidden_samples
from crosslayer.judge.rows import retrieval_rows
from crosslayer.models.pair import Loadable, Named, pair
from crosslayer.verbs.needles.result import Needles, NeedlesSettings


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

    The task is RULER's NIAH, single- or multi-key (arXiv 2404.06654). The text comes from embedded novels; seed,
    length, depth, number of keys and index determine a sample.

    Args:
        model: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        tokenizer: in Python, tokenizer of a loaded model.
        baseline: a model to compare with, given like `model`. In Python a loaded one uses the tokenizer of `model`.
        lengths: tokens of prompt and answer together; at least 256.
        depths: position of the needle in percent of the text: 0 (beginning) to 100 (end).
        keys: needles per text: the model is asked for one; the others are distractors.
        samples: samples per length and depth.
        new_tokens: maximum tokens per answer.
        batch: batch size.
        evict: eviction policy of the candidate's KV cache, such as h2o:0.4; the baseline keeps all tokens.
        kv_bits: bits of the candidate's KV cache: 8, 4, 3, 2, fp8, or by layer, such as 8@0-11,4@12-29.
        seed: seed of all random choices.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only for models given by name or path.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only for models given by name or path.

    Raises:
        ValueError: an option is wrong, a model cannot be loaded, is not a causal language model or has fewer positions
            than a length, there is no tokenizer, or a length is too short for the needles.
    """
    settings = NeedlesSettings.of(
        lengths=lengths,
        depths=depths,
        keys=keys,
        samples=samples,
        new_tokens=new_tokens,
        batch=batch,
        evict=evict,
        kv_bits=kv_bits,
        seed=seed,
    )
    sources = pair("needles", model, baseline, tokenizer, dtype=dtype, device=device)
    # All is drawn and checked before a model is loaded.
    longest = max(settings.lengths)
    for source in sources:
        if longest > source.positions:
            raise ValueError(f"length {longest} exceeds the {source.positions} positions of {source.name}")
    drawn = hidden_samples(
        sources[0].tokenizer,
        settings.lengths,
        samples,
        seed,
        depths=settings.depths,
        keys=keys,
        new_tokens=new_tokens,
        phrasings=(RULER,),
    )
    for source in sources:
        check_prompts(source, drawn, new_tokens)
    answered: list[tuple[str, ...]] = []
    described: list[JudgedModel] = []
    seconds = 0.0
    # The baseline keeps its own cache.
    caches = CacheOptions(evict, settings.kv_bits), CacheOptions()
    for source, cache in zip(sources, caches, strict=False):
        # A judge for each, since the baseline may be loaded only when the candidate is gone.
        judge = Judge(source.load(), tokenizer=source.tokenizer, catches=False)
        candidate = Candidate(cache.named(source.name), around=cache.running)
        started = time.monotonic()
        answered.append(tuple(judge.answers(candidate, drawn, new_tokens, batch) or ()))
        seconds += time.monotonic() - started
        described.append(judge.described(candidate))
        del judge
    found = [found_in(answers, drawn) for answers in answered]
    return Needles(
        original=described[1] if baseline is not None else None,
        candidates=(described[0],),
        rows=tuple(retrieval_rows(described[0].name, drawn, *found)),
        settings=settings,
        questions=tuple(Question(**sample.model_dump(exclude={"text", "prefix"})) for sample in drawn),
        answers=tuple(answered),
        seconds=round(seconds, 1),
    )


def check_prompts(source: Loadable, samples: Sequence[Sample], new_tokens: int) -> None:
    """Refuse texts whose tokens, by a model's own tokenizer, it does not know or has too few positions for."""
    # Samples fit the candidate's tokenizer; the same texts may have more tokens by the baseline's.
    prompts = [prompt_ids(source.tokenizer, sample.prompt) for sample in samples]
    largest = max(map(max, prompts))
    longest = max(map(len, prompts)) + new_tokens
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
