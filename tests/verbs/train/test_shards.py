"""Shards: the tokens of the tokenizer, reused if the fingerprint matches, refused by name if damaged."""

import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers.normalizers import Replace

from crosslayer.training import shards as module
from crosslayer.training.shards import fingerprint, open_shards, tokenise
from crosslayer.training.tokenizers import make_tokenizer
from tests.helpers.text import tokenizer as word_tokenizer
from tests.helpers.text import words

TEXTS = ["one", "  \n", "two <|end|> 鯨", "", "three\n" * 50]
KEPT = [text for text in TEXTS if text.strip()]
BYTES = make_tokenizer("bytes", lambda: [])


def write(folder, documents=TEXTS, tokenizer=BYTES, fingerprint="f"):
    return tokenise(documents, tokenizer, folder, fingerprint=fingerprint)


def unread():
    raise AssertionError("the text is read although its tokens are there")
    yield


def documents_of(shards):
    starts = [*shards.starts(0, shards.tokens), shards.tokens]
    ids = shards.read(0, shards.tokens)
    return [ids[start:stop].tolist() for start, stop in zip(starts, starts[1:], strict=False)]


def test_documents_are_their_tokens_and_the_end(tmp_path):
    shards = write(tmp_path / "s", iter(TEXTS))
    assert documents_of(shards) == [[*text.encode(), BYTES.eos_token_id] for text in KEPT]
    assert (shards.documents, shards.fingerprint, shards.dtype) == (3, "f", "uint16")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ends.bin", "index.json", "s", "tokens.bin"]


def test_documents_begin_and_end_as_the_tokenizer_has_them(tmp_path):
    both = word_tokenizer("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]")
    both.backend_tokenizer.enable_truncation(4)
    both.backend_tokenizer.enable_padding(length=9)
    assert documents_of(write(tmp_path / "both", [words(0, 6), "w9"], both)) == [[0, *range(3, 9), 1], [0, 12, 1]]
    plain = word_tokenizer()
    assert documents_of(write(tmp_path / "plain", [words(0, 3)], plain)) == [[3, 4, 5]]


def test_any_tokens_are_read_however_the_text_was_cut(tmp_path, monkeypatch):
    whole = write(tmp_path / "whole")
    monkeypatch.setattr(module, "SAVED", 7)
    monkeypatch.setattr(module, "BATCH", 5)
    monkeypatch.setattr(module, "PART", 3)
    split = write(tmp_path / "split")
    ids, starts = whole.read(0, whole.tokens), whole.starts(0, whole.tokens)
    for start, count in [(0, 1), (6, 2), (7, 7), (3, 40), (split.tokens - 1, 1), (0, split.tokens)]:
        assert split.read(start, count).tolist() == ids[start : start + count].tolist()
        inside = starts[(starts >= start) & (starts < start + count)] - start
        assert split.starts(start, count).tolist() == inside.tolist()
    assert split.read(0, 3).dtype == np.int64


def test_a_large_vocabulary_takes_more_bytes(tmp_path):
    large = word_tokenizer()
    large.add_tokens([f"x{number}" for number in range(70_000)])
    shards = write(tmp_path / "s", ["w1 x69999"], large)
    assert (shards.dtype, documents_of(shards)) == ("uint32", [[4, len(large) - 1]])


def test_a_long_document_is_cut_before_words_and_stays_a_document(tmp_path, monkeypatch):
    pairs = make_tokenizer("bpe:400", lambda: [words(0, 400)])
    expected = documents_of(write(tmp_path / "whole", [words(0, 400), "w1"], pairs))
    monkeypatch.setattr(module, "BATCH", 150)
    monkeypatch.setattr(module, "PART", 50)
    assert documents_of(write(tmp_path / "cut", [words(0, 400), "w1"], pairs)) == expected


def test_tokens_are_reused_if_the_fingerprint_is_the_same(tmp_path):
    first = write(tmp_path / "s")
    assert write(tmp_path / "s", unread()) == first
    second = write(tmp_path / "s", ["other"], fingerprint="g")
    assert (second.documents, second.fingerprint) == (1, "g")


