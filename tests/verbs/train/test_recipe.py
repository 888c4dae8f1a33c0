"""Recipes: what a file says, what is refused and in which words, and the files that come along."""

# ruff: noqa: E501  messages, each in its line

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from crosslayer import CrossLayerForCausalLM, TextSource
from crosslayer.core.methods import method_names
from crosslayer.verbs.train.arguments import OWNED, training_arguments
from crosslayer.verbs.train.recipe import SIZES, DomainPart, Recipe, load_recipe
from tests.helpers.training import course

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.startswith("heal-"))
SMOKE = ROOT / "recipes" / "smoke.yaml"
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


def refusal(path: Path, *settings: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_recipe(path, settings)
    message = str(caught.value)
    assert "\n" not in message, message
    return message.removeprefix(f"{path.parent}/")


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
    assert c4.training_source() == TextSource("allenai/c4", "en", "train", "text")
    assert c4.validation_source() == TextSource("allenai/c4", "en", "validation", "text")
    assert web.training_source() == TextSource() and web.validation_source() is None


def test_schedule_in_steps_or_tokens(recipe):
    schedule = load_recipe(recipe, ["schedule={tokens: 1e6, warmup: 0.125}"]).schedule
    assert schedule.total_steps(1024) == 977 and schedule.course(80)["warmup_steps"] == 10
    schedule = load_recipe(recipe, ["schedule={steps: 50, warmup: 4}"]).schedule
    assert schedule.total_steps(1024) == 50 and schedule.course(50)["warmup_steps"] == 4
    with pytest.raises(ValueError, match=r"^the schedule's warmup is 4 steps of 3; it must be fewer$"):
        schedule.course(3)


# --- files and settings


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
    assert loaded.model.method == {"name": "resformer", "mode": "identity"}  # an option of another method is not kept
    assert [domain.name for domain in loaded.data.domains] == ["code"]


def test_an_error_names_the_file_that_wrote_the_value(tmp_path, recipe):
    child = tmp_path / "child.yaml"
    child.write_text("extends: plain.yaml\ndata: {length: 64}\n")
    recipe.write_text(PLAIN.replace("3e-3", "fast"))
    assert refusal(child) == "plain.yaml: train.learning_rate: Input should be a valid number; it is 'fast'"
    recipe.write_text(PLAIN)
    child.write_text("extends: plain.yaml\ndata: {length: long}\n")
    assert refusal(child) == "child.yaml: data.length: Input should be a valid integer; it is 'long'"
    child.write_text("extends: plain.yaml\nmodel: {method: {name: drop, attention: [7]}}\n")
    assert refusal(child) == "child.yaml: model: method: drop: attention must hold layers from 0 to 3, got 7"


def test_files_that_are_missing_or_go_in_a_circle(tmp_path, recipe):
    assert refusal(tmp_path / "plan.yaml").endswith(f"plan.yaml' does not exist; did you mean '{recipe}'?")
    assert "is a folder" in refusal(tmp_path)
    child, other = tmp_path / "child.yaml", tmp_path / "other.yaml"
    child.write_text("extends: plan.yaml")
    missing = tmp_path / "plan.yaml"
    assert refusal(child) == f"child.yaml: extends: '{missing}' does not exist; did you mean '{recipe}'?"
    child.write_text("extends: other.yaml")
    other.write_text("extends: child.yaml")
    assert refusal(child) == "other.yaml: extends goes in a circle: child.yaml → other.yaml → child.yaml"
    child.write_text("extends: [plain.yaml]")
    assert refusal(child) == "child.yaml: extends is ['plain.yaml']; it must be the name of a file beside this one"


BOMB = "a: &a [x, x]\nb: [*a, *a]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": it is empty; a recipe holds keys and values, such as schedule: {steps: 100}"),
        ("- model", ": it holds list; a recipe holds keys and values, such as schedule: {steps: 100}"),
        ("model: {size: tiny\nseed: 3\n", ", line 2: expected ',' or '}', but got ':'"),
        ("model:\n  size: tiny\n  size: mini\n", ", line 3: the key 'size' stands twice"),
        ("seed: 1\n7: 3\n", ", line 2: the key 7 is not a word"),
        (BOMB, ", line 2: *a is an alias; write the value out, or use extends"),
        ("model: !!python/object/apply:os.system [ls]\nseed: 0", ", line 1: the tag tag:yaml.org,2002:python/object/apply:os.system is not read; leave it out"),
        ('"a\\nb": 3', ": 'a\\nb' is not known; known are name, seed, model, tokenizer, data, schedule, optimizer, train, save_minutes, eval"),
        ("seed: 1\n---\nseed: 2\n", ", line 2: but found another document"),
        ("seed: " + "[" * 2000, ": it is nested too deeply"),
        ("seed: " + "9" * 40, ": seed: Input should be less than 9223372036854775808; it is " + "9" * 40),
        ('name: "\\ud800"', ": 'utf-8' codec can't encode character '\\ud800' in position 10: surrogates not allowed"),
        ("seed: 1e999", ": 1e999 is too large"),
        ("name: a\x07b", ": unacceptable character #x0007: special characters are not allowed"),
        ("#" * 70_000, ": it has 70,000 bytes, and a recipe at most 65,536"),
    ],
    ids=range(15),
)  # fmt: skip
def test_files_that_are_no_recipe(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert refusal(path).startswith(f"bad.yaml{message}")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"seed: \xff")
    assert refusal(path) == "bad.yaml: it is not UTF-8 text"


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
        ("seed", "it must be key=value, for example train.learning_rate=3e-4"),
        ("data..length=3", "it must be key=value, for example train.learning_rate=3e-4"),
        ("data.domains.2.weight=1", "data.domains is a list; its entries are 0 to 1, not '2'"),
        ("model.size.x=3", "model.size is 'tiny', which has no key 'x'"),
        ("seed=[", "expected the node content, but found '<stream end>'"),
        ("evals=3", "evals is not known; did you mean 'eval'?"),
        ("model.sise=3", "model: sise is not known; did you mean 'size'?"),
        ("data.domains.0.colunm=3", "data.domains.0: colunm is not known; did you mean 'column'?"),
        ("model.shape.hidden_sise=3", "model.shape: hidden_sise is not known; did you mean 'hidden_size'?"),
        ("train.lerning_rate=3", "train: lerning_rate is not known; did you mean 'learning_rate'?"),
        ("model.size=82m", "model.size: '82m' is not known; did you mean '82M'?"),
        ("model={}", "model: size is missing; write one of tiny, mini, small, 2M, 82M, 180M, 468M, or in shape num_hidden_layers, num_attention_heads, hidden_size, intermediate_size"),
        ("model.shape.hidden_size=wide", "model.shape.hidden_size: … it is 'wide'"),
        ("model.shape.hidden_size=0", "model.shape.hidden_size: … it is 0"),
        ("model.shape.num_hidden_layers=1e9", "model.shape.num_hidden_layers: … it is 1000000000"),
        ("model.shape.hidden_act=sillu", "model.shape.hidden_act: 'sillu' is not known; did you mean 'silu'?"),
        ("model.shape.hidden_size=30", "model: shape: hidden_size = 30 is not a multiple of num_attention_heads = 4; set head_dim"),
        ("model.shape.initializer_range=3.0", "model: shape: Validation error for field 'initializer_range': ValueError: Value must be greater or equal to 0.0 and smaller or equal to 1.0, got 3.0."),
        ("model.shape.vocab_size=3", "model.shape: vocab_size is not set here: the tokenizer decides it"),
        ("model.shape.cross_layer=cla", "model.shape: cross_layer is not set here: write model.method"),
        ("model.method=3", "model.method: 3 is no method's name, no keys and values with a name, and no list of these"),
        ("model.method={name: cla, grop: 2}", "model.method: method 'cla' has no option 'grop'; did you mean 'group'?"),
        ("model.method=[cla, svformer]", "model: method: layer 3: cla reads values of layer 2 and svformer of layer 0; only one method may change them"),
        ("model.start=smollm2", "model: start trains a model as it is; leave size, shape and method out"),
        ("model.shape.max_position_embeddings=64", "plain.yaml: data: length is 128, more than model.shape.max_position_embeddings = 64"),
        ("tokenizer=bpe:258", "tokenizer: tokenizer 'bpe:258': give bpe:N with a number of tokens from 259 on, such as bpe:8192"),
        ("tokenizer=bpe", "tokenizer: tokenizer 'bpe': give bpe:N with a number of tokens from 259 on, such as bpe:8192"),
        ("data.length=1", "data.length: … it is 1"),
        ("data.domains=[]", "data.domains: … it is []"),
        ("data.domains=[books]", "data.domains.0: … it is 'books'"),
        ("data.domains=[{}]", "data.domains.0.name: …"),
        ("data.domains.0.weight=0", "data.domains.0.weight: … it is 0"),
        ("data.domains.0.weight=-1", "data.domains.0.weight: … it is -1"),
        ("data.domains.0.weight=.inf", "data.domains.0.weight: … it is '.inf'"),
        ("data.domains.0.name=boks", "data.domains.0: name is 'boks', no embedded domain; did you mean 'books'?"),
        ("data.domains.0.name=../x", "data.domains.0.name: '../x' is not at most 64 letters, digits, _, - and ., a letter or digit first"),
        ("data.domains.0.split=test", "data.domains.0: split does nothing without source, for the embedded corpus; leave it out"),
        ("data.domains.1.name=books", "data.domains: 'books' stands twice; names of domains must differ"),
        ("schedule={}", "schedule: steps or tokens must be given, and the other of the two be null"),
        ("schedule.tokens=2e5", "schedule: steps or tokens must be given, and the other of the two be null"),
        ("schedule.warmup=1.5", "schedule.warmup: 1.5 is neither a whole number of steps nor a share below 1"),
        ("schedule.warmup=100", "schedule: the schedule's warmup is 100 steps of 100; it must be fewer"),
        ("schedule.kind=wds", "schedule.kind: … it is 'wds'"),
        ("optimizer.rates={'(': 2}", "optimizer.rates.(: '(' is no regular expression: missing ), unterminated subpattern at position 0"),
        ("schedule.minimum=2", "schedule.minimum: … it is 2"),
        ("train=3", "train: … it is 3"),
        ("train.learning_rate=high", "train.learning_rate: … it is 'high'"),
        ("train.per_device_train_batch_size=0", "train.per_device_train_batch_size: … it is 0"),
        ("train.gradient_accumulation_steps=-1", "train.gradient_accumulation_steps: … it is -1"),
        ("train.bf16=yes", "train.bf16: … it is 'yes'"),
        ("train.optim=adamw", "train.optim: 'adamw' is not known; did you mean 'adamw_torch'?"),
        ("train.report_to=[3]", "train.report_to.0: … it is 3"),
        ("train.report_to=3", "train.report_to: … string, or … list; it is 3"),
        ("model.shape.rope_parameters=3", "model.shape.rope_parameters: … it is 3"),
        ("train.max_steps=3", "train: max_steps is not set here: write schedule.steps or schedule.tokens"),
        ("train.seed=1", "train: seed is not set here: write `seed` at the top of the recipe"),
        ("train.load_best_model_at_end=true", "train: load_best_model_at_end is not set here: write eval.every and eval.windows"),
        ("train.auto_find_batch_size=true", "train: auto_find_batch_size is not set here: the batch would change under way, and with it the data"),
        ("train.push_to_hub=true", "train: push_to_hub is not set here: a finished model is pushed from its own folder"),
        ("train.warmup_ratio=0.1", "train: warmup_ratio is not set here: write schedule.warmup"),
        ("train.gradient_checkpointing=true", "train: gradient_checkpointing is not set here: write activation_checkpointing"),
        ("train.activation_checkpointing_kwargs={use_reentrant: true}", "train.activation_checkpointing_kwargs: use_reentrant must not be true, which loses gradients of what layers lend"),
        ("eval.windows=0", "eval.windows: … it is 0"),
        ("seed=-1", "seed: … it is -1"),
        ("name=null", "name: … it is null"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(recipe, setting, message):
    """The setting, or the file, the key and the value; … stands for pydantic's words."""
    source = "" if message.startswith("plain.yaml: ") else f"--set {setting}: "
    words = ".+".join(map(re.escape, f"{source}{message}".split("…")))
    assert re.fullmatch(words, refusal(recipe, setting))


def test_a_key_that_is_missing_is_said_of_the_file_and_with_what_to_write(recipe):
    recipe.write_text(PLAIN.replace("schedule: {steps: 100}", ""))
    said = refusal(recipe, "seed=1")
    assert re.fullmatch(r"plain\.yaml: schedule: .+; write for example schedule: \{steps: 1000\}", said)


def test_the_setting_that_is_wrong_is_named_among_several(recipe):
    said = refusal(recipe, "model.sise=mini", "model.method=cla", "model.shape={}")
    assert said == "--set model.sise=mini: model: sise is not known; did you mean 'size'?"


def test_muon_beside_an_optimizer_of_transformers_is_refused(recipe):
    message = "--set train.optim=sgd: train: optim does nothing beside optimizer.name: muon; leave one of the two out"
    assert refusal(recipe, "optimizer.name=muon", "train.optim=sgd") == message


def test_keys_that_a_run_sets_are_keys_of_transformers():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(OWNED) - fields == {"warmup_ratio"}  # which earlier versions had


def test_a_recipe_does_not_change(recipe):
    loaded = load_recipe(recipe)
    with pytest.raises(ValueError, match="frozen"):
        loaded.seed = 1


# --- the page


def parts(part: type[BaseModel], prefix: str = "") -> list[list[str]]:
    """The rows of the page: each key with its default and what it holds, of a part its keys."""
    rows = []
    for name, field in part.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            rows += parts(inner, f"{prefix}{name}.")
            continue
        plain = field.default is None or isinstance(field.default, str | int | float | dict)
        default = f"`{json.dumps(field.default)}`" if plain else ""
        rows.append([f"`{prefix}{name}`", default, " ".join((field.description or "").split())])
        if name == "domains":
            rows += parts(DomainPart, f"{prefix}{name}[].")
    return rows


def table(head: str) -> list[list[str]]:
    """The rows of a table of the page, by the first words of its head."""
    lines = iter((ROOT / "docs" / "reference" / "recipes.md").read_text().splitlines())
    next(line for line in lines if line.startswith(head))
    next(lines)
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_has_every_key_and_no_other():
    rows = parts(Recipe)
    assert all(description for _, _, description in rows)
    assert table("| key |") == rows, "run make tables"


def test_the_page_has_every_size():
    rows = []
    for name, shape in SIZES.items():
        layers, heads, hidden, mlp = list(shape.values())[:4]
        whole = parameters(name)
        inner = whole - 2 * 50_277 * hidden
        sizes = [f"{size:,}" for size in (layers, heads, hidden, mlp)]
        rows.append([f"`{name}`", *sizes, f"{inner / 1e6:.2f}M", f"{whole / 1e6:.2f}M"])
    assert table("| `model.size` | layers") == rows, "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_example_of_the_page_is_a_recipe(tmp_path):
    page = (ROOT / "docs" / "guides" / "train.md").read_text()
    (example,) = re.findall(r"```yaml\n(.+?)```", page, re.S)
    for path in RECIPES:
        shutil.copy(path, tmp_path)
    (tmp_path / "example.yaml").write_text(example)
    recipe = load_recipe(tmp_path / "example.yaml")
    assert recipe.train["learning_rate"] == 1e-3 and recipe.train["weight_decay"] == 0.1
    assert recipe.schedule.tokens == 2_000_000_000 and recipe.tokenizer == "EleutherAI/gpt-neox-20b"


PACKAGES = {
    "report_to=wandb": "train.report_to is 'wandb', and the package wandb is not installed",
    "report_to=[none, tensorboard]": "train.report_to is 'tensorboard', and the package tensorboard is not installed",
    "report_to=flyte": "and the package flytekit is not installed",
    "torch_compile_mode=max-autotun": "train.torch_compile_mode is 'max-autotun'; did you mean 'max-autotune'?",
    "report_to=wand": "train.report_to is 'wand'; did you mean 'wandb'?",
    "deepspeed=ds.json": "train.deepspeed is 'ds.json', and the package deepspeed is not installed",
    "use_liger_kernel=true": "train.use_liger_kernel is true, and the package liger_kernel is not installed",
    "accelerator_config={nonsense: 1}": "train cannot be used as it is: TypeError: .*nonsense",
}


@pytest.mark.parametrize("setting", PACKAGES)
def test_a_package_that_is_missing_is_named_before_anything_is_read(setting, tmp_path, monkeypatch):
    monkeypatch.setattr("crosslayer.verbs.train.arguments.get_available_reporting_integrations", list)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recipe = load_recipe(SMOKE, [f"train.{setting}"])
    with pytest.raises(ValueError, match=PACKAGES[setting]):
        training_arguments(tmp_path, 0, course(1), recipe.train)


@pytest.mark.parametrize("key", ["per_device_train_batch_size", "gradient_accumulation_steps", "neftune_noise_alpha"])
def test_numbers_have_a_least(key):
    with pytest.raises(ValueError, match=rf"train.{key}: Input should be .* or equal to \d; it is -1"):
        load_recipe(SMOKE, [f"train.{key}=-1"])


WRONG = {
    "log_level=nonsense": "train cannot be used as it is: KeyError: 'nonsense'",
    "dataloader_num_workers=1000000": r"train.dataloader_num_workers is 1,000,000; with the \d+ cores of this machine",
}


@pytest.mark.parametrize("setting", WRONG)
def test_what_only_a_run_would_trip_over_is_refused_before(setting, tmp_path):
    recipe = load_recipe(SMOKE, [f"train.{setting}"])
    with pytest.raises(ValueError, match=WRONG[setting]):
        training_arguments(tmp_path, 0, course(1), recipe.train)
