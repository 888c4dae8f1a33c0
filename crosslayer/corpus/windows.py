"""Documents cut into token sequences of one length, without padding."""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.output.progress import Meter, Silent

JOINED = -1  # the document of a window that is joined from several
SAMPLES, SAMPLE = 64, 2000  # pieces and characters of each that say how many tokens a text has
STREAMED = 4096  # documents of a stream that `split` takes
WORD = 1000  # characters, within which a text that has spaces shows one
ROOM = 1.2  # how far beyond that estimate it is still tried
CHARACTERS_PER_TOKEN = 6  # an upper estimate for text, so that one piece fills one sequence


Text = Tensor | TextSource | Iterable[str] | None


def read_windows(
    text: Text,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
    meter: Meter = Silent,
) -> "Windows":
    """Return token sequences of a text: token ids (N, T) as they are; everything else is read and cut by `packed`.

    Args:
        text: token ids, a source, documents (one string is one document), or None for the embedded corpus.
        tokenizer: needed for everything but token ids.
        sequences: how many sequences are cut; like `length`, `seed` and `bos` not for token ids.
        length: tokens of a sequence.
        seed: of the order in which pieces are taken.
        bos: "auto", "yes" or "no", as in `pack`.
        meter: shows what is being done.

    Raises:
        ValueError: a source cannot be read, there is too little text, or the tokenizer is missing.

    """
    opened = open_text(text, sequences=sequences, length=length, seed=seed, meter=meter)
    if isinstance(opened, Tensor):
        return Windows(opened, ())
    if tokenizer is None:
        raise ValueError("texts need tokenizer=…; without one give token ids (B, T)")
    with meter("cutting the text into tokens", 0):
        return packed(opened, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos)


def open_text(
    text: Text, *, sequences: int, length: int, seed: int = 0, meter: Meter = Silent
) -> Tensor | Iterable[str]:
    """Return the documents of a text, or token ids as they are, before any model is there to cut them.

    Raises:
        ValueError: a source cannot be read, or its text is too short whatever the tokenizer.

    """
    if isinstance(text, Tensor):
        return text
    documents = [text] if isinstance(text, str) else text
    if documents is None or isinstance(documents, TextSource):
        source = documents or TextSource()
        with meter(f"reading {source.describe()}", 0):
            documents = load_documents(source, seed)
    check_size(documents, sequences, length)
    return documents


def text_name(text: Text) -> str | None:
    """Return how a result calls its text: what a source says of itself, "own texts", or None for token ids."""
    if isinstance(text, Tensor):
        return None
    if text is None or isinstance(text, TextSource):
        return (text or TextSource()).describe()
    return "own texts"


def check_size(documents: Iterable[str], sequences: int, length: int) -> None:
    """Refuse text, if all of it is at hand, that is too short whatever the tokenizer: a token has at least one byte."""
    if not isinstance(documents, list):
        return
    size = sum(len(text.encode()) for text in documents)
    if size < sequences * length:
        raise ValueError(
            f"the text has {size} bytes, and {sequences} sequences of {length} are {sequences * length} tokens: "
            "use fewer or shorter sequences, or more text"
        )


def pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> Tensor:
    """Cut documents into token sequences, (sequences, length) int64, without padding.

    A sequence is contiguous text as far as its document reaches; pieces are taken in an order drawn with `seed`. `bos`:
    "auto" keeps what the tokenizer puts first and last ([CLS] and [SEP], say), "yes" forces the beginning token, "no"
    gives plain text.

    Raises:
        ValueError: there is too little text; the message says how many tokens there are.

    """
    return packed(documents, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos).ids


