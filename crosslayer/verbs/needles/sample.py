"""Samples: a haystack of whole sentences with needles in it, of a given length in tokens, from a seed.

Of K needles one is asked for. It stands before the sentence number ⌊depth / 100 · N⌋ of the N others, distractors
included: 0 is the very beginning, 100 the very end. The distractors stand anywhere. A sample is drawn from seed,
length, depth, number of keys and index alone, whatever else is drawn, and cells share nothing. Source: RULER, arXiv
2404.06654; its own haystack is cut at words, and its depths are drawn.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.pieces import special_tokens, token_ids
from crosslayer.verbs.needles.record import Question
from crosslayer.verbs.needles.text import DIGITS, INTRODUCTION, KEYS, NEEDLE, PREFIX, QUESTION, haystack

AHEAD = 50  # sentences that are too long for what is left, in a row, before no further one is tried


class Sample(Question):
    """A question with its text: introduction, haystack with needles, and question; and how the answer begins."""

    text: str
    prefix: str

    @property
    def prompt(self) -> str:
        """What a model continues: the text, and how the answer begins."""
        return f"{self.text} {self.prefix}"


@dataclass(frozen=True)
class Drawn:
    """What chance decides of a sample: keys and values, the needle first, where distractors stand, the first sentence.

    `places` are shares of the haystack, rising, of each distractor.
    """

    keys: Sequence[str]
    values: Sequence[str]
    places: Sequence[float]
    start: int


class Samples:
    """Makes samples of `keys` needles, whose tokens a tokenizer counts; `new_tokens` are left for the answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keys: int = 4, new_tokens: int = 32, seed: int = 0):
        self.tokenizer, self.keys, self.new_tokens, self.seed = tokenizer, keys, new_tokens, seed
        self.first = special_tokens(tokenizer)[0]
        self.costs: dict[int, int] = {}  # tokens of a sentence with the space before it, by its number

    def sample(self, length: int, depth: int, index: int) -> Sample:
        """Return a sample whose prompt has, with the new tokens, at most `length` tokens, and nearly as many.

        `depth` is from 0 (the beginning) to 100 (the end); another `index` is another text with other keys. The words
        that seed the generator name all that it follows from.
        """
        draw = random.Random(f"needles {self.seed} {length} {depth} {self.keys} {index}")
        numbers = draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), self.keys)
        drawn = Drawn(
            keys=draw.sample(KEYS, self.keys),
            values=[str(number) for number in numbers],
            places=sorted(draw.random() for _ in range(self.keys - 1)),
            start=draw.randrange(len(haystack())),
        )
        text, prefix = written(drawn, self._fill(drawn, depth, length), depth)
        return Sample(
            length=length,
            depth=depth,
            index=index,
            text=text,
            prefix=prefix,
            key=drawn.keys[0],
            value=drawn.values[0],
            others=tuple(drawn.values[1:]),
            tokens=self._count(f"{text} {prefix}"),
        )

    def _fill(self, drawn: Drawn, depth: int, length: int) -> list[str]:
        """Return the sentences of the haystack: from the first on, all that fit; at the end long ones are left out."""
        room, bare = length - self.new_tokens, self._count(" ".join(written(drawn, [], depth)))
        left, missed, chosen = room - bare, 0, []
        for step in range(len(haystack())):
            number = (drawn.start + step) % len(haystack())
            if number not in self.costs:
                self.costs[number] = len(token_ids(self.tokenizer, f" {haystack()[number]}"))
            cost = self.costs[number]
            if cost <= left:
                chosen.append(haystack()[number])
                left, missed = left - cost, 0
            else:
                missed += 1
            if left < 1 or missed == AHEAD:
                break
        else:
            raise ValueError(f"length {length} is above what the haystack has; use at most {length - left}")
        while chosen and self._count(" ".join(written(drawn, chosen, depth))) > room:
            chosen.pop()
        if not chosen:
            raise ValueError(
                f"length {length} has no room for a haystack: template and {self.keys} needles take {bare} tokens, the "
                f"answer {self.new_tokens}; use a greater length, fewer keys or fewer new tokens"
            )
        return chosen

    def _count(self, text: str) -> int:
        return len(self.first) + len(token_ids(self.tokenizer, text))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the tokens of a prompt: those that the tokenizer begins a text with, and none that end one."""
    return [*special_tokens(tokenizer)[0], *token_ids(tokenizer, prompt)]


def written(drawn: Drawn, sentences: Sequence[str], depth: int) -> tuple[str, str]:
    """Return the text of a sample with these sentences for its haystack, and how the answer begins."""
    needles = [NEEDLE.format(key=key, value=value) for key, value in zip(drawn.keys, drawn.values, strict=True)]
    lines = [*sentences]
    for place, needle in zip(reversed(drawn.places), reversed(needles[1:]), strict=True):  # later ones do not move
        lines.insert(int((len(sentences) + 1) * place), needle)
    lines.insert(len(lines) * depth // 100, needles[0])
    question = QUESTION.format(key=drawn.keys[0])
    return f"{INTRODUCTION}\n{' '.join(lines)}\n{question}", PREFIX.format(key=drawn.keys[0])
