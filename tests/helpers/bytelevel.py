"""A byte-level BPE tokenizer, cut as SmolLM2's or another's is, trained on a few sentences."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse,",
    "I thought I'd sail about a little and see the watery part of the world; it's 1851, and there are 12 whales.",
    "  def whale(n):\n\treturn n + 1  # déjà vu, naïve, 日本語",
]
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"llama-bpe": rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}", "qwen2": rf"{LETTERS}|\p{{N}}|{REST}"}


def byte_level(name="smollm", size=400):
    """Return a tokenizer whose words are cut as llama.cpp's `name` says; ids 0 to 2 are special, `size` in all."""
    inner = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = {
        "gpt-2": lambda: plain,
        "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]),
    }
    inner.pre_tokenizer = steps[name]() if name in steps else _split(PATTERNS[name])
    inner.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXT, trainer)
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template="{{ messages[0]['content'] }}",
    )


def _split(pattern):
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
