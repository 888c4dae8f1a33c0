"""Windows: documents cut into pieces of text and these into tokens, in sequences of one length without padding."""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.output.progress import progress

MESSAGE = "\0"  # of a user; in no template
WORD = 1000  # characters; a text with spaces has one at least this often
JOINED = -1  # the document of a window that is joined from several
SAMPLES, SAMPLE = 64, 2000  # pieces, and characters of each, that say how many tokens a text has
SLACK = 1.2  # how far beyond that estimate a text is still tried
STREAMED = 4096  # documents of a stream that `split` takes
SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
CHARACTERS_PER_TOKEN = 6  # an upper estimate for text, so that a piece fills a sequence

Text = Tensor | TextSource | Iterable[str] | None
Body = tuple[list[int], int]  # the tokens of a window without special ones, and the document that they come from


def pieces(documents: Iterable[str], characters: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield contiguous pieces of about `characters` between words, each with the number of its document.

    They are shuffled where all documents are at hand, in a list; those of a stream come in their order.
    """
    texts = enumerate(documents)
    starts = ((number, text, start) for number, text in texts for start in range(0, len(text), characters))
    if isinstance(documents, list):
        starts = [*starts]
        random.Random(seed).shuffle(starts)
    for number, text, start in starts:
        yield number, text[next_word(text, start) : next_word(text, start + characters)]


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of plain text, without special ones; a text may be longer than a model's context."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def special_tokens(
    tokenizer: PreTrainedTokenizerBase, bos: str = "auto", prefix: str | Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return the tokens that a sequence begins and ends with.

    With `bos` "auto" that is what the tokenizer puts there ([CLS] and [SEP], say), with "yes" the beginning token
    alone, with "no" none. Then comes the prefix: a text, token ids, or for "chat" what the chat template puts before a
    user's message.
    """
    if prefix is not None:
        if prefix == "chat":
            if tokenizer.chat_template is None:
                raise ValueError("`prefix` chat needs a chat template, which this tokenizer lacks; give it as text")
            chat = tokenizer.apply_chat_template([{"role": "user", "content": MESSAGE}], tokenize=False)
            prefix = str(chat).partition(MESSAGE)[0]
        fixed = token_ids(tokenizer, prefix) if isinstance(prefix, str) else [*prefix]
        if not fixed:
            raise ValueError("`prefix` must have at least one token, got none; leave it out for plain text")
        first, last = special_tokens(tokenizer, bos)
        return (fixed if fixed[: len(first)] == first else first + fixed), last
    if bos not in ("auto", "yes", "no"):
        raise ValueError(f"`bos` must be auto, yes or no, got {bos!r}")
    if bos == "no":
        return [], []
    if bos == "yes":
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
        if token is None:
            raise ValueError("`bos` yes needs a beginning-of-sequence token, which this tokenizer lacks; use auto")
        assert isinstance(token, int)
        return [token], []
    plain = cast(list[int], tokenizer.encode("a", add_special_tokens=False))
    full = cast(list[int], tokenizer.encode("a"))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def next_word(text: str, at: int) -> int:
    """Return where the next word begins, with the space before it; `at` itself where no space is near."""
    if at == 0 or at >= len(text):
        return min(at, len(text))
    space = text.find(" ", at - 1, at + WORD)
    return space if space >= 0 else at


@dataclass(frozen=True)
class Windows:
    """Token sequences (N, T), the document that each is cut from (-1: joined from several), and its domain."""

    ids: Tensor
    documents: tuple[int, ...]  # empty: unknown
    domains: tuple[str, ...] = ()  # empty: there is a single domain

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int]) -> "Windows":
        """Return some of the windows."""
        documents = tuple(self.documents[row] for row in rows)
        return Windows(self.ids[list(rows)], documents, tuple(self.domains[row] for row in rows if self.domains))

    def by_domain(self) -> dict[str, Tensor]:
        """Return the sequences of each domain."""
        names = dict.fromkeys(self.domains)
        return {name: self.ids[[domain == name for domain in self.domains]] for name in names}


