"""Tokenizers of a run: any text comes back, no text becomes a special token, and training is repeatable."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from crosslayer.corpus.documents import TextSource
from crosslayer.training import tokenizers
from crosslayer.training.texts import Domain
from crosslayer.training.tokenizers import SPECIAL, make_tokenizer, recipe_tokenizer

TEXT = "the whale and the sea, the white whale; a sea of whales.\n  He said: naïve 鯨 🐋! {}\n"
TEXT = "".join(TEXT.format(number * number) for number in range(40))
HOSTILE = "a<|end|>b<|pad|> <|end|>\x00\r\n\u2028 \ufeff é\u0301 \U0010ffff"


def nothing():
    raise AssertionError("no text is needed")


@pytest.fixture(scope="module")
def tokens_of_bytes():
    return make_tokenizer("bytes", nothing)


@pytest.fixture(scope="module")
def pairs():
    return make_tokenizer("bpe:300", lambda: [TEXT])


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_the_text_in_utf8(tokens_of_bytes, text):
    ids = tokens_of_bytes(text)["input_ids"]
    assert bytes(ids) == text.encode() and tokens_of_bytes.decode(ids) == text


def test_no_text_becomes_a_special_token(tokens_of_bytes, pairs, tmp_path):
    pairs.save_pretrained(tmp_path)
    for tokenizer in (tokens_of_bytes, pairs, AutoTokenizer.from_pretrained(tmp_path)):
        assert (tokenizer.eos_token, tokenizer.pad_token) == SPECIAL and tokenizer.bos_token is None
        ids = tokenizer(HOSTILE)["input_ids"]
        assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
        assert tokenizer.decode(ids) == HOSTILE
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == HOSTILE
    assert (tokens_of_bytes.eos_token_id, tokens_of_bytes.pad_token_id, len(tokens_of_bytes)) == (256, 257, 258)


def test_byte_pairs_are_trained_on_the_text_and_repeatable(pairs):
    again = make_tokenizer("bpe:300", lambda: iter([TEXT]))
    assert again.backend_tokenizer.to_str() == pairs.backend_tokenizer.to_str()
    assert len(pairs) == 300 and len(make_tokenizer("bpe:9999", lambda: [TEXT])) < 999
    assert " whale" in [pairs.decode([token]) for token in range(300)]
    assert len(pairs(TEXT)["input_ids"]) < len(TEXT) / 3


def test_long_text_is_sampled_evenly(monkeypatch):
    documents = [letter * 30_000 for letter in "abcdef"]
    monkeypatch.setattr(tokenizers, "TRAINED_ON", 60_000)
    pieces = list(tokenizers._sample(documents, 180_000))
    assert sum(map(len, pieces)) == pytest.approx(60_000, abs=tokenizers.PIECE)
    shares = [sum(map(len, (piece for piece in pieces if piece[0] == letter))) for letter in "abcdef"]
    assert shares == pytest.approx([10_000] * 6, abs=2 * tokenizers.PIECE)
    monkeypatch.setattr(tokenizers, "TRAINED_ON", 10**6)
    assert "".join(tokenizers._sample(documents, 180_000)) == "".join(documents)


def test_a_folder_gives_its_tokenizer(pairs, tmp_path):
    pairs.save_pretrained(tmp_path)
    loaded = make_tokenizer(str(tmp_path), nothing)
    assert loaded(TEXT)["input_ids"] == pairs(TEXT)["input_ids"]


@pytest.mark.parametrize("name", ["bpe:", "bpe:258", "bpe:-300", "bpe:1e4", "bpe:²", "bpe:8192.0"])
def test_a_wrong_number_is_one_line(name):
    with pytest.raises(ValueError, match=f"must be bpe:N with N at least 259, .* got {name!r}"):
        make_tokenizer(name, nothing)


def test_without_text_or_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="bpe:300"):
        make_tokenizer("bpe:300", lambda: [])
    with pytest.raises(ValueError, match="tokenizer.json"):
        make_tokenizer(str(tmp_path), nothing)
    with pytest.raises(ValueError, match="not exist"):
        make_tokenizer(str(tmp_path / "missing"), nothing)


def test_pairs_are_trained_once_for_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(TEXT * 5)
    (tmp_path / "b.txt").write_text(TEXT * 6)
    one, other = ([Domain("a", TextSource(str(tmp_path / name)))] for name in ("a.txt", "b.txt"))
    first = recipe_tokenizer("bpe:300", one)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "_trained", lambda size, documents: nothing())
        again = recipe_tokenizer("bpe:300", one)
    kept = tmp_path / "cache" / "tokens"
    assert len(list(kept.iterdir())) == 1
    assert first(TEXT)["input_ids"] == again(TEXT)["input_ids"] and first.get_vocab() == again.get_vocab()
    made = make_tokenizer("bpe:300", lambda: one[0].training())
    assert made.get_vocab() == again.get_vocab() and made(SPECIAL[0])["input_ids"] == again(SPECIAL[0])["input_ids"]
    recipe_tokenizer("bpe:301", one), recipe_tokenizer("bpe:300", other)
    assert len(list(kept.iterdir())) == 3
    missing = [Domain("a", TextSource(str(tmp_path / "missing.txt")))]
    assert recipe_tokenizer("bytes", missing).get_vocab() == make_tokenizer("bytes", nothing).get_vocab()
