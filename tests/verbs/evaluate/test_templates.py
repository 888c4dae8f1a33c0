"""Templates of task files run no code, end in time, and otherwise give what lm-eval's own rendering gives."""

import json
import threading
import time

import pytest
import yaml

import crosslayer
from crosslayer.verbs.evaluate import templates
from tests.verbs.evaluate.test_refusals import line

ROWS = [{"q": f"w{i} w{i + 1}", "options": ["w3", "w4"], "label": i % 2} for i in range(4)]
PLAIN = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{label}}",
    "doc_to_choice": "{{options}}",
    "num_fewshot": 1,
    "fewshot_split": "train",
}
FOREVER = "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}{% endfor %}{% endfor %}"
FOREVER += "{% endfor %}{{q}}"
BACKTRACKS = "{{ ('a' * 60) | regex_replace('(a|a)+$b', '') }}"


@pytest.fixture
def task(tmp_path):
    """Write a task with some of its fields changed, and return its folder."""

    def write(**changes):
        folder = tmp_path / "tasks"
        folder.mkdir(exist_ok=True)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        files = {"data_files": {"train": str(folder / "rows.jsonl")}}
        place = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "train"}
        (folder / "mine.yaml").write_text(yaml.safe_dump({"task": "mine", **place, **PLAIN, **changes}))
        return folder

    return write


@pytest.mark.parametrize(
    ("field", "inside"),
    [
        ("doc_to_text", "{code}"),
        ("doc_to_target", "{code}0"),
        ("doc_to_choice", "{code}['w1', 'w2']"),
        ("gen_prefix", "{code}"),
        ("description", "{code}"),
        ("fewshot_config", "{code}"),
        ("use_prompt", "{code}"),
    ],
)
def test_no_template_runs_code(monkeypatch, capsys, pair, tmp_path, task, field, inside):
    mark = tmp_path / "ran"
    code = f"{{{{ cycler.__init__.__globals__.os.popen('touch {mark}').read() }}}}"
    value = inside.format(code=code)
    if field == "use_prompt":
        prompts = tmp_path / "prompts.yaml"
        prompts.write_text(yaml.safe_dump({"prompts": {"one": {"doc_to_text": value, "doc_to_target": "0"}}}))
        folder = task(use_prompt=f"{prompts}:one", output_type="generate_until", doc_to_choice=None)
    elif field == "fewshot_config":
        folder = task(fewshot_config={"sampler": "first_n", "doc_to_text": value})
    else:
        folder = task(**{field: value})
    said = line(monkeypatch, capsys, [pair[0], "--tasks", "mine", "--include-path", folder, "--limit", "2"])
    assert not mark.exists()
    assert "a template of a task cannot be rendered (SecurityError: " in said and "cycler.__init__" in said


@pytest.mark.parametrize("template", [FOREVER, BACKTRACKS, "{{ 9 ** (9 ** 9) }}"], ids=["loops", "pattern", "power"])
def test_a_template_that_takes_for_ever_is_ended(monkeypatch, capsys, pair, task, template):
    monkeypatch.setattr(templates, "TIME_LIMIT", 0.3)
    folder, started = task(doc_to_text=template), time.monotonic()
    said = line(monkeypatch, capsys, [pair[0], "--tasks", "mine", "--include-path", folder])
    assert "a template of a task takes longer than 0.3 s" in said and time.monotonic() - started < 20


def test_it_is_ended_in_any_thread(monkeypatch, pair, task):
    monkeypatch.setattr(templates, "TIME_LIMIT", 0.3)
    folder, errors = task(doc_to_text=FOREVER), []

    def evaluate():
        try:
            crosslayer.evaluate(pair[0], tasks="mine", include_path=folder, device="cpu")
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=evaluate, daemon=True)
    thread.start()
    thread.join(60)
    assert len(errors) == 1 and "takes longer than 0.3 s" in errors[0]


@pytest.mark.parametrize("template", ["{{ nothing }}", "{{ q.undefined }}", "{% for %}", "{{ 1 / 0 }}"])
def test_a_template_that_is_wrong_is_a_line(monkeypatch, capsys, pair, task, template):
    said = line(monkeypatch, capsys, [pair[0], "--tasks", "mine", "--include-path", task(doc_to_text=template)])
    assert f"a template of a task cannot be rendered ({'' if '/' not in template else 'ZeroDivisionError: '}" in said


def test_a_choice_that_is_none_is_a_line(monkeypatch, capsys, pair, task):
    """What a template gives is read as a literal by lm-eval, and used as an index."""
    for field, value, said in (("doc_to_choice", "a b", "SyntaxError"), ("doc_to_target", "{{ 99 }}", "IndexError")):
        words = ["--tasks", "mine", "--include-path", task(**{field: value})]
        assert said in line(monkeypatch, capsys, [pair[0], *words])


def test_what_a_template_gives_stays_the_same_and_the_harness_is_put_back():
    from lm_eval import utils

    own = utils.apply_template
    cases = [
        "{% set ns = namespace(n=0) %}{% for o in options %}{% set ns.n = ns.n + 1 %}{{ns.n}}. {{o}}\n{% endfor %}\n",
        "{{ q | regex_replace('w([0-9])', 'v') }}\n",
        "{{ options.index('w4') }} {{ q.split(' ')[0].upper() }} {{ '%s-%d' | format(q, 1) }} {{ 'a{}'.format(q) }}",
    ]
    expected = [own(case, ROWS[1]) for case in cases]
    with pytest.raises(KeyError), templates.sandboxed():
        assert utils.apply_template is not own
        assert [utils.apply_template(case, ROWS[1]) for case in cases] == expected
        raise KeyError
    assert utils.apply_template is own
