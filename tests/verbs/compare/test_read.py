"""Reading runs, which may be untrusted: what is refused, and how configurations and variants are recognized."""

import json

import pytest

import crosslayer
from crosslayer.verbs.compare.grid import read_methods, variant_of
from tests.cli.test_bad_input import type_in
from tests.helpers.runs import run, written

PAIR = (run("vanilla"), run("resformer", loss=2.9))


def test_configurations_are_what_differs_in_the_recipes(tmp_path):
    runs = [run(variant, size=size, length=64) for size in ("tiny", "mini") for variant in ("vanilla", "resformer")]
    result = crosslayer.compare(written(tmp_path, *runs))
    assert [(each.label, each.values) for each in result.configurations] == [
        ("model.size=tiny", {"model.size": "tiny"}),
        ("model.size=mini", {"model.size": "mini"}),
    ]
    assert [outcome.configuration for outcome in result.outcomes] == ["model.size=tiny", "model.size=mini"]
    assert crosslayer.compare(written(tmp_path / "alone", *PAIR)).configurations[0].label == ""


def test_a_label_leaves_out_what_follows_from_the_rest(tmp_path):
    runs = [
        run(variant, length=length, name=f"{length}") for length in (64, 256) for variant in ("vanilla", "resformer")
    ]
    for entry in runs:
        entry.recipe["eval"] = {"windows": 4096 // entry.recipe["data"]["length"]}
    result = crosslayer.compare(written(tmp_path, *runs))
    assert [each.label for each in result.configurations] == ["data.length=64", "data.length=256"]
    assert result.configurations[1].values == {"data.length": 256, "eval.windows": 16}


def test_a_folder_of_runs_is_as_good_as_its_runs(tmp_path):
    folders = written(tmp_path / "runs", *PAIR)
    (tmp_path / "runs" / "unfinished").mkdir()
    assert crosslayer.compare(folders) == crosslayer.compare([tmp_path / "runs"]) == crosslayer.compare([tmp_path])


def test_a_pause_of_the_machine_hardly_changes_the_time_of_a_step(tmp_path):
    paused = run("resformer", length=64, seconds=1e6)
    slow = [10.0 if entry < 3 else 1e4 for entry in range(len(paused.curve.steps))]  # tokens a second
    paused = paused.model_copy(update={"curve": paused.curve.model_copy(update={"tokens_per_second": slow})})
    result = crosslayer.compare(written(tmp_path, run("vanilla", length=64), paused))
    assert [entry.step_seconds for entry in result.runs] == pytest.approx([8 * 64 / 1e4] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": "crosslayer/bench/2"},
            "00-0: record.json must be of a training run, got schema 'crosslayer/bench/2'",
        ),
        ({"schema": "crosslayer/train/1"}, "00-0: record.json has the schema 'crosslayer/train/1'; this release reads"),
        ({"seed": "0; rm"}, "00-0: record.json: seed must be a valid integer"),
        (
            {"validation": [{"step": s, "losses": {"books": 1, "code": 1}} for s in (5, 5)]},
            "00-0: its steps must increase",
        ),
        ({"name": "a\x1b[2J"}, r"00-0: names must be printable, got 'a\\x1b\[2J'"),
        ({"extra": 1}, "00-0: record.json: extra: "),
    ],
)
def test_hostile_and_foreign_records_are_refused_by_name(tmp_path, change, message):
    folders = written(tmp_path, *PAIR)
    record = json.loads((folders[0] / "record.json").read_text())
    (folders[0] / "record.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(ValueError, match=message):
        crosslayer.compare(folders)


@pytest.mark.parametrize("key", ["command", "environment", "steps"])
def test_a_key_that_a_record_lacks_is_said_with_the_file(tmp_path, key):
    folders = written(tmp_path, *PAIR)
    record = json.loads((folders[0] / "record.json").read_text())
    del record[key]
    (folders[0] / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"00-0: record.json: {key}: "):
        crosslayer.compare(folders)


@pytest.mark.parametrize("name", [None, 5, "os.system", "a b", "\x1b[2J", "x" * 200])
def test_a_method_of_a_hostile_name_is_refused_or_harmless(tmp_path, name):
    runs = (
        PAIR[0],
        PAIR[1].model_copy(update={"model": PAIR[1].model.model_copy(update={"methods": [{"name": name}]})}),
    )
    folders = written(tmp_path, *runs)
    if name == "os.system":
        assert crosslayer.compare(folders).outcomes[0].variant == "os.system"  # a name, which nothing imports
    else:
        with pytest.raises(ValueError, match="01-0:.*method's.*letters"):
            crosslayer.compare(folders)


def test_runs_on_other_text_are_not_paired(tmp_path):
    other = run("resformer", fingerprint="another")
    with pytest.raises(ValueError, match="00-0.*01-0.*'books'"):
        crosslayer.compare(written(tmp_path, PAIR[0], other))


def test_runs_with_other_batches_are_not_paired(tmp_path):
    """Four processes read four times as much in a step, and the recipe does not say so."""
    other = PAIR[1].model_copy(update={"tokens": 4 * PAIR[1].tokens})
    message = "00-0 and 01-0 have the same recipe but 512 and 2,048 tokens per step"
    with pytest.raises(ValueError, match=message):
        crosslayer.compare(written(tmp_path / "other", PAIR[0], other))


def test_the_same_run_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="01-0.*02-0.*seed 0"):
        crosslayer.compare(written(tmp_path, *PAIR, PAIR[1]))


