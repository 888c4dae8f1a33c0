"""The result as a record, a folder and a page; records of others are not believed."""

import copy
import json

import pytest

import crosslayer
from crosslayer.environment import environment
from crosslayer.judge.tasks.lm import cpu_batch
from tests.cli.test_bad_input import type_in
from tests.helpers.browser import complaints, resize
from tests.output.test_page import LOOK, opened

NAMES = "arc_easy_local,lambada_openai_local,wikitext2_local,blimp_local"


@pytest.fixture(scope="module")
def evaluation(tasks, pair):
    return crosslayer.evaluate(
        pair[0], baseline=pair[1], tasks=NAMES, include_path=tasks, allow_code=True, device="cpu"
    )


@pytest.fixture(scope="module")
def folder(evaluation, tmp_path_factory):
    return evaluation.save(tmp_path_factory.mktemp("results") / "evaluated").parent


def test_a_result_is_loaded_again_equal(evaluation, folder):
    loaded = crosslayer.load_result(folder)
    assert type(loaded) is crosslayer.Evaluation and loaded == evaluation and not loaded.lm_eval_results
    assert loaded.page() == evaluation.page() == (folder / "report.html").read_text()
    assert loaded.headline() == evaluation.headline() and json.dumps(loaded.headline())
    assert evaluation.save(folder, force=True)


def test_what_the_harness_returned_is_kept_as_it_is(evaluation, folder):
    for side in ("candidate", "baseline"):
        whole = json.loads((folder / "lm_eval" / f"{side}.json").read_text())
        returned = evaluation.lm_eval_results[side]
        assert whole.keys() == returned.keys() - {"samples"}
        assert json.dumps(whole["results"]) == json.dumps(returned["results"])
        for task, samples in returned["samples"].items():
            lines = (folder / "lm_eval" / f"{side}.samples.{task}.jsonl").read_text().splitlines()
            assert [json.loads(line)["doc_hash"] for line in lines] == [sample["doc_hash"] for sample in samples]
            assert [json.loads(line)["acc"] for line in lines if "acc" in line] == [
                sample["acc"] for sample in samples if "acc" in sample
            ]


def test_rows_are_the_scores_and_the_differences_of_samples(evaluation):
    for row in evaluation.tasks:
        ours, theirs = (evaluation.lm_eval_results[side]["samples"][row.scope] for side in ("candidate", "baseline"))
        if row.unit != "share":
            continue
        differences = [a[row.quantity] - b[row.quantity] for a, b in zip(ours, theirs, strict=True)]
        assert row.change.value == pytest.approx(sum(differences) / len(differences))
        assert row.change.value == pytest.approx(row.value - row.original)
        assert row.details["items"] == 14
    ratios = {row.quantity: row for row in evaluation.tasks if row.change.none == 1}
    assert set(ratios) == {"perplexity", "word_perplexity", "byte_perplexity"}
    for row in ratios.values():
        assert row.better == "lower"
        assert row.change.value == pytest.approx(row.value / row.original)
    (group,) = evaluation.groups
    tasks = group.details["tasks"].split(", ")
    assert group.scope == "blimp_local" and len(tasks) == 2 and group.details["items"] == 28
    rows = [row for row in evaluation.tasks if row.scope in tasks]
    assert group.change.value == pytest.approx(sum(row.change.value for row in rows) / 2)


def change(record, path, value):
    *parents, last = path
    for key in parents:
        record = record[key]
    record[last] = value


