"""Texts with hidden numbers: a haystack of whole sentences with needles in it, of a given length in tokens, by seed.

One of K needles is asked for. It is inserted before sentence number ⌊depth / 100 · N⌋ of the N others, including
distractors: 0 is the very beginning, 100 the very end. Distractors are inserted at random. A sample is determined by
seed, length, depth, number of keys and index, independently of all other samples. Source: RULER, arXiv 2404.06654, also
of the sentences, of keys made of an adjective and a noun, and of 7-digit values. Its own haystack is cut at words, and
its depths are random.

An answer is scored by RULER's `string_match` of the one value that is expected: whether the output contains it.
"""

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.domains import embedded_domains
from crosslayer.corpus.windows import special_tokens, token_ids
from crosslayer.output.record import Frozen

# Consecutive sentences that may be too long for the remaining tokens before the search ends. With 50, samples lack
# fewer than 1.5 tokens on average.
AHEAD = 50


class Phrasing(NamedTuple):
    """The sentences of a sample; `needle`, `question` and `prefix` have the key in them, `needle` the value too."""

    needle: str
    introduction: str
    question: str
    prefix: str


RULER = Phrasing(
    needle="One of the special magic numbers for {key} is: {value}.",
    introduction=(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards."
    ),
    question="What is the special magic number for {key} mentioned in the provided text?",
    prefix="The special magic number for {key} mentioned in the provided text is",
)
# A model that retrieves in one phrasing may fail in another, as one that was fitted on text in a single phrasing.
PHRASINGS = (
    RULER,
    Phrasing(
        needle="The access code of the {key} is {value}.",
        introduction="Read the following text. It contains an access code.",
        question="Which access code does the text give for the {key}?",
        prefix="The access code of the {key} is",
    ),
    Phrasing(
        needle="Remember that locker {key} opens with {value}.",
        introduction="Somewhere below, the text says how a locker is opened.",
        question="With which number does locker {key} open?",
        prefix="Locker {key} opens with",
    ),
)
# Of a value, as in RULER. The haystack has no number of this length, so that nothing else can be the answer.
DIGITS = 7

DOMAIN = "books"
SOURCE = "Moby-Dick, Pride and Prejudice, Sense and Sensibility"
ADJECTIVES = (
    "amber", "ancient", "bashful", "brave", "brisk", "calm", "clever", "cosmic", "crimson", "curious",
    "dapper", "drowsy", "eager", "earnest", "fabled", "faint", "gentle", "gleaming", "hasty", "hollow",
    "humble", "idle", "jolly", "keen", "lively", "lunar", "mellow", "mighty", "nimble", "noble",
    "placid", "polite", "quaint", "rustic", "scarlet", "shiny", "silent", "sturdy", "tidy", "vivid",
)  # fmt: skip
NOUNS = (
    "anchor", "badger", "basket", "beacon", "bridge", "candle", "canyon", "carpet", "cobbler", "comet",
    "cradle", "desert", "dragon", "engine", "falcon", "feather", "fiddle", "garden", "glacier", "hammer",
    "harbor", "island", "jacket", "kettle", "ladder", "lantern", "magnet", "meadow", "mirror", "orchard",
    "pebble", "pillow", "rocket", "saddle", "teapot", "thimble", "tunnel", "violin", "walnut", "window",
)  # fmt: skip
# No key occurs in the haystack or inside another key: no adjective ends with another, no noun begins with another.
KEYS = tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)

