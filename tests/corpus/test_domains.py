"""Domains: text of several kinds, each by its name."""

import re
from pathlib import Path

import pytest

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import EMBEDDED, FIT_ONLY, FITTED, Texts, embedded_domains, shared_out, split_domains
from tests.helpers.text import tokenizer, words

ROOT = Path(__file__).parents[2]


def test_pages_list_the_domains_that_there_are():
    rows = re.findall(r"(?m)^\| `(\w+)` \| .+ \| (yes|no) \|$", (ROOT / "docs" / "start" / "concepts.md").read_text())
    assert rows == [(name, "yes" if name in FITTED else "no") for name in EMBEDDED]
    sources = (ROOT / "crosslayer" / "data" / "SOURCES.md").read_text()
    for name, (archive, files) in {**EMBEDDED, **FIT_ONLY}.items():
        assert f"| {name} | `{archive}`: {', '.join(f'`{file}`' for file in files)} |" in sources


def test_a_shell_names_a_domain_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    source = TextSource.named("laws=a.txt,column=text")
    assert source == TextSource("a.txt", domain="laws") and source.describe() == "laws"
    assert load_documents(source) == ["one"] and Texts.load([source, TextSource.named("a.txt")]).evaluation == (
        "laws",
        "a.txt",
    )
    told = TextSource.named("web=allenai/c4,config=en,split=validation,column=text")
    assert told == TextSource("allenai/c4", "en", "validation", "text", "web")
    assert TextSource.named("a,b.jsonl,column=body") == TextSource("a,b.jsonl", column="body")
    assert TextSource.named("a.jsonl,colour=red").name == "a.jsonl,colour=red"
    (tmp_path / "lang=en").mkdir()
    (tmp_path / "lang=en" / "b.txt").write_text("two")
    for path in ("lang=en", "lang=en/b.txt", "./lang=en/*.txt"):  # which exists, or is no NAME=SOURCE
        assert load_documents(TextSource.named(path)) == ["two"], path


def test_the_embedded_domains():
    """Six domains; the three of the default text of `diagnose` are its five documents, the others are modern."""
    found = embedded_domains()
    assert list(found) == ["books", "science", "speeches", "web", "docs", "code"] and set(FITTED) < set(found)
    assert {name: len(list(documents)) for name, documents in found.items()} == {
        "books": 3, "science": 1, "speeches": 30, "web": 143, "docs": 35, "code": 8
    }  # fmt: skip
    assert {name: len(list(documents)) for name, documents in embedded_domains(FIT_ONLY).items()} == {
        "python": 98, "formulas": 23, "reasoning": 79, "dialogue": 11
    }  # fmt: skip
    old = {document[:200] for document in load_documents(TextSource())}
    assert old == {next(iter(found[name]))[:200] for name in ("science", "speeches")} | {
        d[:200] for d in found["books"]
    }
    assert all(sum(map(len, documents)) > 250_000 for documents in found.values())
    assert not any("personal capacity" in page for page in found["web"])  # no government work, so no licence


def test_several_sources_are_domains_of_their_own(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(words(0, 400) + "\n<|doc|>\n" + words(400, 490))
    sources = [TextSource(str(tmp_path / f"{name}.txt")) for name in ("a", "b")]
    domains = Texts.load(sources).domains
    assert list(domains) == ["a.txt", "b.txt"]
    parts = {"fit": {"a.txt": 3}, "judge": {"a.txt": 2, "b.txt": 4}}
    found = split_domains(domains, tokenizer(), parts=parts, length=10)
    assert found["judge"].domains == ("a.txt",) * 2 + ("b.txt",) * 4 and len(found["fit"]) == 3
    assert not set(found["judge"].documents[:2]) & set(found["judge"].documents[2:])  # numbered anew
    fitted, judging = ({row[0] for row in found[part].by_domain()["a.txt"].tolist()} for part in ("fit", "judge"))
    assert len(fitted) == 3 and len(judging) == 2 and not fitted & judging
    assert {name: len(ids) for name, ids in found["judge"].by_domain().items()} == {"a.txt": 2, "b.txt": 4}
    with pytest.raises(ValueError, match=r"b\.txt:.*\d+"):
        split_domains(domains, tokenizer(), parts={"all": {"a.txt": 2, "b.txt": 999}}, length=10)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.txt").write_text("again")
    with pytest.raises(ValueError, match="texts.*named 'a.txt'"):
        Texts.load([*sources, TextSource(str(tmp_path / "c" / "a.txt"))])
    assert shared_out(8, ["a", "b", "c"]) == {"a": 3, "b": 3, "c": 2}
