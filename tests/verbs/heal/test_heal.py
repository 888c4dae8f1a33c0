"""A recovery from retrofits to its folder: what trains, what is measured, what is resumed, what is refused."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import crosslayer
from crosslayer.core.decoder.convert import to_model
from crosslayer.judge.damage import logits_of, losses
from crosslayer.judge.report import Against
from crosslayer.judge.retrieval import askable_samples, found_in, responses
from crosslayer.training import stages
from crosslayer.training.checkpoints import checkpoints
from crosslayer.training.recipe import load_recipe
from crosslayer.training.trainer import TrainingStopped
from crosslayer.verbs.heal.questions import evaluation_windows
from crosslayer.verbs.heal.result import Recovery
from crosslayer.verbs.heal.retrofits import open_retrofits
from tests.cli.test_bad_input import type_in
from tests.helpers.browser import complaints, fits
from tests.helpers.recovery import healed, instructions_in, original_in, recipe_in, retrofit_in
from tests.helpers.training import Stop
from tests.verbs.train.test_interrupting import Press

NAMES = "fitted without shorter"


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return healed(base, NAMES, folder), folder / "out"


@pytest.fixture
def undrawn(monkeypatch):
    """Write no page into the folder."""
    monkeypatch.setattr(Recovery, "save_within", lambda *_: None)


@pytest.mark.slow
def test_hidden_numbers_are_retrieved_before_and_after_each_stage(tmp_path, undrawn):
    retrofit_in(tmp_path, original_in(tmp_path, max_position_embeddings=512), "zero")
    evaluation = {"domains": ["code"], "windows": 16, "length": 24, "held_out": 2}
    stage = {"parameters": "all", "schedule": {"steps": 1}, "train": {"learning_rate": 1e-3}}
    recipe = recipe_in(tmp_path, stages=[stage], objective="distill", judge=evaluation)
    recovery = healed(tmp_path, "zero", tmp_path, recipe)
    model, tokenizer = crosslayer.load_model(str(tmp_path / "out" / "zero" / "model"))
    samples = askable_samples(model, tokenizer)
    found = found_in(responses(model, tokenizer, samples), samples)
    rows = recovery.numbers("zero", recovery.variants[0].states[1])
    assert [row.scope for row in rows] == ["all", "512 tokens"] and rows[0].hits == sum(found)
    assert any("0 of 10 → 0 of 10" in line and "hidden" in line for line in recovery.sentences())
    (tmp_path / "none").mkdir()
    without = healed(tmp_path, "zero", tmp_path / "none", recipe, settings=["judge.needles=false"])
    assert not without.rows_of("retrieval") and "hidden" not in " ".join(without.sentences())


def windows_of(base, recipe, tokenizer):
    retrofits, _ = open_retrofits([base / name for name in NAMES.split()], str(base / "original"))
    return evaluation_windows(recipe, retrofits, tokenizer)


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def changed(before, after):
    before, after = weights_of(before), weights_of(after)
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_stage_1_changes_w_c_and_nothing_else(base, whole):
    names = changed(base / "fitted", whole[1] / "fitted" / "stage-1" / "model")
    assert names == {"model.layers.3.attn_compensation.weight"}


def test_other_users_can_read_the_models(whole):
    paths = [path for path in whole[1].rglob("*.safetensors") if "model" in path.parent.name]
    assert len(paths) > 2
    for path in paths:
        assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o666, path  # as the umask has it


def test_stage_2_changes_every_weight(whole):
    folder = whole[1] / "fitted"
    assert changed(folder / "stage-1" / "model", folder / "stage-2" / "model") == weights_of(folder / "model").keys()


def test_a_retrofit_without_w_c_skips_stage_1(base, whole):
    recovery, folder = whole
    for name in ("without", "shorter"):
        variant = next(variant for variant in recovery.variants if variant.name == name)
        assert variant.states[1].skipped == "there is no W_c" and variant.states[1].run is None
        assert not (folder / name / "stage-1").exists()
        before, after = variant.states[:2]
        for quantity in ("KL", "perplexity", "changed tokens"):
            assert recovery.of(name, after, quantity) == recovery.of(name, before, quantity)
        assert recovery.of(name, after, "KL", against=Against.BEFORE).value == 0
        assert len(changed(base / name, folder / name / "stage-2" / "model")) > 10


def test_the_record_says_what_was_trained(whole):
    recovery, _ = whole
    first, second = (state.run for state in recovery.variants[0].states[1:])
    assert (first.trained, first.steps, first.planned, first.tokens) == (32 * 32, 4, 4, 4 * 4 * 32)
    assert second.steps == 5 and second.trained > 10_000 and second.curve.steps == [1, 2, 3, 4, 5]
    assert recovery.left_out == {}
    states = [*recovery.variants[0].states, recovery.untrained_original, recovery.trained_original]
    assert all(set(state.held_out) == {"web", "speeches"} for state in states)
    assert states[2].held_out["speeches"] < states[0].held_out["speeches"]
    assert second.curve.losses[-1] < second.curve.losses[0]


def test_the_record_has_what_a_measurement_of_the_saved_models_gives(base, whole):
    """The damage after each stage, without the verb's own bookkeeping; and the comparison with the trained original."""
    recovery, folder = whole
    original, tokenizer = crosslayer.load_model(str(base / "original"))
    windows = windows_of(base, load_recipe(folder / "recipe.yaml"), tokenizer)
    folders = {
        "before": base / "fitted",
        "stage 1": folder / "fitted" / "stage-1" / "model",
        "stage 2": folder / "fitted" / "model",
        "trained": folder / "original" / "stage-1" / "model",
    }
    models = {name: crosslayer.load_model(str(path))[0] for name, path in folders.items()}
    runs = {name: logits_of(model) for name, model in models.items()}
    measured = losses(logits_of(original), runs, windows)
    states = [("fitted", state) for state in recovery.variants[0].states] + [("original", recovery.trained_original)]
    for name, state in states:
        for domain in recovery.domains:
            expected = measured[state.name].for_domain(domain).means
            for quantity, key in (("KL", "kl"), ("changed tokens", "changed")):
                value = recovery.of(name, state, quantity, domain).value
                assert value == pytest.approx(expected[key].mean(), abs=1e-7)
            ratio = recovery.of(name, state, "perplexity", domain).value
            assert np.log(ratio) == pytest.approx((expected["after"] - expected["before"]).mean(), abs=1e-7)
    last, domain = recovery.variants[0].states[2], recovery.domains[0]
    own = {name: found.for_domain(domain).means for name, found in measured.items()}
    gap, left = (own[name]["after"] - own["trained"]["after"] for name in ("before", "stage 2"))
    ratio = recovery.of("fitted", last, "perplexity", against=Against.TRAINED).value
    assert np.log(ratio) == pytest.approx(left.mean(), abs=1e-7)
    change = recovery.of("fitted", last, "KL", against=Against.BEFORE).value
    assert change == pytest.approx((own["stage 2"]["kl"] - own["stage 1"]["kl"]).mean(), abs=1e-7)
    closed = recovery.closed("fitted", last)
    if closed is not None:
        assert closed.value == pytest.approx(1 - left.mean() / gap.mean(), rel=1e-5)


