"""Documents out of files, datasets and the package; what cannot be read is a single clear line."""

import gzip
import json
import lzma
import os
import threading
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from crosslayer import hub
from crosslayer.corpus import files
from crosslayer.corpus.documents import TextSource, load_documents, source_digest, stream_documents
from crosslayer.corpus.domains import check_table_options
from crosslayer.corpus.windows import packed
from tests.helpers.text import tokenizer, words


def test_the_embedded_corpus_has_five_documents():
    documents = list(load_documents(TextSource()))
    assert len(documents) == 5 and sum(map(len, documents)) > 4_000_000


def test_files(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one\n\n<|doc|>\n\ntwo\n")
    assert [d.strip() for d in load_documents(TextSource(str(text)))] == ["one", "two"]
    notes = text.rename(tmp_path / "a.md")
    assert [d.strip() for d in load_documents(TextSource(str(notes)))] == ["one", "two"]
    with pytest.raises(ValueError, match="column.* applies"):
        check_table_options([TextSource(str(notes), column="body")])
    table = tmp_path / "a.jsonl"
    table.write_text("\n".join(json.dumps({"body": t}) for t in ("one", "two")))
    assert load_documents(TextSource(str(table), column="body")) == ["one", "two"]
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert load_documents(TextSource(str(tmp_path / "a.parquet"))) == ["one", "two"]


def test_files_may_be_packed_and_several(tmp_path):
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress("<|doc|>\n\nthrée\n\n<|doc|>\r\n<|doc|>\n\nfour\n".encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n\n{"text": "two"}', mtime=0))
    (tmp_path / "README.md").write_text("no text of a domain")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.txt").write_text("five")
    (tmp_path / "more" / "d.md").write_text("six")
    expected = {
        str(tmp_path): ["one", "two", "thrée", "four", "five", "six"],
        str(tmp_path / "?.txt.*"): ["thrée", "four"],
    }
    for name, documents in expected.items():
        assert load_documents(TextSource(name)) == list(stream_documents(TextSource(name))) == documents
        with pytest.raises(ValueError, match="split"):
            check_table_options([TextSource(name, split="test")])
    check_table_options([TextSource(str(tmp_path), column="body")])
    with pytest.raises(ValueError, match="column"):
        check_table_options([TextSource(str(tmp_path / "b.txt.*"), column="body")])
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["six"]}), tmp_path / "d.parquet")
    (tmp_path / "d.parquet.gz").write_bytes(gzip.compress((tmp_path / "d.parquet").read_bytes()))
    assert load_documents(TextSource(str(tmp_path / "d.parquet.gz"))) == ["six"]