# The end of a sentence, but not the period of a title or an initial; what follows begins with a capital.
_END = re.compile(
    r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)(?P<closing>[\"'”’)]*)\s+(?=[\"'“‘(]?[A-Z])"
)
_CLOSED = re.compile(r"[.!?][\"'”’)]*$")
_VALUE = re.compile(rf"\d{{{DIGITS}}}")


@functools.cache
def haystack() -> tuple[str, ...]:
    """Return the sentences of the embedded novels in order, each on one line, none with a 7-digit number."""
    sentences: list[str] = []
    for document in embedded_domains([DOMAIN])[DOMAIN]:
        sentences += sentences_of(document)
    # A heading without a period would run into the next sentence, or into a needle behind it.
    whole = (sentence if _CLOSED.search(sentence) else f"{sentence}." for sentence in sentences)
    return tuple(sentence for sentence in whole if not _VALUE.search(sentence))


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text with single spaces; closing quotation marks stay with their sentence."""
    ended = _END.sub(lambda end: end["closing"] + "\n", " ".join(text.split()))
    return [sentence for sentence in ended.split("\n") if sentence]


class Question(Frozen):
    """A sample without its text, which follows from the settings: length, depth, index, tokens, key and values."""

    length: int
    depth: int
    index: int
    tokens: int = Field(description="tokens of the prompt, by the candidate's tokenizer")
    key: str
    value: str
    others: tuple[str, ...] = Field(description="values of the other keys, in the order of the text")


class Sample(Question):
    """A question with its text (introduction, haystack with needles, question) and the beginning of the answer."""

    text: str
    prefix: str

    @property
    def prompt(self) -> str:
        """The text and the beginning of the answer, which a model continues."""
        return f"{self.text} {self.prefix}"


@dataclass(frozen=True)
class Drawn:
    """The random choices of a sample: keys and values (the needle's first), positions of distractors, first sentence.

    `positions` are those of each distractor as a fraction of the haystack, in rising order.
    """

    keys: Sequence[str]
    values: Sequence[str]
    positions: Sequence[float]
    start: int


@dataclass
class Samples:
    """Makes samples with `keys` needles, in a phrasing; their length in tokens leaves `new_tokens` for the answer."""

    tokenizer: PreTrainedTokenizerBase
    keys: int = 4
    new_tokens: int = 32
    seed: int = 0
    phrasing: Phrasing = RULER
    _costs: dict[int, int] = field(
        default_factory=dict, init=False
    )  # tokens of each sentence, with the space before it

    def sample(self, length: int, depth: int, index: int) -> Sample:
        """Return a sample whose prompt and new tokens take at most `length` tokens, and nearly as many.

        `depth` is 0 (the beginning) to 100 (the end); another `index` gives another text with other keys.
        """
        # All that determines a sample is in the seed's text, so that no sample depends on what is drawn before it.
        draw = random.Random(f"needles {self.seed} {length} {depth} {self.keys} {index}")
        numbers = draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), self.keys)
        drawn = Drawn(
            keys=draw.sample(KEYS, self.keys),
            values=[str(number) for number in numbers],
            positions=sorted(draw.random() for _ in range(self.keys - 1)),
            start=draw.randrange(len(haystack())),
        )
        text, prefix = written(drawn, self._fill(drawn, depth, length), depth, self.phrasing)
        return Sample(
            length=length,
            depth=depth,
            index=index,
            text=text,
            prefix=prefix,
            key=drawn.keys[0],
            value=drawn.values[0],
            others=tuple(drawn.values[1:]),
            tokens=len(prompt_ids(self.tokenizer, f"{text} {prefix}")),
        )

    def _fill(self, drawn: Drawn, depth: int, length: int) -> list[str]:
        """Return the sentences of the haystack: all that fit from the first on; at the end long ones are skipped."""
        limit = length - self.new_tokens
        bare = len(prompt_ids(self.tokenizer, " ".join(written(drawn, [], depth, self.phrasing))))
        left, missed = limit - bare, 0
        chosen: list[str] = []
        for step in range(len(haystack())):
            index = (drawn.start + step) % len(haystack())
            if index not in self._costs:
                self._costs[index] = len(token_ids(self.tokenizer, f" {haystack()[index]}"))
            cost = self._costs[index]
            if cost <= left:
                chosen.append(haystack()[index])
                left, missed = left - cost, 0
            else:
                missed += 1
            if left < 1 or missed == AHEAD:
                break
        else:
            raise ValueError(f"`lengths` must be at most {length - left}, the size of the haystack, got {length}")

        # Tokens of a text need not be the sum of those of its sentences, so the whole is counted once more.
        while (
            chosen and len(prompt_ids(self.tokenizer, " ".join(written(drawn, chosen, depth, self.phrasing)))) > limit
        ):
            chosen.pop()
        if not chosen:
            raise ValueError(
                f"length {length} is too short: template and {self.keys} needles take {bare} tokens, the "
                f"answer {self.new_tokens}; use a greater length, fewer keys or fewer new tokens"
            )
        return chosen


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the token ids of a prompt, with the tokenizer's special tokens at the beginning, not those at the end."""
    # What closes a text ([SEP], </s>) would stand between the prompt and its answer.
    return [*special_tokens(tokenizer)[0], *token_ids(tokenizer, prompt)]


def written(drawn: Drawn, sentences: Sequence[str], depth: int, phrasing: Phrasing = RULER) -> tuple[str, str]:
    """Return the text of a sample with these sentences as its haystack, and the beginning of the answer."""
    pairs = zip(drawn.keys, drawn.values, strict=True)
    needles = [phrasing.needle.format(key=key, value=value) for key, value in pairs]
    lines = [*sentences]
    # From the end, so that an insertion does not move the places of those before it.
    for position, needle in zip(reversed(drawn.positions), reversed(needles[1:]), strict=True):
        lines.insert(int((len(sentences) + 1) * position), needle)
    # Last, so that depth counts the distractors too, and 0 and 100 are the very ends.
    lines.insert(len(lines) * depth // 100, needles[0])
    question = phrasing.question.format(key=drawn.keys[0])
    text = f"{phrasing.introduction}\n{' '.join(lines)}\n{question}"
    return text, phrasing.prefix.format(key=drawn.keys[0])


def is_retrieved(output: str, value: str) -> bool:
    """Return whether an output contains the expected value, which is of digits."""
    return value in output
