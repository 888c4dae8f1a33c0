"""A tokenizer of words, and texts for it."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = {word: i for i, word in enumerate(["[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(500)), "a"])}


def tokenizer(template=None, **special):
    """Return a tokenizer whose tokens are the words w0 … w499; `template` says where special tokens stand."""
    inner = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        tokens = [("[CLS]", 0), ("[SEP]", 1)]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def words(start, stop):
    """Return a text of the words from w<start> to before w<stop>."""
    return " ".join(f"w{i}" for i in range(start, stop))
