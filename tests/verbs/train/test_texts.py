"""Domains: held-out text is not trained on, nothing is lost, and text is tokenised once."""

import gzip
import importlib
import json
import lzma
import random
import string
from typing import ClassVar

import pytest

from crosslayer.corpus.documents import TextSource
from crosslayer.output.progress import metered_by
from crosslayer.training import shards, texts
from crosslayer.training.texts import Domain
from crosslayer.training.tokenizers import make_tokenizer
from tests.helpers.daily import daily
from tests.helpers.text import words

BYTES = make_tokenizer("bytes", lambda: [])


def domain(folder, documents, **options):
    file = folder / "text.txt"
    file.write_text("\n\n<|doc|>\n\n".join(documents))
    return Domain("web pages", TextSource(str(file)), **options)


def test_every_20th_document_is_held_out(tmp_path):
    documents = [f"document {number}" for number in range(50)]
    parts = domain(tmp_path, documents)
    assert list(parts.held_out()) == [documents[number] for number in (3, 23, 43)]
    assert list(parts.training()) == [text for text in documents if text not in set(parts.held_out())]


def test_every_20th_chunk_of_long_documents_is_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "PIECE", 100)
    documents = [words(0, 400), "short", words(100, 400)]
    parts = domain(tmp_path, documents)
    training, held_out = list(parts.training()), list(parts.held_out())
    assert len(held_out) == 2 and all(90 < len(text) < 110 for text in held_out)
    assert len(training) == 5  # each held-out piece parts a document in two
    assert training[0] + held_out[0] + training[1] == documents[0] and training[2] == "short"
    assert training[3] + held_out[1] + training[4] == documents[2]
    assert all(text.split(" ")[0] in ("", "w0", "w100", "short") for text in training + held_out)  # cut before words


def test_a_source_of_its_own_leaves_the_text_whole(tmp_path):
    (tmp_path / "held.txt").write_text("judge")
    parts = domain(tmp_path, ["one", "two", "three", "four"], validation=TextSource(str(tmp_path / "held.txt")))
    assert list(parts.training()) == ["one", "two", "three", "four"] and list(parts.held_out()) == ["judge"]
    training, held_out = parts.shards(BYTES, tmp_path / "shards")
    assert (training.documents, held_out.documents) == (4, 1)


def test_a_text_is_tokenised_once_and_again_when_it_changes(tmp_path):
    parts = domain(tmp_path, ["one", "two", "three", "four", "five"])
    training, held_out = parts.shards(BYTES, tmp_path / "shards")
    assert (training.tokens, held_out.tokens) == (len("onetwothreefive") + 4, len("four") + 1)
    assert parts.shards(BYTES, tmp_path / "shards") == (training, held_out)
    assert len(list((tmp_path / "shards").iterdir())) == 2
    other = domain(tmp_path, ["one", "two", "three", "four", "six"]).shards(BYTES, tmp_path / "shards")
    assert not {one.fingerprint for one in other} & {training.fingerprint, held_out.fingerprint}
    assert training.folder.name.startswith("web-pages-training-")


class Noted:
    """A meter that records its tasks."""

    tasks: ClassVar[list[tuple[str, int, list[int]]]] = []

    def __init__(self, task, total=0):
        self.tasks.append((task, total, []))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def step(self, done, total, doing=""):
        assert total == self.tasks[-1][1]
        self.tasks[-1][2].append(done)


@pytest.mark.parametrize("kind", daily(["txt", "txt.gz", "jsonl", "jsonl.xz", "parquet"], "txt.gz", "parquet"))
def test_progress_of_files_is_a_percentage(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(shards, "BATCH", 10_000)
    monkeypatch.setattr(Noted, "tasks", [])
    draw = random.Random(0)  # what does not pack well, so that packed files are long enough
    documents = ["".join(draw.choices(string.ascii_letters, k=5_000)) for _ in range(100)]
    for number in range(2):
        file = tmp_path / f"{number}.{kind}"
        if kind == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            table = pyarrow.table({"text": documents})
            importlib.import_module("pyarrow.parquet").write_table(table, file)
        else:
            lines = [json.dumps({"text": text}) if "jsonl" in kind else text for text in documents]
            content = ("\n" if "jsonl" in kind else "\n<|doc|>\n").join(lines).encode()
            file.write_bytes({"gz": gzip.compress, "xz": lzma.compress}.get(kind.split(".")[-1], bytes)(content))
    Domain("web", TextSource(str(tmp_path))).shards(BYTES, tmp_path / "shards")
    assert not Noted.tasks
    with metered_by(Noted):
        Domain("web", TextSource(str(tmp_path)), every=5).shards(BYTES, tmp_path / "shards")
    for split, (task, total, steps) in zip(("training", "validation"), Noted.tasks, strict=True):
        assert task.startswith(f"tokenizing web-{split}-") and task.endswith(" (%)") and total == 100
        assert steps == sorted(steps) and steps[0] < 60 and steps[-1] == 100
        assert len(set(steps)) > (1 if kind == "parquet" else 10)


def test_progress_of_other_sources_counts_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(Noted, "tasks", [])
    with metered_by(Noted):
        shards = Domain("science", TextSource()).shards(BYTES, tmp_path / "shards")
    for split, (task, total, steps) in zip(shards, Noted.tasks, strict=True):
        assert task == f"tokenizing {split.folder.name}" and total == 0 and steps[-1] == split.documents


def test_embedded_domains_by_name():
    science, everything = Domain("science", TextSource()), Domain("all", TextSource())
    training, held_out = "".join(science.training()), "".join(science.held_out())
    assert 16_000 < len(held_out) < 60_000 < len(training) < 10**6 and "Refrangibility" in training
    assert science.digest() != everything.digest()


@pytest.mark.parametrize(
    ("documents", "message"),
    [(["one", "two"], "web pages: the text is too short to hold out a chunk"), ([], "empty")],
)
def test_text_that_cannot_be_split_is_refused(tmp_path, documents, message):
    with pytest.raises(ValueError, match=message):
        domain(tmp_path, documents).shards(BYTES, tmp_path / "shards")
    with pytest.raises(ValueError, match="web: text file '.*' does not exist"):
        Domain("web", TextSource(str(tmp_path / "missing.txt"))).shards(BYTES, tmp_path / "shards")