HOSTILE = {
    "a script": (("candidates", 0, "name"), "<script>alert(1)</script>"),
    "no number": (("rows", 0, "value"), "NaN"),
    "too sure": (("rows", 0, "change", "p"), 1.5),
    "a verdict": (("rows", 0, "change", "verdict"), "a triumph"),
    "no candidates": (("candidates",), []),
    "unknown key": (("settings", "colour"), 1),
    "details that are lists": (("rows", 0, "details", "items"), [1]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_refused_or_escaped(folder, tmp_path, name):
    record = json.loads((folder / "record.json").read_text())
    change(record, *HOSTILE[name])
    (tmp_path / "record.json").write_text(json.dumps(record))
    if name == "a script":
        page = crosslayer.load_result(tmp_path).page()
        assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page
        return
    with pytest.raises(ValueError, match="^record.json: ") as caught:
        crosslayer.load_result(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_page_of_one_model_has_scores_alone(tasks, pair, browser, tmp_path):
    alone = crosslayer.evaluate(pair[0], tasks="piqa_local,blimp_local", include_path=tasks, allow_code=True)
    assert all(row.change is None and row.original is None for row in alone.rows)
    assert crosslayer.load_result(alone.save(tmp_path / "out").parent) == alone
    opened(browser, tmp_path / "out" / "report.html")
    assert browser.execute_script(LOOK) == [] and "standard error" in alone.page()


def larger(evaluation):
    """The same with a task of a long name, a win, a loss, and a group of ours."""
    record = evaluation.record()
    shares = [row for row in record["rows"] if row["quantity"] == "acc" and "tasks" not in row["details"]]
    row = copy.deepcopy(shares[0])
    row |= {"scope": "a_task_with_a_rather_long_name_local", "quantity": "acc (strict-match)"}
    row |= {"value": 0.43, "original": 0.4}
    row["change"] |= {"value": 0.03, "low": 0.02, "high": 0.04, "p": 1e-7}
    row["details"] |= {"items": 10042, "only_candidate": 800, "only_original": 500, "items_for_a_point": 10231}
    loss = copy.deepcopy(row)
    loss["change"] |= {"value": -0.03, "low": -0.04, "high": -0.02}
    record["rows"] += [row, {**loss, "scope": "loss"}]
    group = next(row for row in record["rows"] if "tasks" in row["details"])
    group["scope"], group["details"]["tasks"] = "resformer", ", ".join(f"task{number}" for number in range(6))
    record["environment"], record["command"] = (
        environment().model_dump(),
        "crosslayer evaluate small --baseline smollm2",
    )
    return crosslayer.Evaluation.from_record(record)


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
def test_nothing_on_the_page_is_cut_or_overlaps(browser, evaluation, tmp_path, width):
    result = larger(evaluation)
    resize(browser, width)
    opened(browser, result.save(tmp_path / "out"))
    assert len(browser.find_elements("css selector", ".figure")) == 2
    assert browser.execute_script(LOOK) == [] and not complaints(browser)
    page = result.page()
    for words in (
        "+3.0\n(+2.0 to +4.0)",
        "10,042",
        "10,231",
        "class='pass'>higher",
        "class='fail'>lower",
    ):
        assert words in page, words


def test_the_command_line_writes_all_of_it(monkeypatch, capsys, tasks, pair, tmp_path):
    words = [
        "evaluate",
        pair[0],
        "--baseline",
        pair[1],
        "--tasks",
        "piqa_local",
        "--include-path",
        tasks,
        "--allow-code",
        "--limit",
        "5",
    ]
    assert type_in(monkeypatch, [*map(str, words), "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    headline = json.loads(output.out.splitlines()[-1])
    assert headline["rows"][0].keys() >= {"scope", "quantity", "value", "original", "change", "verdict"}
    assert "answers: 10" in output.err and "o difference seen" in output.out
    assert "first 5" in output.out
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["command"].startswith("crosslayer evaluate candidate --baseline baseline --tasks piqa_local")
    assert str(tmp_path) not in json.dumps(record)


def test_the_batch_on_a_cpu_fits_into_memory():
    plenty = 2**40
    assert cpu_batch(16, 50_000, plenty) == 64 and cpu_batch(100, 50_000, plenty) == 10
    assert cpu_batch(8192, 50_000, plenty) == 1 == cpu_batch(1000, 250_000, 2**30)
    assert cpu_batch(10, 250_000, 2**30) < cpu_batch(10, 50_000, 2**30)
