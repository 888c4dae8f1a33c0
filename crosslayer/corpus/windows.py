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

# stands for a user's message in a chat template: no template has this character, so that it marks the place
MESSAGE = "\0"
# characters in which a cut looks for a space: a text without any must not be searched to its end at every cut
WORD = 1000
JOINED = -1  # the document of a window that is joined from several
# pieces, and characters of each, that say how many tokens a text has: to tokenize a long text takes a minute
SAMPLES, SAMPLE = 64, 2000
# how far beyond that estimate a text is still tried: a sample is not exact, and only whole tokens can tell
SLACK = 1.2
# documents of a stream that `split` holds in memory, since it draws from all that it has
STREAMED = 4096
SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
# an upper estimate for text, so that a piece of that many characters a token fills a window
CHARACTERS_PER_TOKEN = 6

Text = Tensor | TextSource | Iterable[str] | None
Body = tuple[list[int], int]  # the tokens of a window without special ones, and the document that they come from


def pieces(documents: Iterable[str], characters: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield contiguous pieces of about `characters` between words, each with the number of its document.

    They are shuffled where all documents are at hand, in a list; those of a stream come in their order.
    """
    starts = (
        (document, text, start) for document, text in enumerate(documents) for start in range(0, len(text), characters)
    )
    if isinstance(documents, list):
        starts = [*starts]
        random.Random(seed).shuffle(starts)
    for document, text, start in starts:
        yield document, text[next_word(text, start) : next_word(text, start + characters)]


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
        # a chat template may write the beginning token itself, which must not stand there twice
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
    # tokenizers do not say what they add in one form: what stands around a letter stands around any text
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
    # a word is encoded with the space before it, so the search begins a character earlier
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

    bodies: list[Body] = []
    rest: list[int] = []
    documents_of_rest: set[int] = set()
    # one window of each piece: a second one would come from the same place, and less of the text would be seen
    for document, piece in pieces(documents, CHARACTERS_PER_TOKEN * size, seed):
        tokens = token_ids(tokenizer, piece)
        if len(tokens) >= size:
            bodies.append((tokens[:size], document))
            tokens = tokens[size:]
        rest += tokens
        documents_of_rest.add(document)
        if len(bodies) == sequences:
            break

    # what the pieces have left is used only if they are too few, since it is not contiguous text
    while len(bodies) < sequences and len(rest) >= size:
        bodies.append((rest[:size], JOINED if len(documents_of_rest) > 1 else min(documents_of_rest)))
        rest = rest[size:]
    if len(bodies) < sequences:
        raise ValueError(
            f"the text has {len(bodies) * size + len(rest)} tokens; {sequences} sequences of {length} need "
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
    size = length - len(first) - len(last)
    wanted = sum(parts.values())
    if min(parts.values()) < 1 or size < 1:
        raise ValueError(f"windows {parts} of {length} tokens leave no tokens for text; raise both")

    bodies: list[Body] = []
    rest: list[int] = []
    held = list(itertools.islice(documents, None if isinstance(documents, list) else STREAMED))
    # unlike `packed`, all windows of a piece: the parts need many, and the text may be short
    for document, piece in pieces(held, CHARACTERS_PER_TOKEN * size, seed):
        if len(bodies) == wanted:
            break
        tokens = token_ids(tokenizer, piece)
        while len(tokens) >= size and len(bodies) < wanted:
            bodies.append((tokens[:size], document))
            tokens = tokens[size:]
        # a document shorter than a piece would be lost as a whole, so these are joined; of others an end is lost
        if len(held[document]) < CHARACTERS_PER_TOKEN * size:
            rest += tokens
            if len(rest) >= size:
                bodies.append((rest[:size], JOINED))
                rest = rest[size:]
    if len(bodies) < wanted:
        needs = ", ".join(f"{count} for {name}" for name, count in parts.items())
        raise ValueError(
            f"the text gives {len(bodies)} windows of {length} tokens ({len(bodies) * length} tokens); {wanted} are "
            f"needed ({needs}): use fewer or shorter windows, or more text"
        )
    windows = {}
    start = 0
    for name, count in parts.items():
        windows[name] = _windows(bodies[start : start + count], first, last)
        start += count
    return windows


def _windows(bodies: list[Body], first: list[int], last: list[int]) -> Windows:
    ids = torch.tensor([[*first, *tokens, *last] for tokens, _ in bodies])  # (N, T)
    return Windows(ids, tuple(document for _, document in bodies))


def _check_estimate(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, sequences: int, size: int) -> None:
    """Refuse a long text that is too short by far, from a sample: to tokenize it all takes a minute."""
    # a stream has no known length, and reading it to its end to measure it would be worse than trying
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