def test_existing_tokens_need_no_writing(tmp_path, monkeypatch):
    """They may be on a read-only disk."""
    first = write(tmp_path / "s")
    monkeypatch.setattr(module, "exclusive", None)
    assert write(tmp_path / "s", unread()) == first


def test_the_fingerprint_knows_text_and_tokenizer():
    prints = {fingerprint(text, tokenizer) for text in "ab" for tokenizer in (BYTES, word_tokenizer())}
    ended = word_tokenizer(eos_token="[SEP]")
    assert len(prints | {fingerprint("a", ended)}) == 5
    assert fingerprint("a", make_tokenizer("bytes", lambda: [])) in prints


def test_pickled_shards_contain_no_tokens(tmp_path):
    shards = write(tmp_path / "s", ["x" * 10**5])
    shards.read(0, 10), shards.starts(0, 10)
    sent = pickle.dumps(shards)
    assert len(sent) < 1000
    assert pickle.loads(sent) == shards and documents_of(pickle.loads(sent)) == documents_of(shards)


def _cut(folder):
    os.truncate(folder / "tokens.bin", 100)


def _index(**changes):
    def change(folder):
        index = json.loads((folder / "index.json").read_text())
        (folder / "index.json").write_text(json.dumps(index | changes))

    return change


DAMAGES = {
    "'index.json' is missing": (lambda folder: (folder / "index.json").unlink(), "is not a folder of tokens"),
    "truncated": (_cut, r"tokens.bin of 's' must have \d+ bytes, got 100; delete the folder"),
    "ends changed": (lambda folder: (folder / "ends.bin").write_bytes(b"\1" * 24), "ends.bin of 's' does not match"),
    "missing": (lambda folder: (folder / "ends.bin").unlink(), "ends.bin of 's' is missing"),
    "no JSON": (lambda folder: (folder / "index.json").write_text("{"), "index.json of 's': Invalid JSON"),
    "another format": (_index(schema="crosslayer/shards/9"), "index.json of 's': schema must be"),
    "more documents": (_index(documents=4), "ends.bin of 's' must have 32 bytes, got 24"),
    "no tokens": (_index(tokens=0), "index.json of 's': tokens must be"),
    "more tokens": (_index(tokens=1000), "tokens.bin of 's' must have 2,000 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_refused_by_name(tmp_path, damage):
    write(tmp_path / "s")
    change, message = DAMAGES[damage]
    change(tmp_path / "s")
    for attempt in (open_shards, write):
        with pytest.raises(ValueError, match=message) as error:
            attempt(tmp_path / "s")
        assert "\n" not in str(error.value)


def test_opening_reads_no_tokens(tmp_path, monkeypatch):
    """Every process of a run opens all shards of all domains."""
    write(tmp_path / "s")
    read, opened = Path.open, []
    monkeypatch.setattr(
        Path, "open", lambda path, *args, **options: opened.append(path) or read(path, *args, **options)
    )
    shards = open_shards(tmp_path / "s")
    assert [path.name for path in opened] == ["index.json"] and shards.tokens


def test_ends_that_do_not_match_are_refused(tmp_path):
    shards = write(tmp_path / "s")
    for ends in ([5, 4, shards.tokens], [1, 2, 3], [-9, 4, shards.tokens], [1, 1, shards.tokens]):
        (tmp_path / "s" / "ends.bin").write_bytes(np.array(ends, dtype="<i8").tobytes())
        with pytest.raises(ValueError, match="ends.bin.*'s'"):
            open_shards(tmp_path / "s")


def test_another_folder_is_not_changed(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="'s'.*folder.*tokens"):
        write(tmp_path / "s")
    assert (tmp_path / "s" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "there is no text"),
        (["", " \n"], "there is no text"),
        (["a", 3], "document 1 must be text, got int"),
        (["a", "b\ud800"], "document 1 contains a lone surrogate"),
    ],
)
def test_wrong_documents_leave_no_folder(tmp_path, documents, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "s", documents)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_line_and_leaves_no_folder(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "sync", full)
    with pytest.raises(ValueError, match="/s' cannot.*written"):
        write(tmp_path / "s")
    assert not list(tmp_path.iterdir())


