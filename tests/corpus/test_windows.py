"""Windows: tokens of documents, none twice, and where they come from."""

import pytest
import torch

from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.windows import JOINED, open_text, packed, special_tokens, text_name
from tests.helpers.text import WORDS, tokenizer, words


def test_sequences_are_contiguous_and_without_padding():
    ids = packed([words(0, 500)], tokenizer(), sequences=3, length=20).ids
    assert ids.shape == (3, 20) and ids.dtype == torch.int64
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[0]) + 20)) for row in ids)
    assert len({int(row[0]) for row in ids}) == 3


def test_every_sequence_knows_its_document():
    long, short = [words(0, 100), words(100, 200)], [words(n, n + 15) for n in range(200, 300, 15)]
    cut = packed(long, tokenizer(), sequences=4, length=20)
    assert [WORDS["w100"] <= ids[0] for ids in cut.ids] == [document == 1 for document in cut.documents]
    assert packed(iter(long), tokenizer(), sequences=4, length=20).documents == (0, 0, 0, 1)
    assert packed(short, tokenizer(), sequences=3, length=20).documents == (JOINED,) * 3
    assert packed([words(0, 500)], tokenizer(), sequences=3, length=160).documents == (0,) * 3
    assert torch.equal(cut.ids, packed(long, tokenizer(), sequences=4, length=20).ids)


def test_seed_decides_the_choice():
    documents = [words(0, 500)]
    first, again, other = (packed(documents, tokenizer(), sequences=2, length=20, seed=s).ids for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_short_documents_are_joined():
    documents = [words(10 * i, 10 * i + 10) for i in range(10)]
    ids = packed(documents, tokenizer(), sequences=3, length=32).ids
    assert ids.shape == (3, 32)
    assert len(set(ids.flatten().tolist())) == 96  # nothing twice


def test_special_tokens_stand_where_the_tokenizer_puts_them():
    both = tokenizer("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]")
    ids = packed([words(0, 500)], both, sequences=2, length=20).ids
    assert ids[:, 0].tolist() == [0, 0] and ids[:, -1].tolist() == [1, 1]
    assert (ids[:, 1:-1] > 2).all()
    assert special_tokens(both, "no") == ([], [])
    assert special_tokens(both, "yes") == ([0], [])
    with pytest.raises(ValueError, match="needs a beginning-of-sequence token"):
        special_tokens(tokenizer(), "yes")
    with pytest.raises(ValueError, match="auto, yes or no"):
        special_tokens(both, "perhaps")


def test_a_prefix_stands_behind_the_special_tokens():
    both, documents = tokenizer("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]"), [words(0, 500)]
    for prefix in ("w7 w8", [WORDS["w7"], WORDS["w8"]], "[CLS] w7 w8"):  # which may begin with them
        ids = packed(documents, both, sequences=2, length=20, prefix=prefix).ids
        assert ids[:, :3].tolist() == [[0, WORDS["w7"], WORDS["w8"]]] * 2 and ids[:, -1].tolist() == [1, 1]
        assert ids.shape == (2, 20) and len(set(ids[:, 3:-1].flatten().tolist())) == 32
    with pytest.raises(ValueError, match="4 leave.*next to 4"):
        packed(documents, both, sequences=2, length=4, prefix="w7 w8")
    with pytest.raises(ValueError, match="one token"):
        special_tokens(both, "no", "")
    with pytest.raises(ValueError, match="prefix. chat needs a chat template"):
        special_tokens(both, "no", "chat")
    both.chat_template = "{% for m in messages %}[CLS] w1 w2 {{ m.content }} [SEP]{% endfor %}"
    assert special_tokens(both, "auto", "chat") == ([0, WORDS["w1"], WORDS["w2"]], [1])


def test_too_little_text_says_how_much_there_is():
    with pytest.raises(ValueError, match="30 tokens; 2.*20.*40"):
        packed([words(0, 30)], tokenizer(), sequences=2, length=20)
    with pytest.raises(ValueError, match="1.*2 leave.*next to 2"):
        packed([words(0, 30)], tokenizer("[CLS] $A [SEP]"), sequences=1, length=2)


def test_a_long_text_that_is_too_short_is_refused_by_a_sample_of_it():
    documents, seen = [words(0, 500) * 200], []

    class Counting:
        def __init__(self):
            self.inner = tokenizer()
            self.encode = self.inner.encode

        def __call__(self, text, **options):
            seen.append(len(text))
            return self.inner(text, **options)

    with pytest.raises(ValueError, match=r"(9\d|10\d),000 tokens; 7,000.*20.*140,000"):
        packed(documents, Counting(), sequences=7000, length=20)
    assert sum(seen) < len(documents[0]) / 2
    assert packed(documents, Counting(), sequences=4000, length=20).ids.shape == (4000, 20)


def test_any_text_is_read(tmp_path):
    (tmp_path / "a.txt").write_text(words(0, 500))
    source, options = TextSource(str(tmp_path / "a.txt")), {"sequences": 3, "length": 20}
    expected = packed([words(0, 500)], tokenizer(), **options)
    for text in (source, words(0, 500), [words(0, 500)]):
        opened = open_text(text, **options)
        assert not isinstance(opened, torch.Tensor)
        windows = packed(opened, tokenizer(), **options)
        assert torch.equal(windows.ids, expected.ids) and windows.documents == expected.documents
    assert open_text(expected.ids, **options) is expected.ids
    assert [text_name(text) for text in (source, words(0, 9), expected.ids)] == ["a.txt", "own texts", None]
    assert text_name(None) == TextSource().describe()
    with pytest.raises(ValueError, match="5 bytes,.*3 sequences.*20.*60 tokens"):
        open_text("w1 w2", **options)