def test_training_and_calibration_domains_are_seen(whole):
    recovery, _ = whole
    assert recovery.domains == ("code", "web") or recovery.domains == ("web", "code")
    assert set(recovery.seen) == {"code", "web"}
    frame = recovery.frame()
    kl = [row for row in recovery.rows_of("KL") if row.scope in recovery.domains and not row.candidate.startswith("or")]
    assert {len(column) for column in frame.values()} == {len(recovery.rows)}
    assert len(kl) == 3 * 3 * 2  # retrofits, states, domains
    first = recovery.variants[0].states[0]
    assert recovery.of("fitted", first, "KL", against=Against.BEFORE) is None


def test_the_order_is_that_of_the_last_states(whole):
    recovery, _ = whole
    assert tuple(recovery.order) == recovery.domains
    last = {variant.name: variant.states[-1] for variant in recovery.variants}
    for domain, ranks in recovery.order.items():
        ends = {name: recovery.of(name, state, "KL", domain).value for name, state in last.items()}
        assert list(ranks) == sorted(ends, key=ends.__getitem__)
        assert recovery.of(ranks[0], last[ranks[0]], "KL", domain, Against.ABOVE) is None
        for above, name in zip(ranks, ranks[1:], strict=False):
            over = recovery.of(name, last[name], "KL", domain, Against.ABOVE).value
            assert over == pytest.approx(ends[name] - ends[above])


