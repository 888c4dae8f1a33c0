"""Recipes of a recovery: those that are shipped, what is refused, and retrofits that do not fit."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import crosslayer
from crosslayer.training.recipe import given_recipe, load_recipe
from crosslayer.verbs.heal.retrofits import Retrofit, open_retrofits
from tests.helpers.recovery import healed, original_in, recipe_in, retrofit_in
from tests.helpers.tiny import tiny

RECIPES = Path(__file__).parents[3] / "crosslayer" / "recipes"
PAGES = RECIPES.parents[1] / "docs"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("heal-*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem and recipe.stages[-1].parameters in ("all", "lora")
    assert recipe.train.get("weight_decay") == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stage=1", "stage: unknown key, did you mean 'stages'?"),
        ("stages=[]", "model and a schedule .*stages"),
        ("model={size: tiny}", "model: has no effect with stages: the retrofits are trained; remove it"),
        ("schedule={steps: 3}", "schedule: has no effect with stages"),
        ("tokenizer=bytes", "tokenizer: has no effect with stages: it is the original's"),
        ("stages.0.parameters=w_c", "stages.0.parameters: .*'compensation', 'all' or 'lora', got 'w_c'"),
        ("stages.0.stop.patience=0", "stages.0.stop.patience: .*greater than or equal to 1, got 0"),
        ("stages.0.stop.smoothing=1", "stages.0.stop.smoothing: .*less than 1, got 1"),
        ("stages.0.lora.rank=4", "stages.0.lora: has no effect with parameters: compensation"),
        ("stages.0.schedule.step=4", "stages.0.schedule.step: unknown key, did you mean 'steps'?"),
        ("stages.1.train.learning_rat=1", "stages.1.train.learning_rat: unknown key, did you mean 'learning_rate'?"),
        ("stages.1.train.max_steps=1", "stages.1.train.max_steps: cannot be set here: set schedule.steps"),
        ("train.num_train_epochs=1", "train.num_train_epochs: cannot be set here"),
        ("objective=sft", "objective: .*'next-token', 'response' or 'distill', got 'sft'"),
        ("objective=response", "^objective: response needs columns, but domain 'web' has none"),
        ("data.domains.0.columns={}", "data.domains.0.columns: needs a source of .jsonl files, or a dataset, got None"),
        ("data.domains.0.name=wob", "data.domains.0.name: .* got 'wob'; did you mean 'web'?"),
        ("judge.windows=20", "judge.windows: must be at least 32 for 2 domains, got 20"),
        ("judge.domains=[wob]", "judge.domains: 'wob' is not an embedded domain; did you mean 'web'"),
        ("judge.domains=[web, web]", r"judge.domains: .* once, got \['web', 'web'\]"),
        ("judge.every=3", "judge.every: unknown key, use one of domains, windows, length, held_out, needles"),
        ("eval.every=3", "^eval: has no effect with stages: its keys are judge.windows and judge.held_out"),
        ("eval.windows=64", "^eval: has no effect with stages: its keys are judge.windows and judge.held_out"),
        (
            "data.domains.0.source=own.txt",
            "'web' .*own.txt.* has the name of an embedded evaluation domain",
        ),
        ("baseline=1", "baseline: .*boolean, got 1"),
        ("seed=-1", "seed: .*got -1"),
    ],
)
def test_errors_name_the_key(setting, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(recipe_in(tmp_path), [setting])
    assert "\n" not in str(caught.value)


def test_an_extending_recipe_takes_the_rest(tmp_path):
    recipe_in(tmp_path)
    (tmp_path / "on.yaml").write_text("extends: little.yaml\nobjective: distill\n")
    recipe = load_recipe(tmp_path / "on.yaml", ["stages.1.schedule.steps=9"])
    assert (recipe.name, recipe.objective, recipe.stages[1].schedule.steps) == ("on", "distill", 9)
    assert not recipe.trains_original


def test_the_original_trains_where_there_is_something_to_train(tmp_path):
    assert load_recipe(recipe_in(tmp_path)).trains_original
    for setting in ("baseline=false", "objective=distill", "stages.1.parameters=compensation"):
        assert not load_recipe(recipe_in(tmp_path), [setting]).trains_original


def test_enough_of_an_embedded_domain_is_held_out_to_measure_on(tmp_path):
    domain = load_recipe(recipe_in(tmp_path)).data.domains[0].text(held_out_often=True)
    held_out, kept = sum(map(len, domain.held_out())), sum(map(len, domain.training()))
    assert 0.15 < held_out / (held_out + kept) < 0.25


def test_instructions_come_from_jsonl_files_or_a_dataset(tmp_path):
    def recipe(source, **options):
        domains = [{"name": "x", "source": source, "columns": {}, **options}]
        return load_recipe(recipe_in(tmp_path, data={"domains": domains}))

    domain = recipe("some/dataset", split="test").data.domains[0].text()
    assert (domain.source.name, domain.source.split) == ("some/dataset", "test")
    with pytest.raises(ValueError, match=".jsonl.*'a.txt'"):
        recipe("a.txt")
    with pytest.raises(ValueError, match="with columns"):
        recipe("a.jsonl", split="test")


def test_the_example_of_the_guide_is_a_recipe(tmp_path):
    (example,) = re.findall(r"```yaml\n(.+?)```", (PAGES / "guides" / "convert.md").read_text(), re.S)
    (tmp_path / "example.yaml").write_text(example)
    recipe = load_recipe(tmp_path / "example.yaml")
    assert [stage.parameters for stage in recipe.stages] == ["compensation", "all"]
    assert recipe.objective == "response" and all(domain.columns for domain in recipe.data.domains)


def test_another_original_of_the_same_shape_is_refused(base, tmp_path):
    another = original_in(tmp_path, 0.01, "another")
    with pytest.raises(ValueError, match="'original' for 'without' and 'another' for 'zero'"):
        open_retrofits([base / "without", retrofit_in(tmp_path, another, "zero")])
    with pytest.raises(ValueError, match="'without'.*'another'"):
        crosslayer.heal([base / "without"], recipe_in(tmp_path), tmp_path / "out", original=str(another))
    assert not (tmp_path / "out").exists()


def test_the_digest_of_a_retrofit_depends_on_the_original(base, tmp_path):
    retrofit = open_retrofits([base / "without"], str(base / "original"))[0][0]
    copy = Retrofit(tmp_path, retrofit.report)
    weights = load_file(retrofit.folder / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors")
    assert copy.digest() == retrofit.digest()
    weights["model.embed_tokens.weight"][0, 0] += 1
    save_file(weights, tmp_path / "model.safetensors")
    assert copy.digest() != retrofit.digest()


def test_missing_peft_is_an_error_before_anything_is_trained(base, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"parameters:.*install '\.\[heal\]'"):
        healed(base, "without", tmp_path, settings=["stages.1.parameters=lora"])


def test_a_file_instead_of_the_folder_is_refused(base, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="got the file 'out'"):
        healed(base, "without", tmp_path)


def test_what_is_no_retrofit_is_refused(base, tmp_path):
    original = str(base / "original")
    with pytest.raises(ValueError, match="no retrofit"):
        open_retrofits([])
    with pytest.raises(ValueError, match="'nowhere'"):
        open_retrofits([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="'original'"):
        open_retrofits([original])
    with pytest.raises(ValueError, match="'without'"):
        open_retrofits([base / "without", base / "without"], original)
    with pytest.raises(ValueError, match="opened.*`original`"):
        open_retrofits([base / "without"])


@pytest.mark.slow  # loads SmolLM2
def test_an_original_of_another_size_is_refused(base):
    with pytest.raises(ValueError, match="'without' .*vocab_size 258, but 'smollm2' has 49152"):
        open_retrofits([base / "without"], "smollm2")


def test_another_model_of_the_same_shape_but_other_sizes_is_refused(base, tmp_path):
    model = tiny("llama", vocab_size=258, num_hidden_layers=4, intermediate_size=64)
    model.save_pretrained(tmp_path / "wider")
    crosslayer.load_model(str(base / "original"))[1].save_pretrained(tmp_path / "wider")
    with pytest.raises(ValueError, match=r"'without' .* [\d,]+ parameters; 'wider' has [\d,]+"):
        crosslayer.heal([base / "without"], recipe_in(tmp_path), tmp_path / "out", original=str(tmp_path / "wider"))


def test_arguments_that_contradict_each_other_are_refused_before_anything_is_measured(base, tmp_path):
    settings = ["stages.1.train.bf16=true", "stages.1.train.fp16=true"]
    with pytest.raises(ValueError, match=r"stages\.1: "):
        healed(base, "without", tmp_path, settings=settings)
    assert not (tmp_path / "out").exists()


def test_settings_go_with_a_file_alone(base, tmp_path):
    recipe = load_recipe(recipe_in(tmp_path))
    with pytest.raises(ValueError, match="`settings` needs a recipe file"):
        crosslayer.heal([base / "without"], recipe, tmp_path / "out", settings=["seed=1"])


def test_each_verb_takes_its_kind_of_recipe(tmp_path):
    assert given_recipe("heal-smoke", (), stages=True).stages and not given_recipe("smoke", (), stages=False).stages
    with pytest.raises(ValueError, match="stages: .*`crosslayer heal`"):
        crosslayer.train(recipe_in(tmp_path), tmp_path / "run")
    with pytest.raises(ValueError, match="stages: missing.*`crosslayer train`"):
        crosslayer.heal([], "smoke", tmp_path / "out")
    with pytest.raises(ValueError, match="^objective: distill needs stages"):
        load_recipe("smoke", ["objective=distill"])
    for key in ("judge={windows: 64}", "baseline=false"):
        with pytest.raises(ValueError, match="has no effect without stages"):
            load_recipe("smoke", [key])
