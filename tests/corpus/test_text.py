"""Text in, token sequences out."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import FITTED, embedded_domains, load_domains, shared_out, split_domains
from crosslayer.corpus.windows import JOINED, pack, packed, special_tokens

WORDS = {word: i for i, word in enumerate(["[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(500)), "a"])}


def tokenizer(template=None, **special):
    inner = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        tokens = [("[CLS]", 0), ("[SEP]", 1)]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def words(start, stop):
    return " ".join(f"w{i}" for i in range(start, stop))


def test_sequences_are_contiguous_and_without_padding():
    ids = pack([words(0, 500)], tokenizer(), sequences=3, length=20)
    assert ids.shape == (3, 20) and ids.dtype == torch.int64
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[0]) + 20)) for row in ids)
    assert len({int(row[0]) for row in ids}) == 3


def test_every_sequence_knows_its_document():
    long, short = [words(0, 100), words(100, 200)], [words(n, n + 15) for n in range(200, 300, 15)]
    found = packed(long, tokenizer(), sequences=4, length=20)
    assert [WORDS["w100"] <= ids[0] for ids in found.ids] == [document == 1 for document in found.documents]
    assert packed(iter(long), tokenizer(), sequences=4, length=20).documents == (0, 0, 0, 1)
    assert packed(short, tokenizer(), sequences=3, length=20).documents == (JOINED,) * 3
    assert packed([words(0, 500)], tokenizer(), sequences=3, length=160).documents == (0,) * 3
    assert torch.equal(found.ids, pack(long, tokenizer(), sequences=4, length=20))


def test_seed_decides_the_choice():
    documents = [words(0, 500)]
    one, again, other = (pack(documents, tokenizer(), sequences=2, length=20, seed=s) for s in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_short_documents_are_joined():
    documents = [words(10 * i, 10 * i + 10) for i in range(10)]
    ids = pack(documents, tokenizer(), sequences=3, length=32)
    assert ids.shape == (3, 32)
    assert len(set(ids.flatten().tolist())) == 96  # nothing twice


def test_special_tokens_stand_where_the_tokenizer_puts_them():
    both = tokenizer("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]")
    ids = pack([words(0, 500)], both, sequences=2, length=20)
    assert ids[:, 0].tolist() == [0, 0] and ids[:, -1].tolist() == [1, 1]
    assert (ids[:, 1:-1] > 2).all()
    assert special_tokens(both, "no") == ([], [])
    assert special_tokens(both, "yes") == ([0], [])
    with pytest.raises(ValueError, match="no beginning-of-sequence token"):
        special_tokens(tokenizer(), "yes")
    with pytest.raises(ValueError, match="auto, yes or no"):
        special_tokens(both, "perhaps")


def test_too_little_text_says_how_much_there_is():
    with pytest.raises(ValueError, match=r"the text has 30 tokens; 2 sequences of 20 need 40"):
        pack([words(0, 30)], tokenizer(), sequences=2, length=20)
    with pytest.raises(ValueError, match="no room"):
        pack([words(0, 30)], tokenizer("[CLS] $A [SEP]"), sequences=1, length=2)


def test_the_embedded_corpus_has_five_documents():
    documents = list(load_documents(TextSource()))
    assert len(documents) == 5 and sum(map(len, documents)) > 4_000_000


def test_the_embedded_domains():
    """Six domains; the three of the default text of `diagnose` are its five documents, the others are modern."""
    found = embedded_domains()
    assert list(found) == ["books", "science", "speeches", "web", "docs", "code"] and set(FITTED) < set(found)
    assert {name: len(list(documents)) for name, documents in found.items()} == {
        "books": 3, "science": 1, "speeches": 30, "web": 143, "docs": 35, "code": 8
    }  # fmt: skip
    old = {document[:200] for document in load_documents(TextSource())}
    assert old == {next(iter(found[name]))[:200] for name in ("science", "speeches")} | {
        d[:200] for d in found["books"]
    }
    assert all(sum(map(len, documents)) > 250_000 for documents in found.values())
    assert not any("in a personal capacity" in page for page in found["web"])  # no government work, so no licence


def test_several_sources_are_domains_of_their_own(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(words(0, 400) + "\n<|doc|>\n" + words(400, 490))
    sources = [TextSource(str(tmp_path / f"{name}.txt")) for name in ("a", "b")]
    domains = load_domains(sources)
    assert list(domains) == ["a.txt", "b.txt"]
    parts = {"fit": {"a.txt": 3}, "judge": {"a.txt": 2, "b.txt": 4}}
    found = split_domains(domains, tokenizer(), parts=parts, length=10)
    assert found["judge"].domains == ("a.txt",) * 2 + ("b.txt",) * 4 and len(found["fit"]) == 3
    assert not set(found["judge"].documents[:2]) & set(found["judge"].documents[2:])  # numbered anew
    fitted, judging = ({row[0] for row in found[part].by_domain()["a.txt"].tolist()} for part in ("fit", "judge"))
    assert len(fitted) == 3 and len(judging) == 2 and not fitted & judging
    assert {name: len(ids) for name, ids in found["judge"].by_domain().items()} == {"a.txt": 2, "b.txt": 4}
    with pytest.raises(ValueError, match=r"b\.txt: the text gives \d+ windows"):
        split_domains(domains, tokenizer(), parts={"all": {"a.txt": 2, "b.txt": 999}}, length=10)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.txt").write_text("again")
    with pytest.raises(ValueError, match="two texts are called 'a.txt'"):
        load_domains([*sources, TextSource(str(tmp_path / "c" / "a.txt"))])
    assert shared_out(8, ["a", "b", "c"]) == {"a": 3, "b": 3, "c": 2}


def test_files(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one\n\n<|doc|>\n\ntwo\n")
    assert [d.strip() for d in load_documents(TextSource(str(text)))] == ["one", "two"]
    table = tmp_path / "a.jsonl"
    table.write_text("\n".join(json.dumps({"body": t}) for t in ("one", "two")))
    assert load_documents(TextSource(str(table), column="body")) == ["one", "two"]
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert load_documents(TextSource(str(tmp_path / "a.parquet"))) == ["one", "two"]


def test_only_a_line_feed_ends_a_row_and_rows_without_text_are_counted(tmp_path, capsys):
    table = tmp_path / "a.jsonl"
    rows = [{"text": "one\u2028two\x85three"}, {"text": None}, {"text": None, "id": 3}]
    table.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert load_documents(TextSource(str(table))) == ["one\u2028two\x85three"]
    assert capsys.readouterr().err == "a.jsonl: skipped 2 rows without text\n"
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["one", None]}), tmp_path / "a.parquet")
    assert load_documents(TextSource(str(tmp_path / "a.parquet"))) == ["one"]
    assert capsys.readouterr().err == "a.parquet: skipped 1 row without text\n"


def test_a_long_text_that_is_too_short_is_refused_by_a_sample_of_it():
    documents, seen = [words(0, 500) * 200], []

    class Counting:
        def __init__(self):
            self.inner = tokenizer()
            self.encode = self.inner.encode

        def __call__(self, text, **options):
            seen.append(len(text))
            return self.inner(text, **options)

    with pytest.raises(
        ValueError, match=r"the text has about (9\d|10\d),000 tokens; 7,000 sequences of 20 need 140,000"
    ):
        pack(documents, Counting(), sequences=7000, length=20)
    assert sum(seen) < len(documents[0]) / 2
    assert pack(documents, Counting(), sequences=4000, length=20).shape == (4000, 20)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"  \n \n", "is empty"),
        ("a.txt", b"abc\0def", "binary"),
        ("a.txt", b"\xff\xfe\x41", "binary"),
        ("a.jsonl", b'{"text": 1}', "no text in column 'text'; it has text"),
        ("a.jsonl", b'{"body": "x"}', "no text in column 'text'; it has body"),
        ("a.jsonl", b"not json", "line 1: not JSON"),
        ("a.parquet", b"not parquet", "is not a parquet file"),
        ("a.pdf", b"%PDF", "end in .txt, .jsonl or .parquet"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_documents(TextSource(str(tmp_path / name)))
    assert "\n" not in str(error.value)


def test_unknown_names(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_documents(TextSource(str(tmp_path / "missing.txt")))
    with pytest.raises(ValueError, match="is a folder"):
        load_documents(TextSource(str(tmp_path)))
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    pq.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="no column 'text'; it has body"):
        load_documents(TextSource(str(tmp_path / "b.parquet")))


def test_a_dataset_is_streamed_and_its_column_checked(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [words(10 * i, 10 * i + 10) for i in range(20)]}).to_iterable_dataset()
    asked = {}

    def load(name, config, split, streaming):
        asked.update(name=name, config=config, split=split, streaming=streaming)
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    documents = load_documents(TextSource("some/set", "en", "validation"), seed=1)
    assert pack(documents, tokenizer(), sequences=2, length=20).shape == (2, 20)
    assert asked == {"name": "some/set", "config": "en", "split": "validation", "streaming": True}
    with pytest.raises(ValueError, match="column 'body' is not there; it has text"):
        list(load_documents(TextSource("some/set", column="body")))
