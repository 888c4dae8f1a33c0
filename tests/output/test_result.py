"""What every result can do: it is saved, loaded again equal, and shown in a notebook; a record is hostile."""

import dataclasses
import html
import json
import os
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from crosslayer.output.page import Page
from crosslayer.output.panel import Line, Panel
from crosslayer.output.record import DEEPEST, Measure, read_record
from crosslayer.output.result import Result, load_as

SCHEMA = "crosslayer/small/2"


class Small(Result):
    schema_: Literal["crosslayer/small/2"] = Field(SCHEMA, alias="schema")
    model: str
    norm: Measure

    def layout(self):
        panel = Panel("norm", "Norm", "It rises.", "layer", "norm", [Line("norm", [0, 1], self.norm.mean)])
        table = ("t", ["x"], [["&"]])
        return Page(f"About {self.model}", "a <b>", [("a", "1", "b")], ["it's"], [panel], [table], [])

    def headline(self):
        return {"model": self.model}


class Other(Small):
    schema_: Literal["crosslayer/other/1"] = Field("crosslayer/other/1", alias="schema")


@pytest.fixture
def small():
    return Small(model="<script>", norm={"mean": [1.5, None], "ci95": None, "n": 1})


def load(folder):
    return load_as((Other, Small), folder)


def write(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "record.json").write_text(text)
    return folder


def test_a_result_is_saved_and_loaded_again_equal(small, tmp_path):
    page = small.save(tmp_path / "out")
    assert page == tmp_path / "out" / "report.html" and page.read_text() == small.page()
    assert json.loads((tmp_path / "out" / "record.json").read_text()) == small.record()
    assert small.record()["schema"] == SCHEMA and (tmp_path / "out" / "figures" / "norm.svg").is_file()
    loaded = load(tmp_path / "out")
    assert loaded == small and type(loaded) is Small and loaded.page() == small.page()
    with pytest.raises(ValueError, match="exists"):
        small.save(tmp_path / "out")
    assert small.save(tmp_path / "out", force=True) == page


class Named(Small):
    def layout(self):
        page = super().layout()
        return dataclasses.replace(page, panels=[dataclasses.replace(page.panels[0], key=self.model)])


def test_within_a_folder_only_our_own_figures_are_replaced(small, tmp_path):
    """Those of the earlier result, as its record has them, go; what else lies there stays."""
    mine = {"figures/mine.svg", "figures/notes/plan.md"}
    for name in (*mine, "figures/first.svg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("years of work")
    for model in ("first", "second"):
        Named(**{**small.record(), "model": model}).save_within(tmp_path)
        files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
        assert files == {f"figures/{model}.svg", "report.html", "record.json", *mine}
    assert "<svg" in (tmp_path / "figures" / "second.svg").read_text()
    assert all((tmp_path / name).read_text() == "years of work" for name in mine)
    (tmp_path / "record.json").write_text("{")  # then nobody knows what was ours
    small.save_within(tmp_path)
    assert (tmp_path / "figures" / "second.svg").exists() and load(tmp_path) == small


def test_force_does_not_replace_figures_that_are_not_ours(small, tmp_path):
    small.save(tmp_path / "out")
    (tmp_path / "out" / "figures" / "notes.md").write_text("years of work")
    with pytest.raises(ValueError, match="by crosslayer"):
        small.save(tmp_path / "out", force=True)


def test_a_result_is_frozen_and_checked(small):
    with pytest.raises(ValidationError):
        small.model = "another"
    with pytest.raises(ValidationError):
        Small.from_record(small.record() | {"unknown": 1})


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(small):
    frame = small._repr_html_()
    assert frame.startswith("<iframe srcdoc='") and frame.count("<") == 2  # all of the page is inside of the attribute
    content = frame.removeprefix("<iframe srcdoc='").partition("'")[0]
    assert html.unescape(content) == small.page()


def test_every_text_of_a_page_is_escaped(small):
    text = small.page().split("<script>")[0]
    assert "About &lt;script&gt;" in text and "a &lt;b&gt;" in text and "it&#39;s" in text and "&amp;</td>" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": "crosslayer/small/1"},
            "record.json has the schema 'crosslayer/small/1'; this release reads crosslayer/small/2",
        ),
        ({"schema": "crosslayer/small/20"}, "record.json has the schema 'crosslayer/small/20'; this release reads"),
        ({"schema": "else/1"}, "this release reads crosslayer/other/1, crosslayer/small/2"),
        ({"schema": None}, "record.json has the schema 'None'; this release reads"),
        ({"schema": ["crosslayer/small/2"]}, "this release reads crosslayer/other/1, crosslayer/small/2"),
        ({"schema": "x" * 10_000}, "x'; this release reads"),
        (
            {"norm": {"mean": "high", "ci95": None, "n": 1}},
            "record.json: norm.mean: it must hold only numbers and null",
        ),
        ({"model": None}, "record.json: model must be a valid string"),
        ({"more": 1}, "record.json: more: Extra inputs are not permitted"),
    ],
)
def test_a_record_that_does_not_fit_is_one_line(small, tmp_path, change, message):
    folder = write(tmp_path, json.dumps(small.record() | change))
    with pytest.raises(ValueError) as error:
        load(folder)
    line = str(error.value)
    assert message in line and "\n" not in line and len(line) < 300
    assert not isinstance(error.value, ValidationError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "record.json: Expecting value"),
        ("{", "record.json: Expecting property name"),
        ("[1, 2]", "it must hold a JSON object"),
        ("7", "it must hold a JSON object"),
        ('{"schema": NaN}', "it holds NaN, which is not valid JSON"),
        ('{"schema": -Infinity}', "it holds -Infinity, which is not valid JSON"),
        ('{"n": ' + "9" * 5000 + "}", "it holds 99999999999999999999…, a whole number of more than 64 bits"),
        ('{"n": -9223372036854775809}', "a whole number of more than 64 bits"),
        ('{"n": ' + "[" * 100_000, "it is nested too deeply"),
        ('{"n": ' + "[" * DEEPEST + "]" * DEEPEST + "}", "it is nested too deeply"),
    ],
    ids=range(10),
)
def test_what_is_no_record_is_one_line(tmp_path, text, message):
    with pytest.raises(ValueError) as error:
        load(write(tmp_path, text))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_is_as_deep_as_allowed_is_read(tmp_path):
    deep = '{"n": ' + "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1) + "}"
    assert read_record(write(tmp_path, deep))["n"]


def test_only_a_file_of_text_is_read(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'nothing'.*record.json"):
        load(tmp_path / "nothing")
    os.mkfifo(tmp_path / "record.json")  # reading it would wait for ever
    with pytest.raises(ValueError, match="holds no record.json"):
        load(tmp_path)
    (tmp_path / "record.json").unlink()
    (tmp_path / "record.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(ValueError, match="record.json: 'utf-8' codec"):
        load(tmp_path)
    monkeypatch.setattr("crosslayer.output.record.LARGEST", 10)
    with pytest.raises(ValueError, match="record.json:.*10 bytes"):
        load(write(tmp_path, json.dumps({"schema": SCHEMA})))
