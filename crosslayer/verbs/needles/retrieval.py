"""A short needle test for reports: which of forty hidden numbers a model retrieves."""

import contextlib
import math
from collections.abc import Sequence

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.output.progress import progress
from crosslayer.output.record import Frozen
from crosslayer.probe.tokens import positions
from crosslayer.stats.shares import in_points
from crosslayer.verbs.needles.record import difference, is_retrieved
from crosslayer.verbs.needles.run import needles

LENGTHS = (256, 512, 1024, 2048)
QUICK_LENGTHS = (512,)
LONG_LENGTHS = (512, 1024, 2048, 4096, 8192)  # for what depends on the length: chosen tokens
LONG = 1024  # tokens of a prompt
SAMPLES = 2  # at each of five depths


class Retrieval(Frozen):
    """The results at one length."""

    length: int = Field(description="tokens of text, question and answer")
    found: tuple[bool, ...] = Field(description="whether the model retrieves the hidden number, by depth from 0%")


def prompt_tokens(lengths: Sequence[int]) -> int:
    """Return the tokens of all prompts."""
    return 5 * SAMPLES * sum(lengths)


def measure_retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int = 0,
    kv_bits: str | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[Retrieval, ...]:
    """Ask a model for ten numbers at each of some lengths, as `needles` with a single key does.

    Lengths that exceed the model's positions, or that the question alone fills, are left out; without a tokenizer the
    result is empty.
    """
    if tokenizer is None or not model.can_generate():
        return ()
    lengths = [length for length in lengths or LENGTHS if length <= positions(model)]
    options = {"keys": 1, "samples": SAMPLES, "seed": seed, "kv_bits": kv_bits}
    one_by_one = LONG if model.device.type == "cpu" else math.inf  # without padding CPUs need half the time for those
    results = []
    with progress("asking for hidden numbers", len(lengths)) as bar:
        for done, length in enumerate(lengths, 1):
            with contextlib.suppress(ValueError):  # the text is too short, or has tokens that the model does not know
                result = needles(model, tokenizer, lengths=[length], batch=1 if length > one_by_one else 8, **options)
                pairs = zip(result.questions, result.candidate.answers, strict=True)
                retrieved = tuple(is_retrieved(answer, question.value) for question, answer in pairs)
                results.append(Retrieval(length=length, found=retrieved))
            bar.step(done, len(lengths))
    return tuple(results)


def retrieval_sentence(model: Sequence[Retrieval], original: Sequence[Retrieval]) -> str:
    """Return how many numbers a model retrieves, compared with its original."""
    ours, theirs = ([right for result in results for right in result.found] for results in (model, original))
    change = difference(0, ours, theirs).change  # paired, over all lengths
    counts = ", ".join(str(sum(result.found)) for result in model)
    lengths = ", ".join(f"{result.length:,}" for result in model)
    return (
        f"It retrieves {count_retrieved(model)} of {change.n} numbers hidden in long texts ({counts} of "
        f"{len(model[0].found)} at {lengths} tokens), the original {count_retrieved(original)}: "
        f"{in_points(change).text(0, signed=True)} points, paired."
    )


def count_retrieved(results: Sequence[Retrieval]) -> int:
    """Return how many numbers were retrieved, over all lengths."""
    return sum(sum(result.found) for result in results)
