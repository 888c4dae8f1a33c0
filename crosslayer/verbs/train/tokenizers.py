"""Tokenizers for a training run (bytes, byte pairs trained on its own text, or a model's), and documents to tokens."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from crosslayer.corpus.pieces import next_word, special_tokens
from crosslayer.models.load import load_tokenizer

END, PADDING = "<|end|>", "<|pad|>"  # what ends a document, and what fills a row
SPECIAL = (END, PADDING)
LEAST = 256 + len(SPECIAL) + 1  # tokens of byte pairs: bytes, special tokens, and a pair
TRAINED_ON = 32 * 10**6  # characters of text that byte pairs are trained on at most
PIECE = 4096  # characters; of a longer text such pieces are taken from everywhere in it
BATCH = 2**20  # characters that are encoded at once
PART = 2**16  # characters; a longer document is encoded in parts, cut before a word: faster, and in less memory


def make_tokenizer(name: str, documents: Callable[[], Iterable[str]]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run.

    Of "bytes" token b is byte b of the text in UTF-8, and any text comes back as it was. "bpe:N" are byte pairs
    (GPT-2's way to part words) trained on the documents, which are read twice: N tokens with the special ones, or fewer
    where the text has not so many pairs that come twice. Everything else is a model whose tokenizer is taken.
    """
    if name == "bytes":
        ids = {character: byte for byte, character in bytes_to_unicode().items()}
        return _finished(_byte_level(models.BPE(vocab=ids, merges=[]), words=False))
    if name.startswith("bpe:"):
        return _finished(_trained(pair_tokens(name), documents))
    tokenizer = load_tokenizer(name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of {name!r} is no fast one (tokenizer.json); training needs such")
    return tokenizer


def kept_tokenizer(
    name: str, documents: Callable[[], Iterable[str]], folder: Path, digest: str
) -> PreTrainedTokenizerFast:
    """As `make_tokenizer`; byte pairs are trained once and kept in a folder, for each size and digest of their text."""
    if not name.startswith("bpe:"):
        return make_tokenizer(name, documents)
    size = pair_tokens(name)
    key = hashlib.sha256(f"{size}/{TRAINED_ON}/{PIECE}/{digest}".encode()).hexdigest()
    path = folder / f"bpe-{size}-{key[:16]}.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{path.name}.{os.getpid()}"
        _trained(size, documents).save(str(partial))
        partial.replace(path)
    return _finished(Tokenizer.from_file(str(path)))


def pair_tokens(name: str) -> int:
    """Return N of "bpe:N"."""
    match = re.fullmatch("bpe:([0-9]{1,9})", name)
    if match is None or int(match[1]) < LEAST:
        raise ValueError(f"tokenizer {name!r}: give bpe:N with a number of tokens from {LEAST} on, such as bpe:8192")
    return int(match[1])


def _trained(size: int, documents: Callable[[], Iterable[str]]) -> Tokenizer:
    """Train byte pairs; the same text gives the same tokenizer."""
    characters = sum(map(len, documents()))
    if not characters:
        raise ValueError(f"tokenizer 'bpe:{size}' needs text to train on, and there is none")
    tokenizer = _byte_level(models.BPE(), words=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(documents(), characters), trainer)
    return tokenizer


def _sample(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Yield pieces from everywhere in documents of so many characters, about `TRAINED_ON` in all."""
    kept = read = 0
    for text in documents:
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            read += len(piece)
            if kept * characters < read * min(characters, TRAINED_ON):
                kept += len(piece)
                yield piece


def _byte_level(model: models.BPE, words: bool) -> Tokenizer:
    """Return a tokenizer over bytes; pairs stay within words where `words` is set."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a tokenizer its special tokens, which text never becomes, whatever it says."""
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PADDING,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


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
