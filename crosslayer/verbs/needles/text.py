"""The text of samples: RULER's sentences, keys of two words, and the sentences of the haystack.

Source of the sentences, of keys made of an adjective and a noun, and of 7-digit numbers as values: RULER, arXiv
2404.06654, task NIAH (multi-key).
"""

import functools
import re

from crosslayer.corpus.domains import embedded_domains

NEEDLE = "One of the special magic numbers for {key} is: {value}."
INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards."
)
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
PREFIX = "The special magic number for {key} mentioned in the provided text is"
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
