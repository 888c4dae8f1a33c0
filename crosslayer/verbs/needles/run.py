"""Asks a model, and a baseline, for needles in a haystack: the same samples, greedy answers, scores with intervals."""

import time
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from crosslayer.environment import quiet_transformers
from crosslayer.eviction.running import NewCache, evicting_if
from crosslayer.models.load import Ready
from crosslayer.models.pair import Named, pair
from crosslayer.output.progress import Meter, Silent, Steps
from crosslayer.probe.intercept import evaluating
from crosslayer.probe.tokens import positions
from crosslayer.verbs.needles.answers import answers
from crosslayer.verbs.needles.options import NeedleOptions
from crosslayer.verbs.needles.record import Difference, Question, Score, Side
from crosslayer.verbs.needles.result import Needles
from crosslayer.verbs.needles.sample import Sample, Samples, prompt_ids
from crosslayer.verbs.needles.score import difference, is_found, score


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
    options = NeedleOptions(
        lengths=lengths,  # type: ignore[arg-type]
        depths=depths,  # type: ignore[arg-type]
        keys=keys,
        samples=samples,
        new_tokens=new_tokens,
        batch=batch,
        evict=evict,
        seed=seed,
    )
    ready = pair("needles", model, baseline, tokenizer, dtype=dtype, device=device, meter=progress)
    for side in ready:
        _check(side, max(options.lengths))
    started = time.monotonic()
    questions = _questions(ready[0], options, progress)
    for side in ready:
        _check_ids(side, questions, options.new_tokens)
    batches = len(ready) * len(options.lengths) * _batches(options)
    sides: list[Side] = []
    with quiet_transformers(), progress("asking", batches) as meter:
        for side in ready:
            with evicting_if(side.model, None if sides else options.evict) as new_cache:
                done = len(sides) * batches // len(ready)
                sides.append(_ask(side, questions, options, new_cache, meter, done, batches))
    return Needles(
        settings=options,
        questions=tuple(_question(sample) for sample in questions),
        candidate=sides[0],
        baseline=sides[1] if len(sides) > 1 else None,
        differences=tuple(_differences(questions, sides, options)) if len(sides) > 1 else (),
        seconds=round(time.monotonic() - started, 1),
    )


def _check(side: Ready, longest: int) -> None:
    """Refuse a model that has too few positions."""
    if longest > positions(side.model):
        raise ValueError(f"length {longest} is above the {positions(side.model)} positions of {side.name}")


def _questions(side: Ready, options: NeedleOptions, progress: Meter) -> list[Sample]:
    """Return the samples in the order of lengths, depths and indices."""
    assert side.tokenizer is not None
    source, samples = Samples(side.tokenizer, options.keys, options.new_tokens, options.seed), []
    total = len(options.lengths) * len(options.depths) * options.samples
    with progress("hiding needles", total) as meter:
        for length in options.lengths:
            for depth in options.depths:
                for index in range(options.samples):
                    samples.append(source.sample(length, depth, index))
                    meter.step(len(samples), total)
    return samples


def _batches(options: NeedleOptions) -> int:
    return -(-len(options.depths) * options.samples // options.batch)


def _ask(
    side: Ready,
    questions: list[Sample],
    options: NeedleOptions,
    new_cache: NewCache | None,
    meter: Steps,
    done: int,
    total: int,
) -> Side:
    """Ask a model for all needles, length by length, and score what it says; `done` of `total` batches are behind."""
    model, tokenizer = side.model, side.tokenizer
    responses: list[str] = []
    assert tokenizer is not None
    with evaluating(model):
        for length in options.lengths:
            prompts = [prompt_ids(tokenizer, sample.prompt) for sample in questions if sample.length == length]
            settings = {"new_tokens": options.new_tokens, "batch": options.batch, "new_cache": new_cache}
            for texts in answers(model, tokenizer, prompts, **settings):
                responses += texts
                done += 1
                meter.step(done, total, f"{side.name}, {length} tokens")
    cells = [(length, depth) for length in options.lengths for depth in options.depths]
    return Side(
        name=side.name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        parameters=model.num_parameters(),
        answers=tuple(responses),
        cells=tuple(_score(questions, responses, length, depth) for length, depth in cells),
        by_length=tuple(_score(questions, responses, length, None) for length in options.lengths),
    )


def _check_ids(side: Ready, questions: list[Sample], new_tokens: int) -> None:
    """Refuse prompts that a model cannot read: a baseline may have another tokenizer than the candidate."""
    assert side.tokenizer is not None
    prompts = [prompt_ids(side.tokenizer, sample.prompt) for sample in questions]
    largest, longest = max(max(ids) for ids in prompts), max(len(ids) for ids in prompts) + new_tokens
    size = side.model.config.get_text_config().vocab_size
    if largest >= size:
        raise ValueError(f"token id {largest} is not in the vocabulary of {size} of {side.name}; use its own tokenizer")
    if longest > positions(side.model):
        raise ValueError(f"{longest} tokens by its own tokenizer are above the {positions(side.model)} of {side.name}")


def _score(questions: Sequence[Sample], responses: Sequence[str], length: int, depth: int | None) -> Score:
    """Score the answers of a length at a depth, or at all depths."""
    pairs = [pair for pair in zip(questions, responses, strict=True) if pair[0].length == length]
    if depth is not None:
        pairs = [pair for pair in pairs if pair[0].depth == depth]
    right = [is_found(response, sample.value) for sample, response in pairs]
    stray = [any(is_found(response, value) for value in sample.others) for sample, response in pairs]
    return score(length, depth, right, stray)


def _differences(questions: Sequence[Sample], sides: Sequence[Side], options: NeedleOptions) -> Iterator[Difference]:
    candidate, baseline = (
        [is_found(text, sample.value) for sample, text in zip(questions, side.answers, strict=True)] for side in sides
    )
    for length in options.lengths:
        places = [place for place, sample in enumerate(questions) if sample.length == length]
        yield difference(length, [candidate[place] for place in places], [baseline[place] for place in places])


def _question(sample: Sample) -> Question:
    return Question(
        length=sample.length,
        depth=sample.depth,
        index=sample.index,
        tokens=sample.tokens,
        key=sample.key,
        value=sample.value,
        others=sample.others,
    )
