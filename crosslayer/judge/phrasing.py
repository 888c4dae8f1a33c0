"""The text of samples: RULER's sentences, keys of two words, and the sentences of the haystack.

Source of the sentences, of keys made of an adjective and a noun, and of 7-digit numbers as values: RULER, arXiv
2404.06654, task NIAH (multi-key).
"""

import functools
import re
from typing import NamedTuple

from crosslayer.corpus.domains import embedded_domains


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
PHRASINGS = (  # a model that retrieves in one phrasing may fail in another
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
DIGITS = 7  # of a value

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
KEYS = tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)

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
    whole = (sentence if _CLOSED.search(sentence) else f"{sentence}." for sentence in sentences)
    return tuple(sentence for sentence in whole if not _VALUE.search(sentence))


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text with single spaces; closing quotation marks stay with their sentence."""
    ended = _END.sub(lambda end: end["closing"] + "\n", " ".join(text.split()))
    return [sentence for sentence in ended.split("\n") if sentence]