def open_text(text: Text, *, sequences: int, length: int, seed: int = 0) -> Tensor | Iterable[str]:
    """Return the documents of a text, or token ids as they are, before any model is there to cut them."""
    if isinstance(text, Tensor):
        return text
    wrong = []
    for name, value, least in (("sequences", sequences, 1), ("length", length, 2), ("seed", seed, 0)):
        if not least <= value < 2**63:  # torch takes no larger seed
            wrong.append(f"`{name}` must be at least {least} and below 2⁶³, got {value}")
    if wrong:
        raise ValueError("; ".join(wrong))
    check_text(text, "text")
    documents = [text] if isinstance(text, str) else text
    if documents is None or isinstance(documents, TextSource):
        source = documents or TextSource()
        with progress(f"reading {source.describe()}", 0):
            documents = load_documents(source, seed)
    size = sum(len(text.encode()) for text in documents) if isinstance(documents, list) else None
    if size is not None and size < sequences * length:  # no token is shorter than a byte
        raise ValueError(
            f"the text has {size} bytes, and {sequences} sequences of {length} are {sequences * length} tokens: "
            "use fewer or shorter sequences, or more text"
        )
    return documents


def check_text(text: object, name: str) -> None:
    """Refuse a file's name, and lists with other items than texts."""
    if isinstance(text, Path) or (isinstance(text, str) and text.endswith(SUFFIXES) and len(text.split()) == 1):
        raise ValueError(f"{name} is {str(text)!r}, which looks like a file; TextSource({str(text)!r}) reads it")
    if text is None or isinstance(text, str | TextSource | Tensor):
        return
    if not isinstance(text, Iterable) or isinstance(text, Mapping):
        raise ValueError(f"{name} is a {type(text).__name__}; give token ids as a tensor, a TextSource, or texts")
    if isinstance(text, Sequence):
        wrong = [document for document in text if not isinstance(document, str)]
        if wrong:
            kind = type(wrong[0]).__name__
            raise ValueError(f"{name} holds a {kind}; give texts, or token ids as a tensor (N, T)")


def text_name(text: Text) -> str | None:
    """Return how a result calls its text: what a source says of itself, "own texts", or None for token ids."""
    if isinstance(text, Tensor):
        return None
    if text is None or isinstance(text, TextSource):
        return (text or TextSource()).describe()
    return "own texts"


def packed(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
    prefix: str | Sequence[int] | None = None,
) -> Windows:
    """Cut documents into windows, a single window from each piece of text, so that they come from all of it.

    A window of `length` tokens is contiguous text as far as its document reaches, between the tokens that
    `special_tokens` gives for `bos` and `prefix`. Pieces of a list are taken in the order of `seed`; a stream is read
    only as far as needed.

    Raises:
        ValueError: there is too little text; the message says how many tokens there are.
    """
    first, last = special_tokens(tokenizer, bos, prefix)
    size = length - len(first) - len(last)
    if sequences < 1 or size < 1:
        fixed = f"{len(first) + len(last)} fixed tokens"
        raise ValueError(f"sequences = {sequences} and length = {length} leave no text next to {fixed}; raise them")
    _check_estimate(documents, tokenizer, sequences, size)
    bodies, rest = _pack_bodies(documents, tokenizer, sequences, size, seed)
    if len(bodies) < sequences:
        raise ValueError(
            f"the text has {len(bodies) * size + rest} tokens; {sequences} sequences of {length} need "
            f"{sequences * size}: use fewer or shorter sequences, or more text"
        )
    return _windows(bodies, first, last)


