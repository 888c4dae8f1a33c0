"""What cannot be evaluated ends with exit status 2 and a single line, before any model runs."""

import builtins
import importlib.util
import io
import re
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import constants

import crosslayer
from crosslayer import hub
from crosslayer.judge.tasks.harness import GROUPS, Tasks, select
from tests.cli.test_bad_input import type_in
from tests.helpers import evaluations
from tests.helpers.text import WORDS
from tests.helpers.tiny import tiny

CODE = "task: mine\n? !function trap.text\n: 1\n"
TEMPLATE = {
    "task": "mine",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{label}}",
    "doc_to_choice": "{{options}}",
}


def line(monkeypatch, capsys, words):
    assert type_in(monkeypatch, ["evaluate", *map(str, words)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "Traceback" not in "".join(errors)
    assert len([text for text in errors if text.startswith("crosslayer: error: ")]) == 1
    return errors[-1].removeprefix("crosslayer: error: ")


@pytest.mark.slow  # each reads the list of all tasks
def test_an_unknown_task_is_answered_with_the_nearest(monkeypatch, capsys, tasks, pair, tmp_path):
    words = [pair[0], "--include-path", tasks, "--allow-code", "--out", tmp_path / "out", "--tasks"]
    said = line(monkeypatch, capsys, [*words, "piqa_local,arc_eazy_local"])
    assert re.match("task 'arc_eazy_local' is not known; did you mean arc_easy_local", said)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # each reads the list of all tasks
def test_an_unknown_group_is_answered_too(monkeypatch, capsys, tasks, pair):
    words = [pair[0], "--include-path", tasks, "--allow-code", "--tasks"]
    assert "resformer" in line(monkeypatch, capsys, [*words, "resfromer"])
    assert "uniattn-general" in line(monkeypatch, capsys, [*words, "§§§"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", ""], "--tasks must name at least one task"),
        (["--tasks", "piqa_local", "--batch", "many"], "--batch must be auto or .*, got 'many'"),
        (["--tasks", "piqa_local", "--batch", "0"], "--batch .* got '0'"),
        (["--tasks", "piqa_local", "--limit", "0"], "--limit .*greater than 0.* 0$"),
        (["--tasks", "piqa_local", "--num-fewshot", "-1"], "--num-fewshot .*greater than or equal to 0"),
        (["--tasks", "piqa_local", "--include-path", "nowhere"], "--include-path must be a folder .* got 'nowhere'"),
        (["--tasks", "piqa_local", "--baseline", "./nowhere"], "'./nowhere' does not exist"),
        (["--tasks", "piqa_local", "--dtype", "int3"], "'int3'"),
        (["--tasks", "piqa_local", "--device", "warp"], "'warp'"),
        (["--tasks", "piqa_local", "--engine", "vlm"], "--engine must be transformers or vllm, got 'vlm'"),
        (["--tasks", "piqa_local", "--engine", "vllm", "--evict", "h2o:0.4"], "--evict.* need --engine transformers"),
        (["--tasks", "piqa_local", "--engine", "vllm"], r"pip install '\.\[vllm\]'"),
    ],
)
def test_options(monkeypatch, capsys, tasks, pair, tmp_path, options, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", None)
    place = [] if "--include-path" in options else ["--include-path", tasks, "--allow-code"]
    assert re.search(said, line(monkeypatch, capsys, [pair[0], *place, *options]))


def test_a_folder_without_tasks(monkeypatch, capsys, pair, tmp_path):
    said = line(monkeypatch, capsys, [pair[0], "--tasks", "piqa", "--include-path", tmp_path, "--allow-code"])
    assert "no lm-eval" in said


def test_an_encoder_is_refused_before_the_candidate_runs(monkeypatch, capsys, tasks, pair, tmp_path):
    encoder = tiny("bert", vocab_size=len(WORDS))
    encoder.save_pretrained(tmp_path / "bert")
    evaluations.own_tokenizer().save_pretrained(tmp_path / "bert")
    words = ["--tasks", "piqa_local", "--include-path", tasks, "--allow-code"]
    for models in ([tmp_path / "bert"], [pair[0], "--baseline", tmp_path / "bert"]):
        assert re.match("evaluate needs a causal LM.* bert", line(monkeypatch, capsys, [*models, *words]))
    with pytest.raises(ValueError, match="LM.* BertModel"):
        crosslayer.evaluate(
            encoder, evaluations.own_tokenizer(), tasks="piqa_local", include_path=tasks, allow_code=True
        )
    with pytest.raises(ValueError, match="tokenizer=…"):
        crosslayer.evaluate(evaluations.model(), tasks="piqa_local", include_path=tasks, allow_code=True)


def test_without_lm_eval_it_says_what_to_install(monkeypatch, capsys, pair):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a))
    said = line(monkeypatch, capsys, [pair[0], "--tasks", "piqa"])
    assert "lm_eval" in said and "pip install '.[eval]'" in said


def test_data_that_is_away_names_what_helps_at_once(monkeypatch, capsys, pair, tmp_path):
    """A dataset of the hub, where there is no network: datasets by itself tries for some 25 seconds."""
    address = "http://127.0.0.1:9"  # nobody listens there
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    asked = []
    monkeypatch.setattr(hub, "ask_hub", lambda *words: asked.append(words) or ConnectionError())
    task = "task: mine\ndataset_path: someone/questions\noutput_type: multiple_choice\ntest_split: test\n"
    (tmp_path / "mine.yaml").write_text(task)
    started = time.monotonic()
    said = line(monkeypatch, capsys, [pair[0], "--tasks", "mine", "--include-path", tmp_path, "--allow-code"])
    assert time.monotonic() - started < 10 and not constants.HF_HUB_OFFLINE
    assert asked == [("someone/questions", "README.md", hub.PATIENCE, "dataset")]
    assert "'mine'" in said and "hub" in said
    assert "benchmarks/local_tasks.py DATA OUT" in said and "--include-path OUT --allow-code" in said


def test_a_task_that_is_wrong_is_named(monkeypatch, capsys, pair, tmp_path):
    (tmp_path / "mine.yaml").write_text("task: mine\ndataset_path: json\noutput_type: telepathy\n")
    said = line(monkeypatch, capsys, [pair[0], "--tasks", "mine", "--include-path", tmp_path, "--allow-code"])
    assert "ValueError: Got invalid" in said


@pytest.mark.parametrize("text", [CODE, "task: mine\ndataset_path: json\ndoc_to_text: plain\n"])
def test_nothing_of_a_folder_is_read_unless_its_code_may_run(monkeypatch, capsys, pair, tmp_path, text):
    from lm_eval import tasks

    folder, mark, managers, opened = tmp_path / "tasks", tmp_path / "ran", [], []
    folder.mkdir()
    monkeypatch.chdir(tmp_path)  # a task without data files would read all of the working directory
    (folder / "trap.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ntext = len\n")
    (folder / "mine.yaml").write_text(text)
    manager, files = tasks.TaskManager, builtins.open

    def managed(*words, **options):
        managers.append(options["include_path"])
        return manager(*words, **options)

    def watched(file, *words, **options):
        opened.append(str(file))
        return files(file, *words, **options)

    monkeypatch.setattr(tasks, "TaskManager", managed)
    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(io, "open", watched)
    words = [pair[0], "--tasks", "mine", "--include-path", folder]
    said = line(monkeypatch, capsys, words)
    assert said.startswith("--include-path 'tasks' needs --allow-code, since task files run Python code")
    assert not managers and not mark.exists() and not any(str(folder) in file for file in opened)
    with pytest.raises(ValueError, match="`include_path` 'tasks' needs `allow_code`"):
        crosslayer.evaluate(pair[0], tasks="mine", include_path=folder)
    line(monkeypatch, capsys, [*words, "--allow-code"])  # which the traps see
    assert managers and mark.exists() == (text == CODE) and any(str(folder) in file for file in opened)


def test_a_task_of_lm_eval_needs_no_flag(monkeypatch, pair):
    """Its list of tasks is cut short here."""
    from lm_eval import tasks

    loaded = []
    monkeypatch.setattr(tasks, "TaskManager", lambda include_path: SimpleNamespace(
        all_tasks=["piqa"], load=lambda names: loaded.append((include_path, names)) or {"tasks": {"piqa": "loaded"}}
    ))  # fmt: skip
    assert Tasks(["piqa"], None).loaded == ["loaded"] and loaded == [(None, ["piqa"])]


@pytest.mark.parametrize(
    ("field", "template", "said"),
    [
        ("doc_to_text", "{{ nothing }}", "UndefinedError"),
        ("doc_to_text", "{% for %}", "TemplateSyntaxError"),
        ("doc_to_text", "{{ 1 / 0 }}", "ZeroDivisionError"),
        ("doc_to_choice", "a b", "SyntaxError"),
        ("doc_to_target", "{{ 99 }}", "IndexError"),
    ],
)
def test_a_template_that_is_wrong_is_a_line(monkeypatch, capsys, pair, tmp_path, field, template, said):
    (tmp_path / "rows.jsonl").write_text('{"q": "w1", "options": ["w3", "w4"], "label": 1}\n')
    files = {"data_files": {"train": str(tmp_path / "rows.jsonl")}}
    task = {**TEMPLATE, "dataset_kwargs": files, field: template}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(task))
    words = [pair[0], "--tasks", "mine", "--include-path", tmp_path, "--allow-code"]
    assert said in line(monkeypatch, capsys, words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: mine\nx: " + "[" * 3000 + "]" * 3000, "has no lm-eval tasks"),
        ("\n".join(" " * depth + "a:" for depth in range(3000)), "has no lm-eval tasks"),
        ("task: mine\na: &a [*a]\n", "task 'mine' cannot be loaded"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
            "has no lm-eval tasks",
        ),
    ],
    ids=["lists", "keys", "circle", "doubled 59 times"],
)
def test_yaml_that_is_hard_to_read_is_a_line(monkeypatch, capsys, pair, tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    assert said in line(monkeypatch, capsys, [pair[0], "--tasks", "mine", "--include-path", tmp_path, "--allow-code"])


def test_what_the_harness_refuses_while_it_runs_is_a_line(monkeypatch, capsys, tasks, pair):
    words = [pair[0], "--tasks", "arc_easy_local", "--include-path", tasks, "--allow-code"]
    assert "lm-eval" in line(monkeypatch, capsys, [*words, "--num-fewshot", "99"])


def test_options_that_a_loaded_model_has_no_use_for(pair, tasks):
    model, tokenizer = crosslayer.load_model(str(pair[0]))
    padding = tokenizer.pad_token_id
    options = {"tasks": "piqa_local", "include_path": tasks, "allow_code": True}
    with pytest.raises(ValueError, match="dtype"):
        crosslayer.evaluate(model, tokenizer, dtype="bfloat16", **options)
    with pytest.raises(ValueError, match="own tokenizer"):
        crosslayer.evaluate(pair[0], tokenizer, **options)
    with pytest.raises(ValueError, match="tokenizer=…"):
        crosslayer.evaluate(model, baseline=model, **options)
    evaluation = crosslayer.evaluate(model.bfloat16(), tokenizer, baseline=pair[1], limit=2, **options)
    assert evaluation.original.model.dtype == "bfloat16" and tokenizer.pad_token_id == padding


def test_a_request_without_its_beginning_and_other_numbers_of_examples_are_said(pair, tasks):
    evaluation = crosslayer.evaluate(
        pair[0], tasks="arc_easy_local", include_path=tasks, allow_code=True, num_fewshot=9, device="cpu"
    )
    shortened = evaluation.candidates[0].details["shortened"]
    assert shortened > 0
    assert f"{shortened} requests to candidate were truncated" in " ".join(evaluation.sentences())
    rows = [row.model_copy(update={"details": row.details | {"shots": 0}}) for row in evaluation.rows]
    fixed = evaluation.model_copy(update={"rows": tuple(rows)})
    assert any("arc_easy_local (0)" in text and "--num-fewshot 9" in text for text in fixed.sentences())


def test_a_task_may_include_one_of_the_harness(pair, tasks):
    text = (tasks / "winogrande_local.yaml").read_text()
    assert "include:" in text and "!function" not in text  # the file that it includes has three
    assert (
        crosslayer.evaluate(pair[0], tasks="winogrande_local", include_path=tasks, allow_code=True, limit=4)
        .rows[0]
        .details["items"]
        == 4
    )


def test_groups_take_local_tasks_where_there_are_any():
    assert select(["resformer"])[0][0] == "hellaswag" and len(select(["resformer"])[0]) == 6
    tasks, groups = select(["piqa", "resformer"], {"piqa_local", "hellaswag_local"})
    assert tasks[:2] == ["piqa", "hellaswag_local"] and groups["resformer"][-1] == "piqa_local"
    medical = GROUPS["uniattn-medical"]
    assert select(["uniattn-medical"])[0][-1] == "medqa_4options" and len(medical) == 3
    assert select(["uniattn-medical"], {"medqa_5options_local"})[0][-1] == "medqa_5options_local"


def test_our_groups_are_tasks_of_the_harness():
    from benchmarks.local_tasks import STOCK, stock_folder

    names = {option for options in sum(GROUPS.values(), []) for option in options} - {"medqa_5options"}
    assert names <= set(STOCK)
    for name, stock in STOCK.items():
        assert f"task: {name}\n" in (stock_folder() / stock.file).read_text(), name
