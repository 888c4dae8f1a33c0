"""The wiring that a config tells: it agrees with the elements that the model's own cache allocates."""

import json

import pytest
import torch
from transformers import AutoConfig, DynamicCache

import crosslayer
from crosslayer import testing as contract
from tests.cli.test_cli import run
from tests.helpers.shipped import SHIPPED, families, needs, shipped
from tests.helpers.tiny import BASE, CAUSAL, tiny, tokens

PLAIN = ("llama", "mistral", "gemma3_text", "deepseek_v3", "gpt2", "qwen3_next", "falcon", "gpt_bigcode")


def config_of(family: str, **changes):
    return AutoConfig.for_model(family, **{**BASE, **(SHIPPED.get(family) or CAUSAL.get(family) or {}), **changes})


def allocated(model, length: int) -> tuple[int, ...]:
    """Return the elements that each layer of a dynamic cache holds after a forward pass, each tensor counted once."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens(batch=1, length=length), past_key_values=cache, use_cache=True)
    counts = []
    for layer in cache.layers:
        attributes = vars(layer)
        tensors = [attributes.get(name) for name in ("keys", "values", "indexer_keys")]
        tensors += list(attributes.get("compressed_kv", {}).values())
        held = {t.data_ptr(): t.numel() for t in tensors if t is not None and t.numel()}
        counts.append(sum(held.values()))
    # before transformers 5.23 the cache of Gemma 3n and 4 ends where all further layers read another's
    return (*counts, *[0] * (model.config.num_hidden_layers - len(counts)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by GPT BigCode before transformers 5.23
@pytest.mark.parametrize("family", families(*SHIPPED, *PLAIN))
def test_the_plan_agrees_with_the_elements_that_the_cache_allocates(family):
    model = shipped(family) if family in SHIPPED else tiny(family, dtype=torch.float32)
    for length in (6, 24):  # below the window of 8, and beyond it
        plan = crosslayer.read_plan(model, length=length, dtype="float32")
        assert plan.stored_elements == allocated(model, length)
        assert plan.stored_bytes == 4 * sum(plan.stored_elements)


@pytest.mark.parametrize(
    ("family", "sources"),
    [
        ("gemma3n_text", (0, 1, 2, 1, 1, 2)),  # the last owner of the same mask
        ("gemma4_text", (0, 1, 2, 1, 1, 2)),
        pytest.param("mistral_large4_text", (0, 1, 1, 3, 3, 1), marks=needs("mistral_large4_text")),
        ("glm5_next_text", (None, 1, 2)),
        ("llama", (0, 1, 2)),
    ],
)
def test_who_reads_whom(family, sources):
    plan = crosslayer.read_plan(config_of(family)).plan
    assert plan.keys == plan.values == sources
    assert plan.queries == tuple(None if source is None else layer for layer, source in enumerate(sources))


@pytest.mark.parametrize("methods", [["cla"], ["svformer"], [{"name": "drop", "attention": (0, 2)}], ["attnres"]])
def test_our_own_models(methods):
    config = contract.config_of(methods)
    plan = crosslayer.read_plan(config, length=24)
    assert plan.plan == config.plan and plan.methods == (config.methods[0].name(),)
    assert sum(plan.stored_elements) == contract.predicted(config, 1, 24)
    assert plan.kv_share == config.plan.cached_fraction()
    assert ("attnres" in plan.residual) == (methods == ["attnres"])


def test_storing_less_is_not_reading_less():
    llama, ours = crosslayer.read_plan(config_of("llama")), crosslayer.read_plan(contract.config_of(["cla"]))
    assert llama.read_bytes == llama.stored_bytes and ours.read_bytes == 2 * ours.stored_bytes
    sparse = crosslayer.read_plan(config_of("hy_v4"), length=24, dtype="float32")
    # 8 chosen tokens of a latent of 8 + 4 in three layers, and the keys of 8 by which two of them choose among 24
    assert sparse.read_bytes == 4 * (3 * 8 * 12 + 2 * 24 * 8)


@pytest.mark.parametrize(
    ("family", "streams", "residual"),
    [
        ("gemma3n_text", 4, "4 streams (alternating updates)"),
        ("deepseek_v4", 4, "4 streams (hyper-connections)"),
        ("qwen4_exp_text", 4, "4 streams (hyper-connections)"),
        pytest.param(
            "inkling2_text", 1, "attention over depth (a source for each 2 layers)", marks=needs("inkling2_text")
        ),
        ("gemma4_text", 1, "plain sum"),
    ],
)
def test_the_form_of_the_residual(family, streams, residual):
    plan = crosslayer.read_plan(config_of(family))
    assert (plan.streams, plan.residual) == (streams, residual)


def masks(family):
    return [states.mask for states in crosslayer.read_plan(config_of(family)).layers]


def test_masks_in_words():
    assert masks("gemma3n_text")[:3] == ["window 8", "window 8", "full"]
    assert masks("deepseek_v4") == ["window 8 + entries of 16", "window 8 + top 8 of entries of 4", "window 8"]
    assert masks("qwen4_exp_text")[0] == "linear attention"


@needs("mistral_large4_text")
def test_chosen_tokens_and_layers_without_rope_in_words():
    assert masks("mistral_large4_text")[2:4] == ["full, top 8 as layer 1", "full, top 8, no rope"]


def test_a_config_is_enough(monkeypatch, tmp_path, capsys):
    config_of("gemma3n_text").save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert run(monkeypatch, "plan", tmp_path, "--length", 24, "--dtype", "bfloat16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "queries", "keys", "values", "mlp", "cache", "mask"]
    assert lines[4] == "    3  own      ← 1      ← 1      own   –            window 8"
    assert "Residual: 4 streams (alternating updates)." in lines
    headline = json.loads(lines[-1])
    assert headline["model"] == tmp_path.name and headline["owners"] == 3 and headline["kv_share"] == 0.2639
    assert headline["stored_bytes"] == 2 * (2 * 7 + 24) * 32


@needs("mistral_large4_text")
def test_of_the_hub_nothing_but_the_config_is_needed(monkeypatch, tmp_path):
    config_of("mistral_large4_text").save_pretrained(tmp_path)
    monkeypatch.setattr("crosslayer.models.load.hub_source", lambda name: str(tmp_path))
    plan = crosslayer.read_plan("someone/something")
    assert plan.model == "someone/something" and plan.plan.keys == (0, 1, 1, 3, 3, 1)


def test_an_embedded_model_is_not_converted(monkeypatch, tmp_path):
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path))
    plan = crosslayer.read_plan("smollm2", length=2048)
    assert plan.stored_bytes == 2048 * 23_040 and plan.dtype == "bfloat16"
    assert not list(tmp_path.iterdir())


def test_an_encoder_keeps_no_cache():
    plan = crosslayer.read_plan("minilm")
    assert plan.stored_bytes == plan.read_bytes == 0 and "encoder" in plan.words()[-1]
    assert "cache" not in plan.diagram()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: AutoConfig.for_model("vit"),
            "the config of vit has no vocab_size: it tells of no language model with attention",
        ),
        (lambda: AutoConfig.for_model("t5"), "t5 is an encoder-decoder"),
        (lambda: AutoConfig.for_model("mamba"), "mamba has no num_attention_heads"),
        (lambda: config_of("gemma4_text", num_kv_shared_layers=6), "reads those of another model"),
        (
            lambda: config_of("minimax_m3_vl_text", layer_types=["minimax_m3_sparse"] * 3),
            "layer 0 is of type 'minimax_m3_sparse'; the types that can be read",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(config, message):
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.read_plan(config())
    assert "\n" not in str(error.value)


def test_bad_options():
    with pytest.raises(ValueError, match="length is 0; the cache holds at least 1 token"):
        crosslayer.read_plan(config_of("llama"), length=0)
    with pytest.raises(ValueError, match="dtype 'float31' is not known"):
        crosslayer.read_plan(config_of("llama"), dtype="float31")
    with pytest.raises(ValueError, match="does not exist"):
        crosslayer.read_plan("no/such/folder")
