"""Recipes: their values, their errors, and the recipes in the repository."""

# ruff: noqa: E501  messages, each in its line

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from crosslayer import CrossLayerForCausalLM, TextSource
from crosslayer.core.methods import method_names
from crosslayer.training.arguments import OWNED, training_arguments
from crosslayer.training.model_part import SIZES
from crosslayer.training.recipe import Recipe, load_recipe
from tests.helpers.training import course

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "crosslayer" / "recipes").glob("*.yaml") if not path.stem.startswith("heal-"))
SMOKE = ROOT / "crosslayer" / "recipes" / "smoke.yaml"
PLAIN = """
model: {size: tiny, method: resformer}
data: {length: 128, domains: [{name: books}, {name: web, weight: 2}]}
schedule: {steps: 100}
train: {learning_rate: 3e-3, adam_beta2: 0.95}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "plain.yaml"
    path.write_text(PLAIN)
    return path


def test_a_recipe_saved_on_windows_is_the_same(recipe):
    expected = load_recipe(recipe)
    recipe.write_bytes(b"\xef\xbb\xbf" + PLAIN.replace("\n", "\r\n").encode())
    assert load_recipe(recipe) == expected


def refusal(path: Path, *settings: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_recipe(path, settings)
    message = str(caught.value)
    assert "\n" not in message, message
    return message.replace(f"{path.parent}/", "")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_builds_a_model_and_the_arguments_of_a_run(path, tmp_path):
    recipe = load_recipe(path)
    with torch.device("meta"):
        model = CrossLayerForCausalLM(recipe.model.config(recipe.data.length, 50_277, eos_token_id=0))
    assert model.config.max_position_embeddings == recipe.data.length and model.config.bos_token_id is None
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    arguments = {**recipe.train, "bf16": False}  # which this machine may not have
    TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)


def test_every_method_has_a_recipe_of_its_name():
    recipes = {path.stem: load_recipe(path) for path in RECIPES}
    for name in method_names():
        assert name in recipes, f"write crosslayer/recipes/{name}.yaml"
        with torch.device("meta"):
            config = recipes[name].model.config(2048, 512)
        assert [method.name() for method in config.methods] == [name]
    assert recipes["vanilla"].model.method is None


def test_recipes_of_a_method_at_several_lengths_read_the_same_tokens_a_step():
    recipes = [load_recipe(path) for path in RECIPES if path.stem.startswith("svformer-length-")]
    sizes = [recipe.data.length * recipe.train["per_device_train_batch_size"] for recipe in recipes]
    assert len(sizes) > 3 and max(sizes) <= 1.03 * min(sizes)


def parameters(size: str) -> int:
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=50_277, **SIZES[size]))
    assert llama.config.rope_parameters["rope_theta"] == 1e4
    return sum(weight.numel() for weight in llama.parameters())


def test_sizes_of_the_paper_are_llamas_of_their_names():
    for name, millions in {"2M": 1.62, "82M": 81.90, "180M": 179.87, "468M": 467.92}.items():
        assert round(parameters(name) / 1e6, 2) == millions


def test_a_shape_overrides_its_size_and_the_tokenizer_gives_the_rest(recipe):
    loaded = load_recipe(recipe, ["model.shape={num_key_value_heads: 2, hidden_size: 32}"])
    config = loaded.model.config(128, 300, bos_token_id=256, eos_token_id=257, pad_token_id=258)
    assert (config.num_key_value_heads, config.hidden_size, config.num_hidden_layers) == (2, 32, 4)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (300, 256, 257, 258)
    assert config.max_position_embeddings == 128


def test_defaults(recipe):
    loaded = load_recipe(recipe, ["data={}"])
    assert loaded.name == "plain" and loaded.seed == 0 and loaded.tokenizer == "bytes"
    assert [(domain.name, domain.weight) for domain in loaded.data.domains] == [
        (name, 1.0) for name in ("books", "science", "speeches", "web", "docs", "code")
    ]
    started = load_recipe(recipe, ["model={start: smollm2}"])
    assert started.tokenizer == "smollm2"
    assert load_recipe(recipe, ["model={start: smollm2}", "tokenizer=bytes"]).tokenizer == "bytes"
    assert load_recipe(recipe, ["tokenizer=bpe:259"]).tokenizer == "bpe:259"


def test_sources_of_a_domain(recipe):
    loaded = load_recipe(recipe, ["data.domains.0={name: c4, source: allenai/c4, config: en, validation: allenai/c4}"])
    c4, web = loaded.data.domains
    assert c4.text().source == TextSource("allenai/c4", "en", "train", "text")
    assert c4.text().validation == TextSource("allenai/c4", "en", "validation", "text")
    assert web.text().source == TextSource() and web.text().validation is None


def test_schedule_in_steps_or_tokens(recipe):
    schedule = load_recipe(recipe, ["schedule={tokens: 1e6, warmup: 0.125}"]).schedule
    assert schedule.total_steps(1024) == 977 and schedule.schedule_arguments(80)["warmup_steps"] == 10
    schedule = load_recipe(recipe, ["schedule={steps: 50, warmup: 4}"]).schedule
    assert schedule.total_steps(1024) == 50 and schedule.schedule_arguments(50)["warmup_steps"] == 4
    with pytest.raises(ValueError, match="^warmup:.*3 steps.*4$"):
        schedule.schedule_arguments(3)


# --- files and overrides


def test_files_extend_one_another_key_by_key(tmp_path):
    low = tmp_path / "low.yaml"
    low.write_text(PLAIN.replace("method: resformer", "method: {name: cla, group: 2}") + "name: low\nseed: 3\n")
    (tmp_path / "deep").mkdir()
    middle = tmp_path / "deep" / "middle.yaml"
    middle.write_text("extends: ../low.yaml\ntrain: {learning_rate: 1e-3}\nmodel: {shape: {hidden_size: 32}}")
    high = tmp_path / "high.yaml"
    high.write_text(
        "extends: deep/middle.yaml\nmodel: {method: {name: resformer, mode: identity}}\ndata: {domains: [{name: code}]}"
    )
    loaded = load_recipe(high, ["train.weight_decay=0.1", "seed=4", "model.shape.head_dim=8"])
    assert loaded.name == "high" and loaded.seed == 4 and loaded.data.length == 128
    assert loaded.train == {"learning_rate": 1e-3, "adam_beta2": 0.95, "weight_decay": 0.1}
    assert loaded.model.shape == {"hidden_size": 32, "head_dim": 8}
    assert loaded.model.method == {"name": "resformer", "mode": "identity"}  # options of another method are dropped
    assert [domain.name for domain in loaded.data.domains] == ["code"]


def test_an_error_names_the_key_and_the_file(tmp_path, recipe):
    child = tmp_path / "child.yaml"
    child.write_text("extends: plain.yaml\ndata: {length: 64}\n")
    recipe.write_text(PLAIN.replace("3e-3", "fast"))
    assert refusal(child).startswith("train.learning_rate: must be a valid number")
    assert refusal(child).endswith(", got 'fast' (child.yaml)")
    recipe.write_text(PLAIN)
    child.write_text("extends: plain.yaml\ndata: {length: long}\n")
    assert refusal(child) == "data.length: must be a valid integer, got 'long' (child.yaml)"
    child.write_text("extends: plain.yaml\nmodel: {method: {name: drop, attention: [7]}}\n")
    assert re.fullmatch(r"model\.method: .* 7.* \(child\.yaml\)", refusal(child))
    child.write_text("extends: plain.yaml\ndata:\n  domains:\n    - {name: web}\n    - name: code\n      weight: -1\n")
    assert refusal(child) == "data.domains.1.weight: must be greater than 0, got -1 (child.yaml)"


def test_files_that_are_missing_or_go_in_a_circle(tmp_path, recipe):
    assert refusal(tmp_path / "plan.yaml").endswith("plan.yaml' does not exist; did you mean 'plain.yaml'?")
    assert "is a folder" in refusal(tmp_path)
    child, other = tmp_path / "child.yaml", tmp_path / "other.yaml"
    child.write_text("extends: plan.yaml")
    missing = tmp_path / "plan.yaml"
    assert refusal(child) == f"extends: '{missing.name}' does not exist; did you mean 'plain.yaml'? (child.yaml)"
    child.write_text("extends: other.yaml")
    other.write_text("extends: child.yaml")
    assert refusal(child).endswith("circle, got child.yaml → other.yaml → child.yaml (other.yaml)")
    child.write_text("extends: [plain.yaml]")
    assert refusal(child) == "extends: must be a file or the name of a shipped recipe, got ['plain.yaml'] (child.yaml)"


def test_shipped_recipes_are_used_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke = load_recipe("smoke")
    assert smoke == load_recipe(SMOKE) and smoke.name == "smoke"
    (tmp_path / "child.yaml").write_text("extends: smoke\nseed: 5\n")
    assert load_recipe("child.yaml") == smoke.model_copy(update={"name": "child", "seed": 5})
    assert refusal(Path("smok")) == "recipe 'smok' does not exist; did you mean 'smoke'?"
    assert refusal(Path("other/smoke")).startswith("recipe 'smoke' does not exist")  # in the folder that is named
    (tmp_path / "smoke").mkdir()  # such as the folder of an earlier run
    assert load_recipe("smoke") == smoke
    (tmp_path / "smoke").rmdir()
    (tmp_path / "smoke").write_text(PLAIN)  # a file goes first
    assert load_recipe("smoke").data.length == 128 and load_recipe("smoke") != smoke


BOMB = "a: &a [x, x]\nb: [*a, *a]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a recipe must hold keys and values, such as schedule: {steps: 100}, got an empty file (bad.yaml)"),
        ("- model", "a recipe must hold keys and values, such as schedule: {steps: 100}, got a list (bad.yaml)"),
        ("model: {size: tiny\nseed: 3\n", "expected ',' or '}', but got ':' (bad.yaml, line 2)"),
        ("model:\n  size: tiny\n  size: mini\n", "key 'size' is duplicate (bad.yaml, line 3)"),
        ("seed: 1\n7: 3\n", "key 7 must be text (bad.yaml, line 2)"),
        (BOMB, "alias *a is not allowed; write the value out, or use extends (bad.yaml, line 2)"),
        ("model: !!python/object/apply:os.system [ls]\nseed: 0", "tag tag:yaml.org,2002:python/object/apply:os.system is not allowed; remove it (bad.yaml, line 1)"),
        ('"a\\nb": 3', "'a\\nb': unknown key, use one of name, seed, model, tokenizer, data, objective, schedule, stages, train, eval, baseline, judge (bad.yaml)"),
        ("seed: 1\n---\nseed: 2\n", "but found another document (bad.yaml, line 2)"),
        ("seed: " + "[" * 2000, "nested too deeply (bad.yaml)"),
        ("seed: " + "9" * 40, "seed: must be less than 9223372036854775808, got " + "9" * 40 + " (bad.yaml)"),
        ('name: "\\ud800"', "'utf-8' codec can't encode character '\\ud800' in position 10: surrogates not allowed (bad.yaml)"),
        ("seed: 1e999", "1e999 is too large (bad.yaml)"),
        ("name: a\x07b", "unacceptable character #x0007: special characters are not allowed (bad.yaml)"),
        ("#" * 70_000, "a recipe must have at most 65,536 bytes, got 70,000 (bad.yaml)"),
    ],
    ids=range(15),
)  # fmt: skip
def test_files_that_are_not_a_recipe(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert refusal(path) == message


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"seed: \xff")
    assert refusal(path) == "a recipe must be UTF-8 text, got other bytes (bad.yaml)"


def test_values_are_those_of_yamls_core_schema(recipe):
    loaded = load_recipe(
        recipe,
        ["train.learning_rate=3e-4", "schedule.steps=2_000", "train.run_name=2026-11-22", "train.report_to=no",
         "train.max_grad_norm=.5", "train.bf16=True", "train.optim_args=", "seed=010", "eval.every=1e3"],
    )  # fmt: skip
    assert loaded.train == {
        "learning_rate": 3e-4, "adam_beta2": 0.95, "run_name": "2026-11-22", "report_to": "no", "max_grad_norm": 0.5,
        "bf16": True, "optim_args": None,
    }  # fmt: skip
    shape = load_recipe(recipe, ["model.shape={attn_logit_softcapping: 30, tie_word_embeddings: true}"]).model.shape
    assert repr(sorted(shape.items())) == "[('attn_logit_softcapping', 30.0), ('tie_word_embeddings', True)]"
    assert loaded.schedule.steps == 2000 and loaded.seed == 10 and loaded.eval.every == 1000


# --- what is refused


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed", "--set must be key=value, got 'seed'; for example train.learning_rate=3e-4"),
        ("data..length=3", "--set must be key=value, got 'data..length=3'; for example train.learning_rate=3e-4"),
        ("data.domains.2.weight=1", "data.domains: index must be 0 to 1, got '2'"),
        ("model.size.x=3", "model.size: must be a mapping to have the key 'x', got 'tiny'"),
        ("seed=[", "expected the node content, but found '<stream end>'"),
        ("evals=3", "evals: unknown key, did you mean 'eval'?"),
        ("model.sise=3", "model.sise: unknown key, did you mean 'size'?"),
        ("data.domains.0.colunm=3", "data.domains.0.colunm: unknown key, did you mean 'column'?"),
        ("model.shape.hidden_sise=3", "model.shape.hidden_sise: unknown key, did you mean 'hidden_size'?"),
        ("train.lerning_rate=3", "train.lerning_rate: unknown key, did you mean 'learning_rate'?"),
        ("model.size=82m", "model.size: must be a known name, got '82m'; did you mean '82M'?"),
        ("model={}", "model.size: missing; set one of tiny, mini, small, 2M, 82M, 180M, 468M, or in shape num_hidden_layers, num_attention_heads, hidden_size, intermediate_size"),
        ("model.shape.hidden_size=wide", "model.shape.hidden_size: … got 'wide'"),
        ("model.shape.hidden_size=0", "model.shape.hidden_size: … got 0"),
        ("model.shape.num_hidden_layers=1e9", "model.shape.num_hidden_layers: … got 1000000000"),
        ("model.shape.hidden_act=sillu", "model.shape.hidden_act: must be a known name, got 'sillu'; did you mean 'silu'?"),
        ("model.shape.hidden_size=30", "model.shape: hidden_size = 30 is not a multiple of num_attention_heads = 4; set head_dim"),
        ("model.shape.initializer_range=3.0", "model.shape: Validation error for field 'initializer_range': ValueError: Value must be greater or equal to 0.0 and smaller or equal to 1.0, got 3.0."),
        ("model.shape.vocab_size=3", "model.shape.vocab_size: cannot be set here: the tokenizer sets it"),
        ("model.shape.cross_layer=cla", "model.shape.cross_layer: cannot be set here: set model.method instead"),
        ("model.method=3", "model.method: must be … or a list of these, got 3"),
        ("model.method={name: cla, grop: 2}", "model.method: method 'cla' has no option 'grop'; did you mean 'group'?"),
        ("model.method=[cla, svformer]", "model.method: layer 3: cla reads values of layer 2 and svformer of layer 0; only one method may change them"),
        ("model.start=smollm2", "model.start: cannot be combined with size, shape or method; remove these"),
        ("model.shape.max_position_embeddings=64", "data.length: must be at most model.shape.max_position_embeddings (64), got 128"),
        ("tokenizer=bpe:258", "tokenizer: must be bpe:N with N at least 259, such as bpe:8192, got 'bpe:258'"),
        ("tokenizer=bpe", "tokenizer: must be bpe:N with N at least 259, such as bpe:8192, got 'bpe'"),
        ("data.length=1", "data.length: … got 1"),
        ("data.domains=[]", "data.domains: … got []"),
        ("data.domains=[books]", "data.domains.0: … got 'books'"),
        ("data.domains=[{}]", "data.domains.0.name: missing"),
        ("data.domains.0.weight=0", "data.domains.0.weight: … got 0"),
        ("data.domains.0.weight=-1", "data.domains.0.weight: … got -1"),
        ("data.domains.0.weight=.inf", "data.domains.0.weight: … got '.inf'"),
        ("data.domains.0.name=boks", "data.domains.0.name: must be an embedded domain, got 'boks'; did you mean 'books'?"),
        ("data.domains.0.name=../x", "data.domains.0.name: must be …, got '../x'"),
        ("data.domains.0.split=test", "data.domains.0.split: has no effect without source; remove it"),
        ("data.domains.0.where={meta: web}", "data.domains.0.where: has no effect without source; remove it"),
        ("data.domains.0.where=[web]", "data.domains.0.where: must …, got ['web']"),
        ("data.domains.1.name=books", "data.domains: must have different names, got 'books' twice"),
        ("schedule={}", "schedule: must have either steps or tokens (the other one null), got neither"),
        ("schedule.tokens=2e5", "schedule: must have either steps or tokens (the other one null), got both"),
        ("schedule.warmup=1.5", "schedule.warmup: must be a whole number of steps or a share below 1, got 1.5"),
        ("schedule.warmup=100", "schedule.warmup: must be less than the 100 steps of the schedule, got 100"),
        ("schedule.kind=wds", "schedule.kind: … got 'wds'"),
        ("schedule.minimum=2", "schedule.minimum: … got 2"),
        ("train=3", "train: … got 3"),
        ("train.learning_rate=high", "train.learning_rate: … got 'high'"),
        ("train.per_device_train_batch_size=0", "train.per_device_train_batch_size: … got 0"),
        ("train.gradient_accumulation_steps=-1", "train.gradient_accumulation_steps: … got -1"),
        ("train.bf16=yes", "train.bf16: … got 'yes'"),
        ("train.optim=adamw", "train.optim: must be a known name, got 'adamw'; did you mean 'adamw_torch'?"),
        ("train.report_to=[3]", "train.report_to.0: … got 3"),
        ("train.report_to=3", "train.report_to: … string or … list, got 3"),
        ("model.shape.rope_parameters=3", "model.shape.rope_parameters: … got 3"),
        ("train.max_steps=3", "train.max_steps: cannot be set here: set schedule.steps or schedule.tokens"),
        ("train.seed=1", "train.seed: cannot be set here: set seed at the top level of the recipe"),
        ("train.load_best_model_at_end=true", "train.load_best_model_at_end: cannot be set here: set eval.every and eval.windows"),
        ("train.auto_find_batch_size=true", "train.auto_find_batch_size: cannot be set here: the batch size, and with it the data, would change during the run"),
        ("train.push_to_hub=true", "train.push_to_hub: cannot be set here: upload the finished model with `hf upload`"),
        ("train.warmup_ratio=0.1", "train.warmup_ratio: cannot be set here: set schedule.warmup"),
        ("train.gradient_checkpointing=true", "train.gradient_checkpointing: cannot be set here: set activation_checkpointing"),
        ("train.activation_checkpointing_kwargs={use_reentrant: true}", "train.activation_checkpointing_kwargs.use_reentrant: must be false: …"),
        ("eval.windows=0", "eval.windows: … got 0"),
        ("seed=-1", "seed: … got -1"),
        ("name=null", "name: … got null"),
    ],
)  # fmt: skip
def test_an_error_names_key_and_value(recipe, setting, message):
    """… stands for the rule that pydantic writes; what cannot be read at all comes with its option."""
    source = r"( \(--set .*\)| \(plain\.yaml\))?"
    pattern = ".+".join(map(re.escape, message.split("…")))
    assert re.fullmatch(pattern + source, refusal(recipe, setting))


def test_a_missing_key_is_named_with_an_example(recipe):
    recipe.write_text(PLAIN.replace("schedule: {steps: 100}", ""))
    assert refusal(recipe, "seed=1") == "schedule: missing; for example schedule: {steps: 1000} (plain.yaml)"


def test_the_wrong_override_is_named_among_several(recipe):
    message = refusal(recipe, "model.sise=mini", "model.method=cla", "model.shape={}")
    assert message == "model.sise: unknown key, did you mean 'size'? (plain.yaml)"


def test_keys_that_a_run_sets_are_keys_of_transformers():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(OWNED) - fields == {"warmup_ratio"}  # which earlier versions had


def test_a_recipe_does_not_change(recipe):
    loaded = load_recipe(recipe)
    with pytest.raises(ValueError, match="frozen"):
        loaded.seed = 1


PACKAGES = {
    "report_to=wandb": "train.report_to: 'wandb' needs the package wandb, which is not installed",
    "report_to=[none, tensorboard]": "train.report_to: .*tensorboard.* needs the package tensorboard, which is not installed",
    "report_to=flyte": "the package flytekit, which is not installed",
    "torch_compile_mode=max-autotun": "train.torch_compile_mode: .* got 'max-autotun'; did you mean 'max-autotune'?",
    "report_to=wand": "train.report_to: .* got 'wand'; did you mean 'wandb'?",
    "deepspeed=ds.json": "train.deepspeed: 'ds.json' needs the package deepspeed, which is not installed",
    "use_liger_kernel=true": "train.use_liger_kernel: True needs the package liger_kernel, which is not installed",
    "accelerator_config={nonsense: 1}": "train: .* TypeError: .*nonsense",
}


@pytest.mark.parametrize("setting", PACKAGES)
def test_a_missing_package_is_named_before_data_is_read(setting, tmp_path, monkeypatch):
    monkeypatch.setattr("crosslayer.training.arguments.get_available_reporting_integrations", list)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find_spec(name) if name == "accelerate" else None)
    recipe = load_recipe(SMOKE, [f"train.{setting}"])
    with pytest.raises(ValueError, match=PACKAGES[setting]):
        training_arguments(tmp_path, 0, course(1), recipe.train)


@pytest.mark.parametrize("key", ["per_device_train_batch_size", "gradient_accumulation_steps", "neftune_noise_alpha"])
def test_numbers_have_a_least(key):
    with pytest.raises(ValueError, match=rf"train.{key}: must be .* or equal to \d, got -1 \("):
        load_recipe(SMOKE, [f"train.{key}=-1"])


WRONG = {
    "log_level=nonsense": "train: .* KeyError: 'nonsense'",
    "dataloader_num_workers=1000000": r"train.dataloader_num_workers: must be at most \d+ .* \d+ cores, got 1,000,000",
}


@pytest.mark.parametrize("setting", WRONG)
def test_arguments_that_would_fail_later_are_refused_before_the_run(setting, tmp_path):
    recipe = load_recipe(SMOKE, [f"train.{setting}"])
    with pytest.raises(ValueError, match=WRONG[setting]):
        training_arguments(tmp_path, 0, course(1), recipe.train)
