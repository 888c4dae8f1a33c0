"""A run from its recipe to its folder: the record, the model, resuming, and what is refused."""

import json
import shutil

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import crosslayer
from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.corpus.documents import TextSource
from crosslayer.probe.depth import output_norms
from crosslayer.training.recipe import load_recipe
from crosslayer.training.rows import FixedRows, evenly_spaced, read_rows
from crosslayer.training.texts import Domain
from crosslayer.training.tokenizers import make_tokenizer
from tests.cli.test_bad_input import type_in
from tests.helpers.browser import complaints, fits
from tests.helpers.recovery import instructions_in
from tests.helpers.training import Stop, recipe_in


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_in(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return crosslayer.train(recipe, folder, settings=["model.method=resformer"]), folder


def test_the_record_says_what_was_trained_on_what(whole):
    run, folder = whole
    assert (run.name, run.steps, run.tokens, run.model.methods[0]["name"]) == ("little", 6, 6 * 8 * 32, "resformer")
    assert [domain.name for domain in run.domains] == ["books", "code"]
    assert [domain.share for domain in run.domains] == [0.75, 0.25]
    assert run.curve.steps == [2, 4, 6] and run.curve.losses[-1] < run.curve.losses[0] < 6
    assert [entry.step for entry in run.validation] == [4, 6]
    last = run.validation[-1].losses
    means = [sum(run.windows[name]) / len(run.windows[name]) for name in ("books", "code")]
    assert [last["books"], last["code"]] == pytest.approx(
        means, rel=1e-2
    )  # the loss weighs windows by what they predict
    assert run.final_loss == pytest.approx(0.75 * last["books"] + 0.25 * last["code"])
    config = load_recipe_config(folder)
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * config.vocab_size  # products of a token: maps and the head
    attention = 2 * 2 * 32 * 32  # a token's scores and sums over 32 positions, without the mask
    assert run.model.flops_per_token == pytest.approx(3 * 2 * (matrices + attention), rel=0.01)
    assert run.model.kv_bytes_per_token == 2 * 2 * 32 * 2  # keys and values of both layers, two bytes each
    assert run.model.kv_read_bytes_per_token == run.model.kv_bytes_per_token
    assert run.peak_bytes is None or run.peak_bytes > 0
    assert run.matrix_flops > run.tokens * run.model.flops_per_token / run.seconds
    assert run.snapshots == ()


def test_snapshots_are_a_diagnosis_of_the_model_at_that_step(recipe, tmp_path):
    settings = ["model.method=svformer", "eval.snapshots=3"]
    run = crosslayer.train(recipe, tmp_path / "run", settings=settings)
    assert [snapshot.step for snapshot in run.snapshots] == [4, 6]
    assert run.model.kv_read_bytes_per_token == 2 * 2 * 32 * 2 > run.model.kv_bytes_per_token  # the source's are read
    model, tokenizer = crosslayer.load_model(tmp_path / "run" / "model")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokens = tmp_path / "tokens"
    rows = [
        evenly_spaced(FixedRows(Domain(name, TextSource()).shards(tokenizer, tokens)[1], 32, name), 3)
        for name in ("books", "code")
    ]
    windows = torch.stack([rows[0][0]["input_ids"], rows[1][0]["input_ids"], rows[0][1]["input_ids"]])
    diagnosis = crosslayer.diagnose(model, windows)
    last = run.snapshots[-1]
    assert last.first_token_share == pytest.approx(diagnosis.first_token_share.tolist(), rel=1e-6)
    assert last.stream_norm == pytest.approx(diagnosis.stream_norm.tolist(), rel=1e-6)
    assert last.sink_rate == diagnosis.sink_rate.tolist()
    assert last.entropy == pytest.approx(diagnosis.entropy.tolist(), rel=1e-6)
    assert last.token_similarity == pytest.approx(diagnosis.token_similarity.tolist(), rel=1e-6)
    norms = [output_norms(model, window) for window in windows]
    for name in norms[0]:
        expected = sum(each[name] for each in norms) / len(norms)
        assert getattr(last, name) == pytest.approx(expected.tolist(), rel=1e-5)


def load_recipe_config(folder):
    return crosslayer.CrossLayerConfig.from_pretrained(folder / "model")


def test_the_folder_comes_back_equal(whole):
    run, folder = whole
    assert crosslayer.load_result(folder) == run
    assert not list(folder.glob(".[!.]*"))
    assert load_recipe(folder / "recipe.yaml").model_dump(mode="json") == run.recipe
    model, tokenizer = crosslayer.load_model(folder / "model")
    assert isinstance(model, CrossLayerForCausalLM) and tokenizer.decode(tokenizer("Käse").input_ids) == "Käse"
    with torch.no_grad():
        assert model(tokenizer("a text", return_tensors="pt").input_ids).logits.isfinite().all()


def test_the_page(whole, browser):
    run, folder = whole
    browser.get((folder / "report.html").as_uri())
    assert browser.title == "Training of little" and complaints(browser) == []
    for width in (1280, 390):
        fits(browser, width)


def test_a_mixture_of_domains_of_one_table_has_a_loss_of_each(recipe, tmp_path):
    """SlimPajama's layout and the shipped mixture, with a local table in place of the hub's."""
    shipped = load_recipe("slimpajama-domains").data.domains
    assert {domain.name: domain.weight for domain in shipped} == {
        "commoncrawl": 50, "c4": 20, "github": 10, "books": 5, "arxiv": 5, "wikipedia": 5, "stackexchange": 5,
    }  # fmt: skip  # arXiv 2410.17897, Table 2
    names = [str(domain.where["meta.redpajama_set_name"]) for domain in shipped]
    assert len({*names}) == 7 and all(name.startswith("RedPajama") for name in names)
    rows = [{"text": f"{name} " * 80, "meta": {"redpajama_set_name": name}} for name in names for _ in range(2)]
    for split, part in {"training": rows, "validation": rows[::2]}.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    own = {"source": str(tmp_path / "training.jsonl"), "validation": str(tmp_path / "validation.jsonl")}
    domains = [{**domain.model_dump(), **own} for domain in shipped]
    settings = [f"data.domains={json.dumps(domains)}", "schedule.steps=2", "schedule.warmup=0", "eval.every=1"]
    run = crosslayer.train(recipe, tmp_path / "run", settings=settings)
    assert [domain.share for domain in run.domains] == pytest.approx([0.5, 0.2, 0.1, 0.05, 0.05, 0.05, 0.05])
    for domain, name in zip(run.domains, names, strict=True):
        assert domain.tokens == 2 * (80 * (len(name) + 1) + 1), name  # bytes of its own rows, with their ends
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    for entry in run.validation:
        for name, loss in entry.losses.items():
            logged = [line[f"eval_{name}_loss"] for line in log if f"eval_{name}_loss" in line]
            assert loss in logged and len(logged) == 2
    page, last = (tmp_path / "run" / "report.html").read_text(), run.validation[-1].losses
    cells = [f"<td data-name='validation loss'>{loss:.4f}</td>" for loss in (*last.values(), sum(last.values()) / 7)]
    assert len(last) == 7 and all(cell in page for cell in cells)


def test_a_run_on_responses_is_trained_and_judged_by_these_alone(tmp_path):
    """Three examples are held out, whose responses have a few digits and an end, and whose prompts are long."""
    domain = {"name": "say", "source": str(instructions_in(tmp_path)), "columns": {}}
    parts = {"data": {"length": 512, "domains": [domain]}, "schedule": {"steps": 2}}
    ends, counts = {}, {}
    for objective in ("response", "next-token"):
        path = recipe_in(tmp_path, **parts, objective=objective)
        run = crosslayer.train(path, tmp_path / objective)
        assert run.recipe.get("objective", "next-token") == objective and set(run.windows) == {"say"}
        rows = read_rows(load_recipe(path), make_tokenizer("bytes", list)).held_out["say"]
        counts[objective], ends[objective] = sum(int((row["labels"] != -100).sum()) for row in rows), run.final_loss
    assert counts["response"] < 40 < 600 < counts["next-token"]
    assert ends["response"] != ends["next-token"]


def test_an_interrupted_run_resumes_and_ends_the_same(recipe, whole, tmp_path, monkeypatch):
    from crosslayer.training import stages as module

    class Stopping(module.CrossLayerTrainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.add_callback(Stop(3))

        def save_model(self, output_dir=None, _internal_call=False):
            if not _internal_call:
                raise KeyboardInterrupt
            super().save_model(output_dir, _internal_call)

    folder, settings = tmp_path / "run", ["model.method=resformer"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "CrossLayerTrainer", Stopping)
        with pytest.raises(KeyboardInterrupt):
            crosslayer.train(recipe, folder, settings=settings)
    assert not (folder / "record.json").exists()
    with pytest.raises(ValueError, match="'run'.*`resume`"):
        crosslayer.train(recipe, folder, settings=settings)
    with pytest.raises(ValueError, match="folder 'run'.*another"):
        crosslayer.train(recipe, folder, settings=[*settings, "seed=1"], resume=True)
    resumed = crosslayer.train(recipe, folder, settings=settings, resume=True)
    assert resumed.curve.losses == whole[0].curve.losses
    assert resumed.validation[-1].losses == whole[0].validation[-1].losses


def test_the_same_seed_gives_the_same_text_and_shared_weights(recipe, tmp_path, whole):
    """Paired runs: the other method reads the same rows, and begins with the same weights where both have them."""
    run = crosslayer.train(recipe, tmp_path / "plain", settings=["schedule.steps=1", "schedule.warmup=0"])
    assert [d.fingerprint for d in run.domains] == [d.fingerprint for d in whole[0].domains]
    assert run.windows.keys() == whole[0].windows.keys() and run.model.methods == []


def test_training_on_from_a_model(whole, tmp_path):
    start = whole[1] / "model"
    path = recipe_in(tmp_path, model={"start": str(start)}, schedule={"steps": 1})
    run = crosslayer.train(path, tmp_path / "on")
    assert run.model.methods[0]["name"] == "resformer" and run.curve.steps == [1] and run.seconds > 0
    assert run.final_loss < whole[0].curve.losses[0]
    with pytest.raises(ValueError, match=r"'bpe:512'.*\d+"):
        (tmp_path / "own.txt").write_text(" ".join(f"w{number}" for number in range(20_000)))
        own = f"data.domains=[{{name: own, source: {tmp_path / 'own.txt'}}}]"
        crosslayer.train(path, tmp_path / "other", settings=["tokenizer=bpe:512", own])


def test_the_command(recipe, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    words = ["train", str(recipe), "--out", str(folder), "--set", "schedule.steps=2", "--set", "schedule.warmup=0"]
    assert type_in(monkeypatch, words) == 0
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1])["steps"] == 2
    assert type_in(monkeypatch, words) == 2
    assert "--resume" in capsys.readouterr().err
    words[words.index("--out") + 1] = str(tmp_path / "nan")
    assert type_in(monkeypatch, [*words, "--set", "train.learning_rate=1e30", "--set", "schedule.steps=5"]) == 1
    assert "the loss is" in capsys.readouterr().err


def test_another_number_of_processes_resumes_with_the_same_batch(recipe, whole, tmp_path):
    """The accumulation that the error names is accepted, although it changes the recipe."""
    folder = shutil.copytree(whole[1], tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-6")
    (folder / "record.json").unlink()
    text = (folder / "recipe.yaml").read_text()

    def resumed(*settings):
        return crosslayer.train(recipe, folder, settings=["model.method=resformer", *settings], resume=True)

    with pytest.raises(ValueError, match="8.*checkpoint-4,.*4; set train.gradient_accumulation_steps=2"):
        resumed("train.gradient_accumulation_steps=1")
    assert (folder / "recipe.yaml").read_text() == text
    run = resumed("train.gradient_accumulation_steps=4", "train.per_device_train_batch_size=2")
    assert run.tokens == 6 * 8 * 32 and run.curve.steps == [2, 4, 6]
    with pytest.raises(ValueError, match="folder 'run'.*another"):
        resumed("train.learning_rate=1e-3")