def split(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    parts: dict[str, int],
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> dict[str, Windows]:
    """Cut documents into disjoint parts, each with a number of windows, such as {"evaluation": 64, "calibration": 128}.

    Windows are drawn with `seed` from everywhere in the documents (at most 4,096 of a stream); no token is used twice.
    """
    first, last = special_tokens(tokenizer, bos)
    size, wanted = length - len(first) - len(last), sum(parts.values())
    if min(parts.values()) < 1 or size < 1:
        raise ValueError(f"windows {parts} of {length} tokens leave no tokens for text; raise both")
    held = list(itertools.islice(documents, None if isinstance(documents, list) else STREAMED))
    bodies = _split_bodies(held, tokenizer, wanted, size, seed)
    if len(bodies) < wanted:
        needs = ", ".join(f"{count} for {name}" for name, count in parts.items())
        raise ValueError(
            f"the text gives {len(bodies)} windows of {length} tokens ({len(bodies) * length} tokens); {wanted} are "
            f"needed ({needs}): use fewer or shorter windows, or more text"
        )
    windows, start = {}, 0
    for name, count in parts.items():
        windows[name] = _windows(bodies[start : start + count], first, last)
        start += count
    return windows


def _pack_bodies(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, count: int, size: int, seed: int
) -> tuple[list[Body], int]:
    """Return at most `count` bodies, first of single pieces, then of what is left of them, and the tokens left over."""
    bodies: list[Body] = []
    rest: list[int] = []
    sources: set[int] = set()  # the documents of the rest
    for number, piece in pieces(documents, CHARACTERS_PER_TOKEN * size, seed):
        tokens = token_ids(tokenizer, piece)
        if len(tokens) >= size:
            bodies.append((tokens[:size], number))
            tokens = tokens[size:]
        rest += tokens
        sources.add(number)
        if len(bodies) == count:
            break
    while len(bodies) < count and len(rest) >= size:
        bodies.append((rest[:size], JOINED if len(sources) > 1 else min(sources)))
        rest = rest[size:]
    return bodies, len(rest)


def _split_bodies(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, count: int, size: int, seed: int
) -> list[Body]:
    """Return at most `count` bodies: every piece gives as many as it holds, and short documents are joined."""
    bodies: list[Body] = []
    rest: list[int] = []
    for number, piece in pieces(documents, CHARACTERS_PER_TOKEN * size, seed):
        if len(bodies) == count:
            break
        tokens = token_ids(tokenizer, piece)
        while len(tokens) >= size and len(bodies) < count:
            bodies.append((tokens[:size], number))
            tokens = tokens[size:]
        if len(documents[number]) < CHARACTERS_PER_TOKEN * size:
            rest += tokens
            if len(rest) >= size:
                bodies.append((rest[:size], JOINED))
                rest = rest[size:]
    return bodies


def _windows(bodies: list[Body], first: list[int], last: list[int]) -> Windows:
    ids = torch.tensor([[*first, *tokens, *last] for tokens, _ in bodies])  # (N, T)
    return Windows(ids, tuple(number for _, number in bodies))


def _check_estimate(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, sequences: int, size: int) -> None:
    """Refuse a long text that is too short by far, from a sample: to tokenize it all takes a minute."""
    characters = sum(map(len, documents)) if isinstance(documents, list) else 0
    if characters <= SAMPLES * SAMPLE:
        return
    sample = itertools.islice(pieces(documents, SAMPLE, 0), SAMPLES)
    tokens = [len(token_ids(tokenizer, piece)) for _, piece in sample]
    about = round(sum(tokens) / (SAMPLES * SAMPLE) * characters, -3)
    if sequences * size > SLACK * about:
        raise ValueError(
            f"the text has about {about:,.0f} tokens; {sequences:,} sequences of {size} need {sequences * size:,}: "
            "use fewer or shorter sequences, or more text"
        )


def repeating(ids: Tensor) -> tuple[Tensor, int]:
    """Return windows (N, T) whose last third repeats the tokens after the first, and where that third starts."""
    start = ids.shape[1] - ids.shape[1] // 3
    return torch.cat([ids[:, :start], ids[:, 1 : ids.shape[1] - start + 1]], dim=1), start
