"""Documents out of files, datasets and the package; what cannot be read is a single clear line."""

import json

import pytest

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import pack
from tests.helpers.text import tokenizer, words


def test_the_embedded_corpus_has_five_documents():
    documents = list(load_documents(TextSource()))
    assert len(documents) == 5 and sum(map(len, documents)) > 4_000_000


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
