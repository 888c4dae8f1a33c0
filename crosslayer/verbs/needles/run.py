"""Asks a model, and a baseline, for needles in a haystack: the same samples, greedy answers, scores with intervals."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.environment import quiet_transformers
from crosslayer.eviction.running import NewCache, evicting_if
from crosslayer.models.pair import Loadable, Named, pair
from crosslayer.output.progress import Meter, Silent
from crosslayer.probe.intercept import evaluating
from crosslayer.verbs.needles.record import AskedModel, NeedlesSettings, Question
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
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Meter = Silent,
) -> Needles:
    """Hide numbers in long texts and ask for one of them (RULER), by length and depth, beside a baseline if wanted.

    The task is RULER's (arXiv 2404.06654), NIAH with one or several keys. The text is of embedded novels; a sample
    follows from seed, length, depth, number of keys and index alone.

    Args:
        model: hub name, local folder, or smollm2 (embedded). In Python also a loaded model.
        tokenizer: in Python, of a loaded model.
        baseline: a model that is asked the same, named in the same way. In Python a loaded one has the tokenizer of
            `model`.
        lengths: tokens of prompt and answer together; 256 at least.
        depths: where the needle stands: 0 (beginning) to 100 (end), in per cent of the other sentences.
        keys: needles in a text; one of them is asked for, the others distract.
        samples: samples of each length with each depth.
        new_tokens: tokens of an answer at most.
        batch: samples at once.
        evict: what the candidate's cache evicts, as h2o:0.4; the baseline's keeps all.
        seed: seed of all that is drawn at random.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python for models that are named.
        device: cpu, cuda, …; default the GPU, or the CPU where there is none. In Python for models that are named.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: an option is wrong, a model cannot be loaded, is no causal language model or has fewer positions
            than a length, there is no tokenizer, or a length has no room for the needles.

    """
    settings = NeedlesSettings(
        lengths=lengths,  # type: ignore[arg-type]
        depths=depths,  # type: ignore[arg-type]
        keys=keys,
        samples=samples,
        new_tokens=new_tokens,
        batch=batch,
        evict=evict,
        seed=seed,
    )
    sides = pair("needles", model, baseline, tokenizer, dtype=dtype, device=device)
    longest = max(settings.lengths)
    for side in sides:
        if longest > side.positions:
            raise ValueError(f"length {longest} is above the {side.positions} positions of {side.name}")
    asked = _samples(sides[0].tokenizer, settings, progress)
    prompts = [_prompts(side, asked, new_tokens) for side in sides]
    models, seconds = [], 0.0
    for side, ids, evicted in zip(sides, prompts, (evict, None), strict=False):  # the baseline keeps all
        model = side.load(progress)
        started = time.monotonic()
        models.append(_ask(model, side, asked, ids, settings, evicted, progress))
        seconds += time.monotonic() - started
        del model
    return Needles(
        settings=settings,
        questions=tuple(Question(**sample.model_dump(exclude={"text", "prefix"})) for sample in asked),
        candidate=models[0],
        baseline=models[1] if baseline is not None else None,
        seconds=round(seconds, 1),
    )


def _samples(tokenizer: PreTrainedTokenizerBase, settings: NeedlesSettings, progress: Meter) -> list[Sample]:
    source, samples = Samples(tokenizer, settings.keys, settings.new_tokens, settings.seed), []
    total = len(settings.cells) * settings.samples
    with progress("hiding needles", total) as meter:
        for cell in settings.cells:
            for index in range(settings.samples):
                samples.append(source.sample(*cell, index))
                meter.step(len(samples), total)
    return samples


def _prompts(side: Loadable, samples: Sequence[Sample], new_tokens: int) -> list[list[int]]:
    """Return the prompts by a model's own tokenizer; a baseline may have another one, whose ids it must know."""
    prompts = [prompt_ids(side.tokenizer, sample.prompt) for sample in samples]
    largest, longest = max(map(max, prompts)), max(map(len, prompts)) + new_tokens
    size = side.config.get_text_config().vocab_size
    if largest >= size:
        raise ValueError(f"token id {largest} is not in the vocabulary of {size} of {side.name}; use its own tokenizer")
    if longest > side.positions:
        raise ValueError(f"{longest} tokens by its own tokenizer are above the {side.positions} of {side.name}")
    return prompts


def _ask(
    model: PreTrainedModel,
    side: Loadable,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    settings: NeedlesSettings,
    evict: str | None,
    progress: Meter,
) -> AskedModel:
    """Ask a model for all needles, length by length."""
    responses: list[str] = []
    options = {"new_tokens": settings.new_tokens, "batch": settings.batch}
    with (
        quiet_transformers(),
        evaluating(model),
        evicting_if(model, evict) as new_cache,
        progress(f"asking {side.name}", len(samples)) as meter,
    ):
        for length in settings.lengths:
            of_length = [ids for ids, sample in zip(prompts, samples, strict=True) if sample.length == length]
            for texts in answers(model, side.tokenizer, of_length, **options, new_cache=new_cache):
                responses += texts
                meter.step(len(responses), len(samples), f"{length} tokens")
    return AskedModel(**side.facts(model), answers=tuple(responses))


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 32,
    batch: int = 8,
    new_cache: NewCache | None = None,
) -> Iterator[list[str]]:
    """Yield what a model in evaluation mode says to N prompts (token ids), batch by batch, greedily, in their order.

    Prompts of a batch are padded on the left; the answers are the same with any `batch`, up to rounding. The model's
    generation_config counts for nothing but special tokens. `new_cache` makes the cache of each batch.
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