LONG = [words(number, number + 9) for number in range(12)]
FRAMED = word_tokenizer("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]")


def interrupted(documents, after):
    yield from documents[:after]
    raise KeyboardInterrupt


@pytest.fixture
def small_files(monkeypatch):
    """Parts and batches of a few tokens, saved often; gives the texts that are encoded."""
    monkeypatch.setattr(module, "SAVED", 10)
    monkeypatch.setattr(module, "BATCH", 20)
    monkeypatch.setattr(module, "PART", 10)
    encoded, encoder = [], module.encoder

    def noted(tokenizer):
        def noting(batch):
            encoded.extend(piece.text for piece in batch)
            return encoder(tokenizer)(batch)

        return noting

    monkeypatch.setattr(module, "encoder", noted)
    return encoded


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("parts", [1, 2])
def test_an_interrupted_tokenisation_continues_with_the_same_bytes(tmp_path, small_files, parts, capsys):
    def cut(documents, folder):
        tokenise(documents, FRAMED, folder, fingerprint="f", parts=parts)

    cut(LONG, tmp_path / "whole")
    whole = len("".join(small_files))
    for after in range(1, len(LONG)):
        small_files.clear()
        with pytest.raises(KeyboardInterrupt):
            cut(interrupted(LONG, after), tmp_path / "s")
        assert not (tmp_path / "s").exists()
        with pytest.raises(KeyboardInterrupt):  # a second time, later
            cut(interrupted(LONG, after + 1), tmp_path / "s")
        cut(LONG, tmp_path / "s")
        assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")
        assert len("".join(small_files)) < whole + 80  # of each interruption at most 40 characters again
        assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "whole"]
        shutil.rmtree(tmp_path / "s")
    assert "continuing after" in capsys.readouterr().err


def test_a_text_takes_two_descriptors(tmp_path, small_files):
    """A process may have 1,024, and a run many domains."""
    before = len(os.listdir("/dev/fd"))
    shards = write(tmp_path / "s", LONG * 10, FRAMED)
    shards.read(0, shards.tokens)
    assert len(os.listdir("/dev/fd")) <= before + 2


def test_text_without_tokens_at_the_end_is_no_document(tmp_path, small_files):
    unknown = word_tokenizer()
    unknown.backend_tokenizer.normalizer = Replace("nothing", "")
    shards = write(tmp_path / "s", [words(0, 12), "nothing", "nothing " * 3], unknown)
    assert (shards.tokens, shards.documents) == (12, 1)
    assert sorted(files_of(tmp_path / "s")) == ["ends.bin", "index.json", "tokens.bin"]


def _changed(folder):
    state = json.loads((folder / "begun.json").read_text())
    (folder / "begun.json").write_text(json.dumps(state | {"pieces": "1"}))


@pytest.mark.parametrize("change", [_changed, lambda folder: os.truncate(folder / "tokens.bin", 1), None])
def test_other_unfinished_files_are_discarded(tmp_path, small_files, change):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "s", interrupted(LONG, 6), FRAMED, "f" if change else "g")
    if change:
        change(tmp_path / ".s.crosslayer-begun")
    small_files.clear()
    write(tmp_path / "s", LONG, FRAMED)
    assert "".join(small_files) == "".join(LONG)
    assert documents_of(open_shards(tmp_path / "s")) == documents_of(write(tmp_path / "t", LONG, FRAMED))


def test_the_number_of_threads_does_not_change_the_files(tmp_path, monkeypatch):
    for threads in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
        write(tmp_path / threads, LONG * 50, FRAMED)
    assert files_of(tmp_path / "true") == files_of(tmp_path / "false")


def test_the_text_is_read_by_the_first_of_several_processes(tmp_path):
    """Threads, since the lock holds between them as between processes."""
    readers = []

    def documents(number):
        readers.append(number)
        yield from TEXTS

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda number: write(tmp_path / "s", documents(number)), range(3)))
    assert len(readers) == 1 and len(set(results)) == 1