def test_documents_are_read_as_they_are_wanted(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    documents = stream_documents(TextSource(str(tmp_path)))
    assert next(documents) == "one"
    with pytest.raises(ValueError, match="'b.txt' is not UTF-8"):
        next(documents)


def test_what_is_too_long_is_cut_or_refused(tmp_path, monkeypatch):
    """So that a small packed file cannot fill the memory."""
    monkeypatch.setattr(files, "LONGEST", 10)
    (tmp_path / "a.txt").write_text("12345\n123\n1234\n" + "x" * 25)
    assert load_documents(TextSource(str(tmp_path / "a.txt"))) == ["12345\n123", "1234", "x" * 10, "x" * 10, "x" * 5]
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    with pytest.raises(ValueError, match="line 1:.*10 characters"):
        load_documents(TextSource(str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("pack", ["gz", "xz"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_what_unpacks_to_far_more_than_text_is_refused(tmp_path, monkeypatch, pack, kind):
    monkeypatch.setattr(files, "HARMLESS", 2**20)
    bomb = tmp_path / f"bomb.{kind}.{pack}"
    with {"gz": gzip.open, "xz": lzma.open}[pack](bomb, "wb") as file:
        for _ in range(400):
            file.write(b'{"text": "' + b"a" * 2**16 + b'"}\n')
    read = []
    with pytest.raises(ValueError, match=f"'bomb.{kind}.{pack}' unpacks to more than 200 times its size"):
        read.extend(stream_documents(TextSource(str(bomb))))
    assert sum(map(len, read)) < 2**23


def test_reading_long_is_told_and_has_an_end(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n' * 3)
    source = TextSource(str(tmp_path / "a.jsonl"))
    monkeypatch.setattr("crosslayer.corpus.documents.QUIET", 0)
    assert load_documents(source) == ["one two"] * 3
    assert capsys.readouterr().err.splitlines()[-1] == "reading a.jsonl: 0 million characters so far"
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=40))
    with pytest.raises(ValueError, match="a.jsonl"):
        load_documents(source)


@pytest.mark.parametrize("name", ["pipe", "pipe.txt", "/dev/zero"])
def test_what_has_no_end_is_no_source(tmp_path, name):
    if name.startswith("pipe"):
        os.mkfifo(tmp_path / name)
    source = TextSource(str(tmp_path / name))
    for read in (source_digest, lambda source: list(stream_documents(source)), load_documents):
        with pytest.raises(ValueError, match="device.*pipe;.*.txt"):
            read(source)


def test_a_digest_knows_what_a_source_holds(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = source_digest(TextSource(str(tmp_path)))
    assert source_digest(TextSource(str(tmp_path / "*.txt"))) == first != source_digest(TextSource())
    assert source_digest(TextSource(str(file), column="body")) != first
    file.write_text("two")
    assert source_digest(TextSource(str(file))) != first


def _hub_says(monkeypatch, tmp_path, answer):
    """Let the hub answer with a commit or an error, and have an empty cache."""
    asked = []

    def dataset_info(api, name, timeout):
        asked.append((name, timeout))
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(sha=answer)

    monkeypatch.setattr(hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.dataset_revision.cache_clear()
    return asked


def test_a_digest_knows_the_revision_of_a_dataset(tmp_path, monkeypatch):
    digests = []
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        asked = _hub_says(monkeypatch, tmp_path, commit)
        digests.append(source_digest(TextSource("some/set")))
        assert source_digest(TextSource("some/set", split="test")) != digests[-1]
        assert asked == [("some/set", hub.PATIENCE)]  # once a process
    assert digests[0] == digests[2] != digests[1]


def test_without_the_hub_a_dataset_is_the_revision_that_the_cache_has(tmp_path, monkeypatch):
    _hub_says(monkeypatch, tmp_path, "a" * 40)
    online = source_digest(TextSource("some/set"))
    _hub_says(monkeypatch, tmp_path, ConnectionError())
    unknown = source_digest(TextSource("some/set"))
    main = tmp_path / "cache" / "datasets--some--set" / "refs" / "main"
    main.parent.mkdir(parents=True)
    main.write_text("a" * 40)  # as huggingface_hub writes it
    _hub_says(monkeypatch, tmp_path, ConnectionError())
    assert source_digest(TextSource("some/set")) == online != unknown
    asked = _hub_says(monkeypatch, tmp_path, "b" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert source_digest(TextSource("some/set")) == online and not asked


def test_a_hub_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    _hub_says(monkeypatch, tmp_path, "a" * 40)
    monkeypatch.setattr(hub, "PATIENCE", 0.1)
    ended = threading.Event()
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *_, **__: ended.wait(30))
    started = time.monotonic()
    assert hub.dataset_revision("some/set") is None and time.monotonic() - started < 10
    ended.set()


def test_only_a_line_feed_ends_a_row_and_rows_without_text_are_counted(tmp_path, capsys):
    table = tmp_path / "a.jsonl"
    rows = [{"text": "one\u2028two\x85three"}, {"text": None}, {"text": None, "id": 3}]
    table.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert load_documents(TextSource(str(table))) == ["one\u2028two\x85three"]
    assert capsys.readouterr().err == "a.jsonl: skipped 2 rows without text or response\n"
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["one", None]}), tmp_path / "a.parquet")
    assert load_documents(TextSource(str(tmp_path / "a.parquet"))) == ["one"]
    assert capsys.readouterr().err == "a.parquet: skipped 1 row without text or response\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"  \n \n", "holds no text"),
        ("a.txt", b"abc\0def", "binary"),
        ("a.txt", b"\xff\xfe\x41", "binary"),
        ("a.jsonl", b'{"text": 1}', "no text in column 'text'; it holds a value of type int"),
        ("a.jsonl", b'{"body": "x"}', "no text in column 'text', got body"),
        ("a.jsonl", b"not json", "line 1: not JSON"),
        ("a.parquet", b"not parquet", "is not a parquet file"),
        ("a.pdf", b"%PDF", "end in .txt, .md, .jsonl or .parquet"),
        ("a.pdf.gz", b"%PDF", "end in .txt, .md, .jsonl or .parquet"),
        ("a.txt.gz", b"plain", "'a.txt.gz' is damaged or cut short"),
        ("a.txt.gz", gzip.compress(b"some text" * 99, mtime=0)[:-20], "'a.txt.gz' is damaged or cut short"),
        ("a.txt.xz", lzma.compress(b"some text" * 99)[:-20], "'a.txt.xz' is damaged or cut short"),
        ("a.txt.xz", lzma.compress(b"\xff\xfe"), "binary"),
        ("a.txt.xz", lzma.compress(b""), "holds no text"),
        ("a.jsonl.xz", lzma.compress(b"[1]"), "line 1: no text in column 'text'"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_documents(TextSource(str(tmp_path / name)))
    assert "\n" not in str(error.value)


TEXT = "one\ntwo\n\n<|doc|>\nthree\n"
ROWS = "".join(json.dumps({"text": text}) + "\n" for text in ("one\ntwo", "three"))
WRITERS = {  # the same text, as programs of other systems save it
    "mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "windows": lambda text: text.replace("\n", "\r\n").replace("\\n", "\\r\\n").encode(),
    "old mac": lambda text: text.replace("\n", "\r").replace("\\n", "\\r").encode(),
    "all": lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.jsonl", "a.jsonl.xz"])
def test_line_ends_and_byte_order_marks_change_no_document(tmp_path, name, writer):
    content = WRITERS[writer](ROWS if "jsonl" in name else TEXT)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(name[-3:], bytes)
    (tmp_path / name).write_bytes(pack(content))
    assert load_documents(TextSource(str(tmp_path / name))) == ["one\ntwo", "three"]


def test_line_ends_in_tables_change_no_document(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    import pyarrow

    table = {"text": ["one\r\ntwo", "three\rfour"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    rows = datasets.Dataset.from_dict(table).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    _hub_says(monkeypatch, tmp_path, "a" * 40)
    for name in (str(tmp_path / "a.parquet"), "some/set"):
        assert sorted(load_documents(TextSource(name))) == ["one\ntwo", "three\nfour"]


def test_unknown_names(tmp_path):
    with pytest.raises(ValueError, match="not exist"):
        load_documents(TextSource(str(tmp_path / "missing.txt")))
    with pytest.raises(ValueError, match=r"'.*b_\*\.txt'"):
        load_documents(TextSource(str(tmp_path / "b_*.txt")))
    with pytest.raises(ValueError, match="has no text files"):
        load_documents(TextSource(str(tmp_path)))
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    pq.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="column 'text';.*body"):
        load_documents(TextSource(str(tmp_path / "b.parquet")))


def test_a_dataset_is_streamed_and_its_column_checked(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [words(10 * i, 10 * i + 10) for i in range(20)]}).to_iterable_dataset()
    asked = {}

    def load(name, config, split, streaming):
        asked.update(name=name, config=config, split=split, streaming=streaming)
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "ask_hub", lambda *_: None)
    documents = load_documents(TextSource("some/set", "en", "validation"), seed=1)
    assert packed(documents, tokenizer(), sequences=2, length=20).ids.shape == (2, 20)
    assert asked == {"name": "some/set", "config": "en", "split": "validation", "streaming": True}
    assert len(list(stream_documents(TextSource("some/set")))) == 20
    with pytest.raises(ValueError, match="text.*column 'body'"):
        list(load_documents(TextSource("some/set", column="body")))


NAMES = ("C4", "Github", "C4", "C4", "Book")
CHOICE = {"meta.redpajama_set_name": "RedPajamaC4"}


def named_rows():
    """Rows in the layout of SlimPajama."""
    rows = [
        {"text": f"text {number}", "meta": {"redpajama_set_name": f"RedPajama{n}"}} for number, n in enumerate(NAMES)
    ]
    return [*rows, {"text": None, "meta": {"redpajama_set_name": "RedPajamaC4"}}]


@pytest.fixture(params=["jsonl", "jsonl.gz", "parquet", "parquet.xz", "dataset"])
def named(request, tmp_path, monkeypatch):
    """Return the name of a table in the layout of SlimPajama."""
    if request.param == "dataset":
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_list(named_rows()).to_iterable_dataset()
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        _hub_says(monkeypatch, tmp_path, "a" * 40)
        return "some/set"
    path = tmp_path / f"rows.{request.param}"
    if "parquet" in request.param:
        parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(named_rows()), tmp_path / "plain.parquet")
        content = (tmp_path / "plain.parquet").read_bytes()
    else:
        content = "".join(json.dumps(row) + "\n" for row in named_rows()).encode()
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    return str(path)


def test_rows_are_chosen_by_the_values_of_columns(named):
    for read in (load_documents, stream_documents):
        assert sorted(read(TextSource(named, where=CHOICE))) == ["text 0", "text 2", "text 3"]
    assert list(load_documents(TextSource(named, where={**CHOICE, "text": "text 2"}))) == ["text 2"]
    assert len(list(load_documents(TextSource(named)))) == len(NAMES)
    digests = {source_digest(TextSource(named, where=where)) for where in ({}, CHOICE, {"text": "text 2"})}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (
            {"meta.redpajama_set_name": "C4"},
            r"`where` must choose .* got meta\.redpajama_set_name = 'C4', which no row",
        ),
        ({"meta.name": "C4"}, r"no column 'meta\.name' for `where`"),
        ({"subset": "C4"}, "no column 'subset' for `where`; at 'subset' it has .*text"),
        ({"text.name": "C4"}, r"no column 'text\.name' for `where`; at 'name' it has str"),
    ],
)
def test_a_choice_of_nothing_is_refused(named, where, said):
    with pytest.raises(ValueError, match=said) as error:
        list(load_documents(TextSource(named, where=where)))
    assert "\n" not in str(error.value)


def test_plain_text_has_no_columns_to_choose_by(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(ValueError, match=r"`where`.*'a\.txt'.*\.jsonl"):
        load_documents(TextSource(str(tmp_path), where=CHOICE))


@pytest.mark.parametrize("there", [False, True], ids=["away", "there"])
def test_a_dataset_is_waited_for_only_where_the_hub_answers(monkeypatch, there):
    datasets = pytest.importorskip("datasets")
    answer = None if there else ConnectionError()
    seen = []

    def load(*_, **__):
        seen.append(constants.HF_HUB_OFFLINE)
        raise FileNotFoundError("no such set")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "ask_hub", lambda *_: answer)
    with pytest.raises(ValueError, match="'some/set'"):
        load_documents(TextSource("some/set"))
    assert seen == [not there] and not constants.HF_HUB_OFFLINE
