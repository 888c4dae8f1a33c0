"""A comparison that trains its runs: the grid, resuming, runs that diverge, and the page."""

import gc
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import crosslayer
from crosslayer.output.progress import metered_by
from crosslayer.training.trainer import TrainingStopped
from crosslayer.verbs.compare import run as module
from crosslayer.verbs.compare.grid import read_grid, read_methods
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.compare.sentences import sentences
from tests.cli.test_bad_input import type_in
from tests.helpers.meters import Recorder
from tests.output.test_page import LOOK

RECIPE = {
    "model": {"size": "tiny", "shape": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}},
    "data": {"length": 32},
    "schedule": {"steps": 6},
    "train": {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True},
    "eval": {"every": 3, "windows": 2, "snapshots": 1},
}
METHODS = "vanilla, svformer"
RUNS = ["svformer-0", "svformer-1", "vanilla-0", "vanilla-1"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        gc.freeze()  # garbage is collected after every run; that takes half a second if it scans all imports
        yield
        gc.unfreeze()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    domains = []
    for name, weight in (("books", 3), ("code", 1)):
        lines = (json.dumps({"text": f"{name} {number}: " + "abc " * 40}) for number in range(60))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        domains.append({"name": name, "weight": weight, "source": str(folder / f"{name}.jsonl")})
    path = folder / "little.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "domains": domains}}))
    return path


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparisons") / "whole"
    return crosslayer.compare(out=folder, recipe=recipe, methods=METHODS, seeds=2), folder


@pytest.fixture
def planted(whole, monkeypatch):
    """Instead of training, save an existing run as if it was of the recipe; `losses` are its final ones, by name."""
    vanilla, svformer = (
        crosslayer.load_result(whole[1] / "runs" / f"{variant}-0") for variant in ("vanilla", "svformer")
    )
    losses = {}

    def train(recipe, place, **options):
        entry = vanilla if recipe.model.method is None else svformer
        loss = losses.get(place.name, entry.final_loss)
        end = entry.validation[-1].model_copy(update={"losses": {"books": loss, "code": loss}})
        steps, width = recipe.schedule.total_steps(2 * recipe.data.length), recipe.model.shape["hidden_size"]
        changes = {
            "model": entry.model.model_copy(update={"parameters": entry.model.parameters * width // 32}),
            "recipe": recipe.model_dump(mode="json"),
            "seed": recipe.seed,
            "steps": steps,
            "tokens": steps * 2 * recipe.data.length,
            "validation": (end,),
        }
        changed = entry.model_copy(update=changes)
        place.mkdir(parents=True)
        (place / "record.json").write_text(json.dumps(changed.record()))
        return changed

    monkeypatch.setattr(module, "train", train)
    return losses


@pytest.fixture
def undrawn(monkeypatch):
    """Write no page."""
    monkeypatch.setattr(Comparison, "save_within", lambda *_: None)


@pytest.fixture
def no_training(monkeypatch):
    """Fail where a run is trained."""

    def refuse(*args, **options):
        raise AssertionError("a run was trained")

    monkeypatch.setattr(module, "train", refuse)


def test_the_grid_is_trained_and_compared(whole):
    result, folder = whole
    assert sorted(path.name for path in (folder / "runs").iterdir()) == RUNS
    assert {(entry.variant, entry.seed) for entry in result.runs} == {
        (a, s) for a in METHODS.split(", ") for s in (0, 1)
    }
    (outcome,) = result.outcomes
    losses = {name: crosslayer.load_result(folder / "runs" / name).final_loss for name in RUNS}
    differences = [losses[f"svformer-{seed}"] - losses[f"vanilla-{seed}"] for seed in (0, 1)]
    assert np.allclose(outcome.final.values, differences) and outcome.final.change.interval is None
    assert len(outcome.curve.steps) == 6 and result.runs[0].snapshots[-1].first_token_share > 0
    assert crosslayer.load_result(folder) == result
    assert crosslayer.compare([folder]).outcomes == result.outcomes  # its runs, read again


def test_resuming_a_finished_grid_trains_nothing(whole, recipe, no_training):
    result, folder = whole
    again = crosslayer.compare(out=folder, recipe=recipe, methods=METHODS, seeds=2, resume=True)
    assert again.model_copy(update={"environment": result.environment}) == result


def test_a_grid_grows_and_pairs_are_complete_early(whole, recipe, monkeypatch):
    _, folder = whole
    trained = []

    def note(recipe, place, **options):
        trained.append(place.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", note)
    with pytest.raises(KeyboardInterrupt):
        crosslayer.compare(out=folder, recipe=recipe, methods=METHODS, seeds=3, resume=True)
    assert trained == ["vanilla-2"]
    cells = read_grid(recipe, METHODS, 2, ["data.length=16,32"], ()).planned_runs()
    assert [cell.recipe.name for cell in cells][:5] == [
        "length-16-vanilla-0", "length-16-svformer-0", "length-32-vanilla-0", "length-32-svformer-0",
        "length-16-vanilla-1",
    ]  # fmt: skip


def test_the_page_in_a_browser(whole, browser):
    from tests.helpers.browser import complaints, resize

    _, folder = whole
    for width in (1280, 390):
        resize(browser, width)
        browser.get((folder / "report.html").as_uri())
        assert browser.execute_script(LOOK) == [] and complaints(browser) == []


def test_grouped_query_attention_is_paired_with_other_variants(recipe, tmp_path):
    """ResFormer's Fig. 13: multi-query attention with SVFormer keeps 3 of 16 states."""
    folder, meter = tmp_path / "heads", Recorder()
    with metered_by(meter):
        trained = crosslayer.compare(
            out=folder, recipe=recipe, methods="vanilla, [svformer, {num_key_value_heads: 1}]", seeds=1
        )
    tasks = [task for task, _ in meter.works]
    assert tasks[0].startswith("run 1 of 2, vanilla-0: ") and tasks[-1].startswith("run 2 of 2, svformer-")
    read = crosslayer.compare([folder])
    for result in (trained, read):
        assert [each.label for each in result.configurations] == [""]
        assert [outcome.variant for outcome in result.outcomes] == ["svformer+num_key_value_heads=1"]
        bytes_by_variant = {entry.variant: entry.kv_bytes_per_token for entry in result.runs}
        assert bytes_by_variant == {"vanilla": 256, "svformer+num_key_value_heads=1": 48}


def test_an_option_that_no_record_can_hold_is_refused(monkeypatch):
    """A user-defined method may have such an option; a label would show its `repr`."""
    monkeypatch.setattr("crosslayer.verbs.compare.grid.to_entry", lambda method: {"name": "own", "option": Path("a")})
    with pytest.raises(ValueError, match="`methods`: .*is not JSON serializable"):
        read_methods("cla")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": False}, "the folder 'whole' exists; use another name, or `resume`"),
        ({"settings": ["schedule.steps=7"]}, "recipe of runs/vanilla-0 differs"),
        ({"methods": "vanilla, resfromer"}, "did you mean 'resformer'?"),
        ({"methods": "vanilla"}, "at least two variants, got only vanilla"),
        ({"methods": "vanilla, {name: cla, group: 5}"}, "cla(group=5): model.method"),
        ({"baseline": "resfromer"}, "`baseline` must be one of the variants, got 'resfromer'"),
        ({"seeds": 0}, "`seeds` must be at least 1, got 0"),
        ({"smooth": 0}, "`smooth` must be at least 1 step, got 0"),
        ({"vary": ["model.shape.num_key_value_heads=1,2"]}, "`vary` must not name model.shape.num_key_value_heads"),
        ({"methods": "vanilla, {num_key_value_heads: 3}"}, "num_key_value_heads=3: model.shape"),
        ({"vary": ["model.method=cla"]}, "`vary` must not name model.method, got 'model.method=cla'; use `methods`"),
        (
            {"vary": ["model.sise=tiny"]},
            "vanilla with model.sise=tiny: model.sise: unknown key, did you mean 'size'?",
        ),
        ({"vary": ["data.length"]}, "`vary` must be key=value,value, got 'data.length'"),
        ({"vary": ["data.length=8,8"]}, "got 8 twice"),
        ({"vary": ["data.length=8", "data.length=16"]}, "got data.length twice"),
        ({"runs": ["somewhere"]}, "either a recipe or finished runs"),
        ({"methods": None}, "`recipe` needs `methods`"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(whole, recipe, no_training, options, message):
    options = {"out": whole[1], "recipe": recipe, "methods": METHODS, "seeds": 2, "resume": True, **options}
    with pytest.raises(ValueError) as error:
        crosslayer.compare(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_folder_of_something_else_is_refused(recipe, tmp_path, no_training):
    (tmp_path / "mine.txt").write_text("mine")
    options = {"out": tmp_path, "recipe": recipe, "methods": METHODS, "resume": True}
    with pytest.raises(ValueError, match="no comparison"):
        crosslayer.compare(**options)
    for state, message in (
        ('{"schema": "crosslayer/grid/3", "stopped": {"vanilla-0": "rm"}}', "grid.json: stopped.vanilla-0 must be"),
        ("[]", "grid.json: it must be an object"),
        ('{"stopped": {"a\x1b[2J": "x"}}', "grid.json: "),
        ("[" * 100_000, "grid.json: Invalid JSON"),
    ):
        (tmp_path / "grid.json").write_text(state)
        with pytest.raises(ValueError) as error:
            crosslayer.compare(**options)
        assert message in str(error.value) and str(error.value).isprintable()


def test_a_run_that_diverges_is_left_out_and_stays_out(recipe, tmp_path, monkeypatch, planted, undrawn):
    calls, train = [], module.train

    def diverging(recipe, place, **options):
        calls.append(place.name)
        if place.name == "svformer-0":
            raise TrainingStopped("the loss is nan at step 2", 2, None)
        return train(recipe, place, **options)

    monkeypatch.setattr(module, "train", diverging)
    options = {"out": tmp_path / "out", "recipe": recipe, "methods": "svformer, vanilla", "seeds": 2}
    result = crosslayer.compare(**options)
    assert list(result.stopped) == ["svformer-0"] and result.outcomes[0].missing == (0,)
    assert any("svformer-0" in line for line in sentences(result))
    assert calls == ["svformer-0", "vanilla-0", "svformer-1", "vanilla-1"]
    again = crosslayer.compare(**options, resume=True)
    assert len(calls) == 4 and again.stopped == result.stopped


@pytest.mark.slow
def test_a_baseline_that_diverges_is_an_error(recipe, tmp_path):
    """With a learning rate that does not diverge, --resume trains it in the same folder."""
    options = {"out": tmp_path / "out", "recipe": recipe, "methods": METHODS, "seeds": 1}
    with pytest.raises(ValueError) as error:
        crosslayer.compare(**options, settings=["train.learning_rate=1e30"])
    message = str(error.value)
    assert message.startswith("nothing to compare with vanilla") and "vanilla-0: the loss" in message
    assert "; svformer-0: the loss" in message and "\n" not in message
    result = crosslayer.compare(**options, resume=True)
    assert result.stopped == {} and [entry.variant for entry in result.runs] == METHODS.split(", ")
    assert json.loads((tmp_path / "out" / "grid.json").read_text())["stopped"] == {}


def test_the_command_trains(recipe, tmp_path, capsys, monkeypatch, planted):
    words = ["compare", "--recipe", str(recipe), "--methods", METHODS, "--seeds", "1", "--out", str(tmp_path / "out")]
    tokens = ["--set", "schedule.steps=null", "--set", "schedule.tokens=300"]
    assert type_in(monkeypatch, [*words, *tokens, "--vary", "model.shape.hidden_size=32,64"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    configurations = [f"model.shape.hidden_size={width}" for width in (32, 64)]
    assert [result["configuration"] for result in json.loads(last)["results"]] == configurations
    result = crosslayer.load_result(tmp_path / "out")
    assert {entry.tokens for entry in result.runs} == {5 * 64} and {law.cost for law in result.laws} == {"parameters"}
    assert type_in(monkeypatch, words) == 2
    assert "--resume" in capsys.readouterr().err
    assert type_in(monkeypatch, [*words, "--force"]) == 2
    assert "--force" in capsys.readouterr().err


def test_steps_are_timed_beside_the_baseline(whole):
    """Of finished runs, by the configs in their folders; a machine's load falls on both of a pair."""
    (outcome,) = crosslayer.compare([whole[1]], step_rounds=5).outcomes
    assert outcome.step_time.change.n == 5 and outcome.step_time.candidate.median > 0
    assert outcome.speedup is None  # the learning rate of these runs decays
    with pytest.raises(ValueError, match="step_rounds"):
        crosslayer.compare([whole[1]], step_rounds=2)


@pytest.mark.parametrize("kept", [0, 1])
def test_one_run_with_a_model_is_enough_to_time_steps(whole, tmp_path, kept):
    shutil.copytree(whole[1] / "runs", tmp_path / "runs")
    for folder in (tmp_path / "runs").iterdir():
        if not folder.name.endswith(f"-{kept}"):
            shutil.rmtree(folder / "model")
    (outcome,) = crosslayer.compare([tmp_path / "runs"], step_rounds=5).outcomes
    assert outcome.final.change.n == 2 and outcome.step_time.change.n == 5


def test_every_page_names_a_model_that_is_there(recipe, tmp_path, monkeypatch, capsys):
    """The next command of the comparison is about its best run, and that of a run's own page about that run."""
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--recipe", str(recipe), "--methods", METHODS, "--seeds", "1", "--out", "compared"]
    assert type_in(monkeypatch, words) == 0
    folder = tmp_path / "compared"
    diagnosed = re.compile(r"diagnose (\S+)/model ")
    # of the variants; the baseline is not among them
    assert diagnosed.findall(capsys.readouterr().out) == ["compared/runs/svformer-0"]
    for name in ("svformer-0", "vanilla-0"):
        page = (folder / "runs" / name / "report.html").read_text()
        assert diagnosed.findall(page) == [f"compared/runs/{name}"]
        assert (folder / "runs" / name / "model").is_dir()
    read = crosslayer.compare([folder])
    assert read.next_command() is None  # nothing was typed, so no folder is known
