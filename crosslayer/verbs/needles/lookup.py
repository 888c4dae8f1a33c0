"""Which hidden numbers a model still finds: as few as tell a model that looks things up from one that cannot."""

import contextlib
from collections.abc import Sequence

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.output.formatting import signed
from crosslayer.output.progress import Meter, Silent
from crosslayer.output.record import Frozen
from crosslayer.probe.tokens import positions
from crosslayer.verbs.needles.record import difference, is_found
from crosslayer.verbs.needles.run import needles

LENGTHS = (256, 512, 1024, 2048)
SAMPLES = 2  # at each of five depths


class Lookup(Frozen):
    """What became of the questions of a length."""

    length: int = Field(description="tokens of a text with its question and answer")
    found: tuple[bool, ...] = Field(description="whether the model finds the only hidden number, by depth from 0 %")


def look_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, seed: int = 0, progress: Meter = Silent
) -> tuple[Lookup, ...]:
    """Ask a model for ten numbers at each of four lengths, as `needles` with a single key does.

    A length is left out where the model has fewer positions, or the tokenizer makes the question alone longer than
    that; without a tokenizer nothing is asked.
    """
    if tokenizer is None or not model.can_generate():
        return ()
    lengths = [length for length in LENGTHS if length <= positions(model)]
    lookups = []
    with progress("asking for hidden numbers", len(lengths)) as bar:
        for done, length in enumerate(lengths, 1):
            with contextlib.suppress(ValueError):  # no room, or tokens that the model does not know
                asked = needles(model, tokenizer, lengths=[length], keys=1, samples=SAMPLES, seed=seed)
                pairs = zip(asked.questions, asked.candidate.answers, strict=True)
                found = tuple(is_found(answer, question.value) for question, answer in pairs)
                lookups.append(Lookup(length=length, found=found))
            bar.step(done, len(lengths))
    return tuple(lookups)


def lookup_words(model: Sequence[Lookup], original: Sequence[Lookup]) -> str:
    """Say how many numbers a model finds beside its original."""
    ours, theirs = ([right for lookup in side for right in lookup.found] for side in (model, original))
    compared = difference(0, ours, theirs)  # paired, over all lengths
    counts = ", ".join(str(sum(lookup.found)) for lookup in model)
    lengths = ", ".join(f"{lookup.length:,}" for lookup in model)
    low, high = (signed(100 * end, 0) for end in compared.interval)
    return (
        f"Of {compared.n} numbers hidden in long texts it finds {count_found(model)} ({counts} of "
        f"{len(model[0].found)} at {lengths} tokens), the original {count_found(original)}: "
        f"{low} to {high} points, paired."
    )


def count_found(lookups: Sequence[Lookup]) -> int:
    """Return how many numbers were found, over all lengths."""
    return sum(sum(lookup.found) for lookup in lookups)