def test_what_there_is_not_to_compare(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="'empty'"):
        crosslayer.compare([tmp_path / "empty"])
    with pytest.raises(ValueError, match="two variants"):
        crosslayer.compare(written(tmp_path / "one", PAIR[0]))
    with pytest.raises(ValueError, match="nothing to"):
        crosslayer.compare()
    folders = written(tmp_path / "two", *PAIR)
    with pytest.raises(ValueError, match="`baseline`.*'resfromer';.*'resformer'"):
        crosslayer.compare(folders, baseline="resfromer")
    with pytest.raises(ValueError, match="`seeds` needs `recipe`"):
        crosslayer.compare(folders, seeds=3)
    assert crosslayer.compare(folders, baseline="resformer").outcomes[0].variant == "vanilla"


def test_labels_say_what_is_not_the_default():
    variants = read_methods(
        "vanilla, cla, {name: cla, group: 4}, [resformer, {name: cla, group: 4}], {name: attnres, block: 2}"
    )
    labels = ["vanilla", "cla", "cla(group=4)", "resformer+cla(group=4)", "attnres(block=2)"]
    assert [variant.label for variant in variants] == labels
    assert read_methods([None, "cla"])[0].methods == []
    assert variant_of([{"name": "mine.own", "a": "x"}]).label == "mine.own(a=x)"


def test_grouped_query_attention_is_a_variant():
    heads = "{num_key_value_heads: 1}"
    variants = read_methods(f"vanilla, {heads}, [svformer, {heads}], [vanilla, {{num_key_value_heads: 2}}]", heads=4)
    assert [variant.num_key_value_heads for variant in variants] == [4, 1, 1, 2]
    assert [variant.label for variant in variants] == [
        "num_key_value_heads=4",
        "num_key_value_heads=1",
        "svformer+num_key_value_heads=1",
        "num_key_value_heads=2",
    ]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("vanilla, resfromer", "`methods`: method 'resfromer' is not known; did you mean 'resformer'?"),
        ("vanilla, {name: cla, groop: 4}", "method 'cla' has no option 'groop'; did you mean 'group'?"),
        ("vanilla, null", "`methods` names vanilla twice"),
        ("vanilla, 3", "got 3"),
        ("", "`methods` must name at least two variants, got none"),
        ("vanilla, {name: cla", "methods 'vanilla, {name: cla'"),
        ("vanilla, &a cla, *a", "alias *a is not allowed"),
        ("vanilla, {num_key_value_heads: 0}", "num_key_value_heads must be a whole number above 0, got 0"),
        ("vanilla, {num_key_value_heads: true}", "num_key_value_heads must be a whole number above 0, got True"),
        ("vanilla, [vanilla, cla]", "method 'vanilla' is not known"),
    ],
)
def test_wrong_methods_are_refused(methods, message):
    with pytest.raises(ValueError) as error:
        read_methods(methods)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_command_reads_runs(tmp_path, capsys, monkeypatch):
    written(tmp_path / "runs", *(run(variant, seed, 3.0) for variant in ("vanilla", "resformer") for seed in range(2)))
    words = ["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert type_in(monkeypatch, words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["results"][0]["variant"] == "resformer" and lines[-2].endswith("report.html")
    assert crosslayer.load_result(tmp_path / "out").command.startswith("crosslayer compare")
    assert type_in(monkeypatch, words) == 2 and "--force" in capsys.readouterr().err
    assert type_in(monkeypatch, [*words, "--force"]) == 0
    assert type_in(monkeypatch, [*words, "--force", "--seeds", "3"]) == 2
    assert "--seeds needs --recipe" in capsys.readouterr().err
