"""The script that writes tasks which read local files."""

import json
import subprocess
import sys

import pytest

import crosslayer
from benchmarks import local_tasks
from benchmarks.local_tasks import articles, write_local_tasks
from tests.helpers import evaluations

WRITTEN = {
    "arc_easy_local", "piqa_local", "lambada_openai_local", "social_iqa_local", "commonsense_qa_local", "boolq_local",
    "pubmedqa_local", "medqa_5options_local", "winogrande_local", "wikitext2_local", "blimp_causative_local",
    "blimp_adjunct_island_local", "blimp_local",
}  # fmt: skip


def test_every_task_is_written_and_runs(tmp_path, pair):
    data = evaluations.data(tmp_path / "data")
    names = write_local_tasks(data, tmp_path / "tasks")
    assert set(names) == WRITTEN
    evaluation = crosslayer.evaluate(
        pair[0], tasks=names[:-3], include_path=tmp_path / "tasks", allow_code=True, limit=3
    )
    rows = {(row.scope, row.quantity): row for row in evaluation.tasks}
    for key in (("lambada_openai_local", "perplexity"), ("wikitext2_local", "word_perplexity")):
        assert rows[key].better == "lower"
    assert rows["wikitext2_local", "bits_per_byte"].unit == ""
    others = {row.unit for (task, metric), row in rows.items() if metric.startswith("acc")}
    assert others == {"share"} and len({task for task, _ in rows}) == len(WRITTEN) - 3
    boolq = evaluation.lm_eval_results["candidate"]["samples"]["boolq_local"]
    assert [sample["target"] for sample in boolq] == [1, 0, 0]
    five = evaluation.lm_eval_results["candidate"]["samples"]["medqa_5options_local"][0]
    assert five["arguments"][0][0].count("\n") == 6 and five["arguments"][0][0].endswith("\nAnswer:")
    assert len(five["arguments"]) == 5 and five["target"] == "A"


@pytest.mark.slow
def test_the_script_says_what_it_wrote_and_what_is_wrong(tmp_path):
    data = evaluations.data(tmp_path / "data", items=3)

    def run(*words):
        command = [sys.executable, local_tasks.__file__, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True)

    done = run(data, tmp_path / "tasks")
    assert done.returncode == 0 and set(done.stdout.split()) == WRITTEN and not done.stderr
    again = run(data, tmp_path / "tasks")
    assert again.returncode == 2 and again.stderr.startswith("crosslayer: error: the folder 'tasks' exists")


def test_a_folder_is_replaced_only_where_it_is_ours(tmp_path):
    data = evaluations.data(tmp_path / "data", items=3)
    write_local_tasks(data, tmp_path / "tasks")
    write_local_tasks(data, tmp_path / "tasks", force=True)
    (tmp_path / "tasks" / "mine.yaml").write_text("task: mine")
    with pytest.raises(ValueError, match="by crosslayer"):
        write_local_tasks(data, tmp_path / "tasks", force=True)
    with pytest.raises(ValueError, match="known data"):
        write_local_tasks(tmp_path / "tasks", tmp_path / "out")
    with pytest.raises(ValueError, match="must be a folder"):
        write_local_tasks(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_articles_of_wikitext_begin_with_their_headings():
    text = " \n = Robert = \n \n He is . \n \n = = Career = = \n \n More . \n \n = Du Fu = \n \n A poet . \n"
    pages = articles(text)
    assert [page.split("\n")[0] for page in pages] == [" = Robert = ", " = Du Fu = "]
    assert "".join(pages) == text.removeprefix(" \n")


def test_an_article_behind_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "wikitext2_test.txt").write_bytes(b"\xef\xbb\xbf = Robert = \r\n \r\n He is . \r\n")
    write_local_tasks(tmp_path, tmp_path / "tasks")
    pages = (tmp_path / "tasks" / "wikitext2.test.jsonl").read_text()
    assert [json.loads(line)["page"] for line in pages.splitlines()] == [" = Robert = \n \n He is . \n"]
