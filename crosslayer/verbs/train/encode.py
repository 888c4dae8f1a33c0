"""Documents to tokens: pieces of text, a batch at a time, on all cores."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from crosslayer.corpus.pieces import next_word, special_tokens

BATCH = 2**20  # characters that are encoded at once
PART = 2**16  # characters; a longer document is encoded in parts, cut before a word: faster, and in less memory


class Piece(NamedTuple):
    """Text of a document, or a part of it; with special tokens before and behind it, and whether its document ends."""

    text: str
    opens: bool
    closes: bool
    ends: bool


def encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[Piece]], list[list[int]]]:
    """Return what gives the tokens of each piece; special tokens written out in the text stay text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, whose settings are ours
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    return lambda batch: [
        encoding.ids
        for encoding in backend.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    ]


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces, about `BATCH` characters at once."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def pieces(documents: Iterable[str], parts: int) -> Iterator[Piece]:
    """Yield documents in parts, of which the first opens and the last closes; `parts` documents belong together."""
    number = 0
    for place, text in enumerate(documents):
        if not isinstance(text, str):
            raise ValueError(f"document {place} is a {type(text).__name__}, not a text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"document {place} holds half of a character (a surrogate)") from None
        if not text.strip():
            assert parts == 1, "a document is blank that belongs to others"
            continue
        opens, closes = number % parts == 0, (number + 1) % parts == 0
        start = 0
        while start < len(text):
            stop = next_word(text, start + PART)
            last = stop == len(text)
            yield Piece(text[start:stop], opens and start == 0, closes and last, last)
            start = stop
        number += 1
    assert number % parts == 0, "a document lacks its others"


def frame(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens that a document begins and ends with."""
    first, last = special_tokens(tokenizer)
    end = tokenizer.eos_token_id
    if isinstance(end, int) and end not in last:
        last = [*last, end]
    return first, last
