"""Samples are those of their seed, fit their length, and have the needle where it was asked for."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosslayer.judge.hidden import ADJECTIVES, KEYS, NOUNS, Drawn, Samples, haystack, prompt_ids, sentences_of, written
from tests.helpers.text import tokenizer
from tests.verbs.needles.oracle import TOKENIZER

WORDS = tokenizer(unk_token="[UNK]")  # a token a word
FRAMED = tokenizer("[CLS] $A [SEP]", unk_token="[UNK]")
LENGTHS, DEPTHS, COUNTS = st.integers(256, 1500), st.integers(0, 100), st.integers(1, 8)


def context(sample):
    return sample.text.split("\n")[1]


@settings(max_examples=40)
@given(LENGTHS, DEPTHS, COUNTS, st.integers(0, 1000), st.sampled_from([WORDS, FRAMED]))
def test_a_sample_is_never_longer_than_asked(length, depth, keys, index, words):
    sample = Samples(words, keys, new_tokens=16).sample(length, depth, index)
    ids = prompt_ids(words, sample.prompt)
    assert len(ids) == sample.tokens <= length - 16 < sample.tokens + 40
    assert ids[0] == 0 if words is FRAMED else ids[0] != 0
    assert 1 not in ids  # nothing that ends a text


@pytest.mark.parametrize("length", [256, 1024])
def test_a_sample_is_nearly_as_long_as_asked(length):
    """It lacks a short sentence at most, where the next fifty are all too long."""
    made = Samples(WORDS)
    lacking = [length - 32 - made.sample(length, 50, index).tokens for index in range(100)]
    assert sum(lacking) / 100 < 1.5 and sum(tokens > 6 for tokens in lacking) <= 2


@settings(max_examples=40)
@given(LENGTHS, DEPTHS, COUNTS, st.integers(0, 1000))
def test_there_is_a_single_answer(length, depth, keys, index):
    sample = Samples(WORDS, keys, new_tokens=16).sample(length, depth, index)
    needles = re.findall(r"One of the special magic numbers for ([\w-]+) is: (\d{7})\.", sample.prompt)
    assert len(needles) == keys == len({key for key, _ in needles}) == len({value for _, value in needles})
    assert (sample.key, sample.value) in needles
    assert sample.others == tuple(value for _, value in needles if value != sample.value)
    assert sample.prompt.count(sample.value) == 1 and sample.prompt.count(sample.key) == 3  # needle, question, prefix
    assert len(re.findall(r"\d{7}", sample.prompt)) == keys
    assert sample.prompt.endswith(f"The special magic number for {sample.key} mentioned in the provided text is")


@settings(max_examples=40)
@given(LENGTHS, DEPTHS, COUNTS, st.integers(0, 1000))
def test_the_needle_stands_where_it_was_asked_for(length, depth, keys, index):
    sample = Samples(WORDS, keys, new_tokens=16).sample(length, depth, index)
    sentences = sentences_of(context(sample))
    at = next(number for number, sentence in enumerate(sentences) if sample.value in sentence)
    assert abs(at - (len(sentences) - 1) * depth / 100) <= 1
    assert at == {0: 0, 100: len(sentences) - 1}.get(depth, at)


def test_needles_stand_at_their_places():
    drawn = Drawn(KEYS[:3], ["1000000", "2000000", "3000000"], [0.0, 0.99], 0)
    sentences = [f"S{number}." for number in range(8)]
    for depth, place in ((0, 0), (50, 5), (99, 9), (100, 10)):
        lines = sentences_of(written(drawn, sentences, depth)[0].split("\n")[1])
        numbers = [place for place, line in enumerate(lines) if "1000000" in line]
        assert numbers == [place] and len(lines) == 11
    assert "2000000" in lines[0] and "3000000" in lines[9]


def test_a_sample_follows_from_its_seed_and_place_alone():
    first = Samples(WORDS)
    expected = {(length, depth, i): first.sample(length, depth, i)
                for length in (256, 512) for depth in (0, 50) for i in range(3)}  # fmt: skip
    again = Samples(WORDS)
    for place in reversed(expected):
        assert again.sample(*place) == expected[place]
    assert (
        len({sample.text for sample in expected.values()}) == len({sample.value for sample in expected.values()}) == 12
    )
    assert Samples(WORDS, seed=1).sample(256, 0, 0).value != expected[256, 0, 0].value
    known = expected[256, 50, 0]
    assert (known.key, known.value) == ("polite-cobbler", "2399066")  # in any process, and in later releases


def test_a_length_without_room_is_refused():
    with pytest.raises(ValueError, match="^length 256.*30 needles"):
        Samples(WORDS, keys=30).sample(256, 0, 0)
    with pytest.raises(ValueError, match="^length 300.*4 needles"):
        Samples(TOKENIZER).sample(300, 0, 0)


def test_a_haystack_that_ends_is_refused(monkeypatch):
    monkeypatch.setattr("crosslayer.judge.hidden.haystack", lambda: haystack()[:20])
    with pytest.raises(ValueError, match="^`lengths`.*100000"):
        Samples(WORDS).sample(100_000, 0, 0)


def test_no_key_is_part_of_another():
    assert len(KEYS) == len(set(KEYS)) == 1600
    assert not [(one, other) for one in ADJECTIVES for other in ADJECTIVES if one != other and other.endswith(one)]
    assert not [(one, other) for one in NOUNS for other in NOUNS if one != other and other.startswith(one)]
    whole = " ".join(haystack()).lower()
    assert not [key for key in KEYS if key in whole] and "special magic" not in whole


def test_sentences_end_where_they_do():
    text = 'Mr. Bennet  saw St. Ives.\n“Did he?” "He did!" A. Smith said so… and left. 3 went on.'
    assert sentences_of(text) == ["Mr. Bennet saw St. Ives.", "“Did he?”", '"He did!"',
                                  "A. Smith said so… and left. 3 went on."]  # fmt: skip
    assert len(haystack()) > 15_000 and all("\n" not in sentence for sentence in haystack())