def test_evaluation_text_is_not_trained_on(base, whole):
    """Windows of a training domain come from its held-out pieces."""
    settings = ["judge.length=300", "judge.domains=[web]", "judge.windows=16"]  # so long that no two pieces share it
    recipe = load_recipe(whole[1] / "recipe.yaml", settings)
    _, tokenizer = crosslayer.load_model(str(base / "original"))
    windows = windows_of(base, recipe, tokenizer)
    domain = recipe.data.domains[0].text(held_out_often=True)
    trained, held_out = "\n".join(domain.training()), "\n".join(domain.held_out())
    texts = [tokenizer.decode(ids) for ids in windows.by_domain()["web"]]
    assert all(text in held_out for text in texts)
    assert not [text for text in texts if text in trained]


@pytest.mark.slow
def test_the_original_reads_the_same_rows_in_the_same_order(base, tmp_path, monkeypatch):
    read: dict[str, list] = {}

    class Watching(stages.CrossLayerTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            read.setdefault(str(self._folder.relative_to(tmp_path / "out")), []).append(inputs["input_ids"].clone())
            return super().training_step(model, inputs, num_items_in_batch)

    monkeypatch.setattr(stages, "CrossLayerTrainer", Watching)
    healed(base, "without", tmp_path)
    assert set(read) == {"without/stage-2", "original/stage-1"} and len(read["original/stage-1"]) == 5
    assert torch.equal(torch.cat(read["original/stage-1"]), torch.cat(read["without/stage-2"]))


def test_an_interrupted_recovery_resumes_and_ends_the_same(base, whole, tmp_path, monkeypatch, undrawn):
    """Stopped in the middle of stage 1, and again in the middle of stage 2."""
    folder = tmp_path / "out"

    class Killed(Exception):
        pass

    def stopping(number, step):
        class Stopping(stages.CrossLayerTrainer):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                if f"fitted/stage-{number}" in str(self._folder):
                    self.add_callback(Stop(step))

            def train(self, *args, **kwargs):
                super().train(*args, **kwargs)
                if self.state.global_step == step:
                    raise Killed

        return Stopping

    for number, step in ((1, 3), (2, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(stages, "CrossLayerTrainer", stopping(number, step))
            with pytest.raises(Killed):
                healed(base, "fitted", tmp_path, resume=number > 1)
        assert (folder / "fitted" / f"stage-{number}" / "checkpoint-2").is_dir()
        assert not (folder / "record.json").exists()
    with pytest.raises(ValueError, match="'out' exists; .*`resume`"):
        healed(base, "fitted", tmp_path)
    with pytest.raises(ValueError, match="'out'.*another recipe"):
        healed(base, "fitted", tmp_path, resume=True, settings=["seed=1"])
    resumed = healed(base, "fitted", tmp_path, resume=True)
    for path in ("fitted/stage-1/model", "fitted/model", "original/stage-1/model"):
        assert not changed(folder / path, whole[1] / path), path
    own = [row for row in whole[0].rows if row.candidate.startswith("fitted,") and row.against != Against.ABOVE]
    assert own and own == [row for row in resumed.rows if row.candidate.startswith("fitted,")]
    assert not list(folder.rglob("checkpoint-*"))


def test_a_whole_recovery_is_not_done_again(base, whole, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    shutil.copytree(whole[1], folder)
    (folder / "record.json").unlink()
    monkeypatch.setattr("crosslayer.verbs.heal.run.run_stage", None)
    monkeypatch.setattr("crosslayer.verbs.heal.questions.Judge", None)
    again = healed(base, NAMES, tmp_path, folder / "recipe.yaml", resume=True)
    assert again == whole[0] and (folder / "record.json").is_file()
    (folder / "fitted" / "stage-1" / "stage.json").write_text("{}")
    with pytest.raises(ValueError, match="stage.json.*fitted/stage-1"):
        healed(base, NAMES, tmp_path, folder / "recipe.yaml", resume=True)


def test_stages_that_end_early_say_so_and_the_original_trains_to_the_last_step(base, tmp_path, undrawn):
    """The next stage continues from the model of the one that ended early."""
    early = "stop={smoothing: 0, patience: 1, least: 0.9}"
    recovery = healed(base, "fitted", tmp_path, settings=[f"stages.0.{early}", f"stages.1.{early}"])
    first, second = (state.run for state in recovery.variants[0].states[1:])
    assert (first.steps, first.planned, first.curve.steps, second.steps) == (2, 4, [1, 2], 2)
    assert recovery.trained_original.run.steps == 5
    page, sentences = recovery.page(), " ".join(recovery.sentences())
    assert "4, ended" in page and "held-out text, web" in page
    assert "640 tokens" in page and "640 tokens" in sentences and "fitted 512." in sentences
    assert [first.tokens, second.tokens] == [256, 256]
    stage = tmp_path / "out" / "fitted" / "stage-1" / "model"
    assert len(changed(base / "fitted", stage)) == 1
    for domain in recovery.domains:
        before, after = (recovery.of("fitted", state, "KL", domain) for state in recovery.variants[0].states[:2])
        assert before.value != after.value


def diverging(path, cause=None):
    """A trainer whose loss is not a number at step 2 of a stage; or whose checkpoint cannot be written."""

    class Diverging(stages.CrossLayerTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if path in str(self._folder) and self.state.global_step == 1:
                if cause is not None:
                    raise TrainingStopped("the disk is full", 2, None) from cause
                self._check_finite("loss", float("nan"), 0, 0)
            return super().training_step(model, inputs, num_items_in_batch)

    return Diverging


def test_a_retrofit_that_diverges_stops_alone(base, tmp_path, monkeypatch, undrawn):
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(stages, "CrossLayerTrainer", diverging("fitted/stage-1"))
        recovery = healed(base, "fitted without", tmp_path)
    first, second = recovery.variants[0].states[1:]
    assert first.stopped.startswith("the loss is nan at step 2") and first.run is None
    assert second.skipped == "stage 1 stopped" and recovery.of("fitted", second, "KL") == recovery.of(
        "fitted", first, "KL"
    )
    assert recovery.variants[1].states[2].run.steps == 5 and recovery.trained_original.run.steps == 5
    assert "stage 1" in recovery.page()
    assert not changed(base / "fitted", folder / "fitted" / "model")
    assert "train this" in (folder / "fitted" / "model" / "README.md").read_text()
    assert "trained this" in (folder / "without" / "model" / "README.md").read_text()
    again = healed(base, "fitted without", tmp_path, resume=True)
    assert again.variants == recovery.variants


@pytest.mark.slow
def test_without_a_trained_original_that_diverged_the_original_is_the_reference(base, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "CrossLayerTrainer", diverging("out/original"))
    recovery = healed(base, "without", tmp_path)
    assert recovery.reference == "original" and recovery.trained_original is None
    assert any("Stopped: original" in line and "the loss is nan" in line for line in recovery.sentences())


def test_a_full_disk_ends_the_recovery(base, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "CrossLayerTrainer", diverging("without/stage-2", OSError("no space")))
    with pytest.raises(TrainingStopped, match="the disk is full"):
        healed(base, "without", tmp_path)
    assert not (tmp_path / "out" / "without" / "stage-2" / "stage.json").exists()


@pytest.mark.slow
def test_ctrl_c_in_the_last_step_of_a_stage_keeps_the_step(base, tmp_path, monkeypatch):
    recipe = recipe_in(tmp_path, stages=[{"parameters": "all", "schedule": {"steps": 3}}], baseline=False)
    (tmp_path / "whole").mkdir()

    class Pressed(stages.CrossLayerTrainer):
        def train(self, *args, **kwargs):
            self.add_callback(Press(3))
            return super().train(*args, **kwargs)

    healed(base, "fitted", tmp_path / "whole", recipe)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "CrossLayerTrainer", Pressed)
        with pytest.raises(KeyboardInterrupt):
            healed(base, "fitted", tmp_path, recipe)
    signal.signal(signal.SIGINT, before)
    assert list(checkpoints(tmp_path / "out" / "fitted" / "stage-1"))[-1] == 3
    healed(base, "fitted", tmp_path, recipe, resume=True)
    assert not changed(*(folder / "out" / "fitted" / "model" for folder in (tmp_path / "whole", tmp_path)))


@pytest.mark.slow
def test_adapters_are_resumed_bit_for_bit(base, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    stage = {"parameters": "lora", "lora": {"rank": 2}, "schedule": {"steps": 4}, "train": {"learning_rate": 1e-3}}
    recipe = recipe_in(tmp_path, stages=[stage], baseline=False)
    (tmp_path / "whole").mkdir()

    class Stopping(stages.CrossLayerTrainer):
        def train(self, *args, **kwargs):
            self.add_callback(Stop(3))
            super().train(*args, **kwargs)
            raise KeyboardInterrupt

    healed(base, "fitted", tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "CrossLayerTrainer", Stopping)
        with pytest.raises(KeyboardInterrupt):
            healed(base, "fitted", tmp_path, recipe)
    assert (tmp_path / "out" / "fitted" / "stage-1" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    healed(base, "fitted", tmp_path, recipe, resume=True)
    models = [folder / "out" / "fitted" / "model" for folder in (tmp_path / "whole", tmp_path)]
    assert not changed(*models)
    assert {name for name in changed(base / "fitted", models[0]) if "norm" in name or "embed" in name} == set()


def test_another_retrofit_of_the_same_name_is_not_resumed(base, whole, tmp_path):
    shutil.copytree(base / "without", tmp_path / "fitted")
    retrofits = [tmp_path / "fitted", base / "without", base / "shorter"]
    with pytest.raises(ValueError, match="other retrofits"):
        crosslayer.heal(retrofits, whole[1] / "recipe.yaml", whole[1], original=str(base / "original"), resume=True)


def test_the_folder_comes_back_equal(whole):
    recovery, folder = whole
    assert crosslayer.load_result(folder) == recovery
    assert not list(folder.rglob(".[!.]*"))


def test_the_healed_model_opens_and_is_verified(whole):
    for name in ("fitted", "shorter"):  # one with W_c, one of transformers' own class
        folder = whole[1] / name / "model"
        model, tokenizer = crosslayer.load_model(str(folder))
        assert tokenizer.decode(tokenizer("Käse").input_ids) == "Käse"
        assert json.loads((folder / "retrofit.json").read_text())["schema"].startswith("crosslayer/retrofit/")
        verification = crosslayer.verify(str(folder), dtypes=("float32",), compile_backend="eager")
        assert verification.passed, name
        assert type(model).__name__ == ("LlamaForCausalLM" if name == "shorter" else "CrossLayerForCausalLM")


def test_the_page(whole, browser):
    browser.get((whole[1] / "report.html").as_uri())
    assert browser.title == "Recovery of original" and complaints(browser) == []
    for width in (1280, 390):
        fits(browser, width)


def test_the_command(base, tmp_path, capsys, monkeypatch):
    words = ["heal", str(base / "fitted"), "--recipe", str(recipe_in(tmp_path)), "--out", str(tmp_path / "out")]
    words += ["--original", str(base / "original"), "--set", "stages.1.schedule.steps=2", "--set", "baseline=false"]
    assert type_in(monkeypatch, words) == 0
    out = capsys.readouterr().out.splitlines()
    headline = json.loads(out[-1])
    assert len(headline["kl"]["fitted"]) == 3
    result = crosslayer.load_result(tmp_path / "out")
    assert result.reference == "original" and result.trained_original is None
    assert type_in(monkeypatch, words) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plain_crosslayer_model_is_retrofitted_and_healed(base, tmp_path):
    """As `train` writes one without a method: all is as with the same weights in transformers' Llama."""
    stock, tokenizer = crosslayer.load_model(str(base / "original"))
    to_model(stock).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    folder = retrofit_in(tmp_path, tmp_path / "ours", "fitted")
    assert torch.equal(*(weights_of(at)["model.layers.3.attn_compensation.weight"] for at in (folder, base / "fitted")))
    settings = ["stages.1.schedule.steps=2", "baseline=false"]
    ends = [
        crosslayer.heal(
            [at / "fitted"],
            recipe_in(tmp_path),
            tmp_path / f"{original} healed",
            original=str(at / original),
            settings=settings,
        )
        for at, original in ((base, "original"), (tmp_path, "ours"))
    ]
    kl = []
    for end in ends:
        last = end.variants[0].states[-1]
        kl.append([end.of("fitted", last, "KL", domain).value for domain in end.domains])
    assert kl[0] == pytest.approx(kl[1], rel=1e-5)


def test_responses_alone(base, tmp_path, undrawn):
    table = instructions_in(tmp_path)
    domain = {"name": "say", "source": str(table), "columns": {}}
    recipe = recipe_in(tmp_path, data={"length": 256, "domains": [domain]}, objective="response", baseline=False)
    recovery = healed(base, "fitted", tmp_path, recipe)
    assert recovery.left_out == {"say": 0} and set(recovery.variants[0].states[2].held_out) == {"say"}
    assert recovery.domains == ("web", "code") and recovery.seen == ("code",)