def packed(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> "Windows":
    """Return what `pack` does, and which document each sequence comes from."""
    first, last = special_tokens(tokenizer, bos)
    body = length - len(first) - len(last)
    if sequences < 1 or body < 1:
        raise ValueError(f"sequences = {sequences} and length = {length} leave no room for text; both must be larger")
    _check_estimate(documents, tokenizer, sequences, body)
    windows: list[tuple[list[int], int]] = []
    rest: list[int] = []
    sources: set[int] = set()  # of the rest
    for number, piece in _pieces(documents, CHARACTERS_PER_TOKEN * body, seed):
        tokens = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= body:
            windows.append((tokens[:body], number))
            tokens = tokens[body:]
        rest += tokens
        sources.add(number)
        if len(windows) == sequences:
            break
    while len(windows) < sequences and len(rest) >= body:
        windows.append((rest[:body], JOINED if len(sources) > 1 else min(sources)))
        rest = rest[body:]
    if len(windows) < sequences:
        count = len(windows) * body + len(rest)
        raise ValueError(
            f"the text has {count} tokens; {sequences} sequences of {length} need {sequences * body}: "
            "use fewer or shorter sequences, or more text"
        )
    ids = torch.tensor([[*first, *tokens, *last] for tokens, _ in windows])
    return Windows(ids, tuple(number for _, number in windows))


@dataclass(frozen=True)
class Windows:
    """Token sequences (N, T), the document that each is cut from (-1: joined from short ones), and its domain."""

    ids: Tensor
    documents: tuple[int, ...]  # empty: unknown
    domains: tuple[str, ...] = ()  # empty: all of one

    def __len__(self) -> int:
        return len(self.ids)

    def by_domain(self) -> dict[str, Tensor]:
        """Return the sequences of each domain."""
        names = dict.fromkeys(self.domains)
        return {name: self.ids[[domain == name for domain in self.domains]] for name in names}


def split(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    parts: dict[str, int],
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> dict[str, Windows]:
    """Cut documents into disjoint parts of so many windows each, such as {"evaluation": 64, "calibration": 128}.

    Windows are drawn with `seed` from everywhere in the documents (at most 4,096 of a stream); no token is used twice.

    Raises:
        ValueError: there is too little text; the message says how many tokens there are.

    """
    first, last = special_tokens(tokenizer, bos)
    body, wanted = length - len(first) - len(last), sum(parts.values())
    if min(parts.values()) < 1 or body < 1:
        raise ValueError(f"windows {parts} of {length} tokens leave no room for text; both must be larger")
    held = list(itertools.islice(documents, None if isinstance(documents, list) else STREAMED))
    found: list[tuple[list[int], int]] = []
    rest: list[int] = []
    for number, piece in _numbered_pieces(held, CHARACTERS_PER_TOKEN * body, seed):
        if len(found) == wanted:
            break
        tokens = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        while len(tokens) >= body and len(found) < wanted:
            found.append((tokens[:body], number))
            tokens = tokens[body:]
        if len(held[number]) >= CHARACTERS_PER_TOKEN * body:
            continue
        rest += tokens  # a short document: joined with others
        if len(rest) >= body:
            found.append((rest[:body], JOINED))
            rest = rest[body:]
    if len(found) < wanted:
        needs = ", ".join(f"{count} for {name}" for name, count in parts.items())
        raise ValueError(
            f"the text gives {len(found)} windows of {length} tokens ({len(found) * length} tokens); {wanted} are "
            f"needed ({needs}): use fewer or shorter windows, or more text"
        )
    result, start = {}, 0
    for name, count in parts.items():
        chosen = found[start : start + count]
        ids = torch.tensor([[*first, *tokens, *last] for tokens, _ in chosen])
        result[name], start = Windows(ids, tuple(number for _, number in chosen)), start + count
    return result


def _check_estimate(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, sequences: int, body: int) -> None:
    """Refuse a long text that is clearly too short, by a sample of it: to cut it all into tokens takes a minute."""
    characters = sum(map(len, documents)) if isinstance(documents, list) else 0
    if characters <= SAMPLES * SAMPLE:
        return
    pieces = itertools.islice(_pieces(documents, SAMPLE, 0), SAMPLES)
    tokens = [len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]) for _, piece in pieces]
    about = round(sum(tokens) / (SAMPLES * SAMPLE) * characters, -3)
    if sequences * body > ROOM * about:
        raise ValueError(
            f"the text has about {about:,.0f} tokens; {sequences:,} sequences of {body} need {sequences * body:,}: "
            "use fewer or shorter sequences, or more text"
        )


def special_tokens(tokenizer: PreTrainedTokenizerBase, bos: str = "auto") -> tuple[list[Any], list[Any]]:
    """Return the tokens that a sequence begins and ends with."""
    if bos not in ("auto", "yes", "no"):
        raise ValueError(f"bos = {bos!r} is not known; use auto, yes or no")
    if bos == "no":
        return [], []
    if bos == "yes":
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
        if token is None:
            raise ValueError("bos = 'yes', but this tokenizer has no beginning-of-sequence token; use auto or no")
        return [token], []
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    assert isinstance(plain, list) and isinstance(full, list)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def _numbered_pieces(documents: list[str], characters: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield contiguous pieces of about `characters`, shuffled, with the number of their document."""
    places = [(d, start) for d, text in enumerate(documents) for start in range(0, len(text), characters)]
    random.Random(seed).shuffle(places)
    for d, start in places:
        yield d, _from_word(documents[d], start, start + characters)


def _pieces(documents: Iterable[str], characters: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield what `_numbered_pieces` does; in their order where not all documents are at hand."""
    if isinstance(documents, list):
        yield from _numbered_pieces(documents, characters, seed)
    else:
        for number, text in enumerate(documents):
            for start in range(0, len(text), characters):
                yield number, _from_word(text, start, start + characters)


def _from_word(text: str, start: int, stop: int) -> str:
    """Return text[start:stop] with both ends moved to the next beginning of a word."""
    return text[_next_word(text, start) : _next_word(text, stop)]


def _next_word(text: str, at: int) -> int:
    if at == 0 or at >= len(text):
        return min(at, len(text))
    space = text.find(" ", at - 1, at + WORD)
    return space if space >= 0 else at
