"""The result as a record, a folder and a page; records of others are not believed."""

import copy
import json

import pytest

import crosslayer
from crosslayer.environment import environment
from crosslayer.verbs.evaluate.lm import cpu_batch
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
    for row in evaluation.rows:
        ours, theirs = (evaluation.lm_eval_results[side]["samples"][row.name] for side in ("candidate", "baseline"))
        if row.kind != "share":
            continue
        differences = [a[row.metric] - b[row.metric] for a, b in zip(ours, theirs, strict=True)]
        assert row.paired.change.value == pytest.approx(sum(differences) / len(differences))
        assert row.paired.change.value == pytest.approx(row.candidate.value - row.baseline.value)
        assert row.items == 14
    ratios = {row.metric: row for row in evaluation.rows if row.kind == "perplexity"}
    assert set(ratios) == {"perplexity", "word_perplexity", "byte_perplexity"}
    for row in ratios.values():
        assert not row.higher_is_better
        assert row.paired.change.value == pytest.approx(row.candidate.value / row.baseline.value)
    (group,) = evaluation.groups
    assert group.name == "blimp_local" and len(group.tasks) == 2 and group.items == 28
    rows = [row for row in evaluation.rows if row.name in group.tasks]
    assert group.paired.change.value == pytest.approx(sum(row.paired.change.value for row in rows) / 2)


def change(record, path, value):
    *parents, last = path
    for key in parents:
        record = record[key]
    record[last] = value


HOSTILE = {
    "a script": (("models", "candidate", "name"), "<script>alert(1)</script>"),
    "no number": (("rows", 0, "candidate", "value"), "NaN"),
    "too sure": (("rows", 0, "paired", "change", "p"), 1.5),
    "a verdict": (("rows", 0, "paired", "change", "verdict"), "a triumph"),
    "no rows": (("rows",), []),
    "one side": (("models", "baseline"), None),
    "unknown key": (("settings", "colour"), 1),
    "no items": (("rows", 0, "items"), 0),
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
    assert all(row.paired is None and row.baseline is None for row in (*alone.rows, *alone.groups))
    assert crosslayer.load_result(alone.save(tmp_path / "out").parent) == alone
    opened(browser, tmp_path / "out" / "report.html")
    assert browser.execute_script(LOOK) == [] and "standard error" in alone.page()


def larger(evaluation):
    """The same with a task of a long name, a win, a loss, and a group of ours."""
    record = evaluation.record()
    row = copy.deepcopy(record["rows"][0])
    row |= {"name": "a_task_with_a_rather_long_name_local", "filter": "strict-match", "items": 10042}
    row["candidate"], row["baseline"] = {"value": 0.43, "stderr": 0.005}, {"value": 0.4, "stderr": 0.005}
    row["paired"]["change"] |= {"value": 0.03, "low": 0.02, "high": 0.04, "p": 1e-7}
    row["paired"] |= {"discordant": {"candidate": 800, "baseline": 500}, "items_for_a_point": 10231}
    loss = copy.deepcopy(row)
    loss["paired"]["change"] |= {"value": -0.03, "low": -0.04, "high": -0.02}
    record["rows"] += [row, {**loss, "name": "loss"}]
    record["groups"] = [{**record["groups"][0], "name": "resformer", "tasks": [f"task{i}" for i in range(6)]}]
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
        "+3.00\n(+2.00 to +4.00)",
        "10,042\n+800 −500\np = 1e-07",
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
    assert headline["results"][0].keys() >= {"task", "metric", "candidate", "baseline", "difference", "verdict"}
    assert "scoring answers: 10 of 10" in output.err and "no difference seen" in output.out
    assert "Only the first 5 items" in output.out
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["command"].startswith("crosslayer evaluate candidate --baseline baseline --tasks piqa_local")
    assert str(tmp_path) not in json.dumps(record)


def test_the_batch_on_a_cpu_fits_into_memory():
    plenty = 2**40
    assert cpu_batch(16, 50_000, plenty) == 64 and cpu_batch(100, 50_000, plenty) == 10
    assert cpu_batch(8192, 50_000, plenty) == 1 == cpu_batch(1000, 250_000, 2**30)
    assert cpu_batch(10, 250_000, 2**30) < cpu_batch(10, 50_000, 2**30)
