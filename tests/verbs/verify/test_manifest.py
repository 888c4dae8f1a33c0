"""A manifest is hostile until it is checked, and is written whole."""

import json

import pytest

from crosslayer import verify
from crosslayer.output import manifest
from tests.helpers.saved import ours, save
from tests.helpers.verifications import by_name, only


@pytest.fixture
def saved(tmp_path):
    return save(ours("svformer"), tmp_path / "model")


def as_text(text):
    return lambda record: text


def with_file(name):
    return lambda record: json.dumps({**record, "files": {name: "0" * 64}})


def with_print(**changes):
    return lambda record: json.dumps({**record, "fingerprint": {**record["fingerprint"], **changes}})


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (as_text("{"), "manifest.json: "),
        (as_text("[]"), "must be an object"),
        (as_text("[" * 100_000), "nested too deeply"),
        (as_text('{"schema": "crosslayer/manifest/2"}'), "schema"),
        (with_file("../secret"), "not a path inside"),
        (with_file("/etc/passwd"), "not a path inside"),
        (with_file("a/../../b"), "not a path inside"),
        (with_file("..\\b"), "not a path inside"),
        (with_print(std=float("nan")), "fingerprint.std"),
        (with_print(logits=[1.0]), "fingerprint.logits"),
        (with_print(ids=["a"]), "fingerprint.ids"),
    ],
)
def test_a_hostile_manifest_is_one_line(saved, hostile, message):
    path = saved / "manifest.json"
    path.write_text(hostile(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"^manifest\.json: ") as error:
        manifest.check_files(saved)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert [row.status for row in verify(saved).checks] == ["FAIL"]


def test_ids_beyond_the_vocabulary_fail(monkeypatch, saved):
    only(monkeypatch)
    path = saved / "manifest.json"
    path.write_text(with_print(ids=[10**6])(json.loads(path.read_text())))
    row = by_name(verify(saved))["manifest: fingerprint"]
    assert row.status == "FAIL" and "vocabulary" in row.reason


def test_a_manifest_is_written_whole_or_not_at_all(monkeypatch, saved):
    before = (saved / "manifest.json").read_text()
    monkeypatch.setattr(manifest.Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        manifest.write_manifest(saved, ours("svformer"))
    assert (saved / "manifest.json").read_text() == before and manifest.check_files(saved) == []
