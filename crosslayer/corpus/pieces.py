"""Documents cut into pieces of text, and pieces into tokens."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

MESSAGE = "\0"  # of a user; in no template
WORD = 1000  # characters; a text with spaces has one at least this often


def pieces(documents: Iterable[str], characters: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield contiguous pieces of about `characters`, each with the number of its document.

    They are shuffled where all documents are at hand, in a list; those of a stream come in their order.
    """
    if isinstance(documents, list):
        starts = [(number, start) for number, text in enumerate(documents) for start in range(0, len(text), characters)]
        random.Random(seed).shuffle(starts)
        for number, start in starts:
            yield number, _from_word(documents[number], start, start + characters)
    else:
        for number, text in enumerate(documents):
            for start in range(0, len(text), characters):
                yield number, _from_word(text, start, start + characters)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of plain text, without special ones; a text may be longer than a model's context."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def special_tokens(
    tokenizer: PreTrainedTokenizerBase, bos: str = "auto", prefix: str | Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return the tokens that a sequence begins and ends with.

    With `bos` "auto" that is what the tokenizer puts there, with "yes" the beginning token alone, with "no" none. Then
    comes the prefix: a text, token ids, or for "chat" what the chat template puts before a user's message.
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


def _from_word(text: str, start: int, stop: int) -> str:
    """Return text[start:stop] with both ends moved to the next beginning of a word."""
    return text[next_word(text, start) : next_word(text, stop)]
