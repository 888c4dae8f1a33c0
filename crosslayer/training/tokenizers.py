"""Tokenizers of training runs: bytes, byte pairs trained on the run's text, or a model's."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from crosslayer.models.embedded import cache_folder
from crosslayer.models.load import load_tokenizer
from crosslayer.output.progress import progress
from crosslayer.training.texts import Domain

END, PADDING = "<|end|>", "<|pad|>"  # the end of a document, and padding
SPECIAL = (END, PADDING)
LEAST = 256 + len(SPECIAL) + 1  # minimum tokens of byte pairs: bytes, special tokens and one pair
# maximum characters of text to train byte pairs on, since the trainer holds counts of all words in memory
TRAINED_ON = 32 * 10**6
# characters of the chunks that a longer text is sampled in, evenly spaced, so that all its domains are seen
PIECE = 4096
TOKENS = "tokens"  # folder in the cache


def recipe_tokenizer(name: str, domains: Sequence[Domain]) -> PreTrainedTokenizerFast:
    """As `make_tokenizer`, on the text of domains, with trained byte pairs cached by their number and their text."""
    with progress("reading the tokenizer", 0):
        # trained once for a text: the training reads all of it, twice
        if name.startswith("bpe:"):
            size = pair_tokens(name)
            digest = "/".join(f"{domain.name}: {domain.digest()}" for domain in domains)
            key = hashlib.sha256(f"{size}/{TRAINED_ON}/{PIECE}/{digest}".encode()).hexdigest()
            path = cache_folder() / TOKENS / f"bpe-{size}-{key[:16]}.json"
            # several processes may train it at once, with the same result: each writes a file of its own and renames it
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f".{path.name}.{os.getpid()}")
                _trained(size, lambda: (text for domain in domains for text in domain.training())).save(str(partial))
                partial.replace(path)
            return _finished(Tokenizer.from_file(str(path)))
        return make_tokenizer(name, list)  # needs no documents


def make_tokenizer(name: str, documents: Callable[[], Iterable[str]]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run.

    With "bytes", token b is byte b of the text in UTF-8, and any text is decoded exactly. "bpe:N" trains byte pairs
    with GPT-2's word splitting on the documents, which are read twice: N tokens with the special ones, or fewer if the
    text has fewer repeated pairs. Any other name is a model whose tokenizer is used.
    """
    if name == "bytes":
        ids = {character: byte for byte, character in bytes_to_unicode().items()}
        return _finished(_byte_level(models.BPE(vocab=ids, merges=[]), words=False))
    if name.startswith("bpe:"):
        return _finished(_trained(pair_tokens(name), documents))
    tokenizer = load_tokenizer(name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"tokenizer: must be a fast one (with tokenizer.json), got that of {name!r}")
    return tokenizer


def pair_tokens(name: str) -> int:
    """Return N of "bpe:N"."""
    match = re.fullmatch("bpe:([0-9]{1,9})", name)
    if match is None or int(match[1]) < LEAST:
        raise ValueError(f"must be bpe:N with N at least {LEAST}, such as bpe:8192, got {name!r}")
    return int(match[1])


def _trained(size: int, documents: Callable[[], Iterable[str]]) -> Tokenizer:
    """Train byte pairs; the same text gives the same tokenizer."""
    characters = sum(map(len, documents()))
    if not characters:
        raise ValueError(f"tokenizer: bpe:{size} needs text to train on, got none")
    tokenizer = _byte_level(models.BPE(), words=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(documents(), characters), trainer)
    return tokenizer


def _sample(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Yield evenly spaced chunks of documents with that many characters, about `TRAINED_ON` in total."""
    # a chunk is taken while the sample lags behind its share of the text that was read
    sampled = read = 0
    for text in documents:
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            read += len(piece)
            if sampled * characters < read * min(characters, TRAINED_ON):
                sampled += len(piece)
                yield piece


def _byte_level(model: models.BPE, words: bool) -> Tokenizer:
    """Return a tokenizer over bytes; with `words`, pairs stay within words."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Add the special tokens, which no text is encoded as."""
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PADDING,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
