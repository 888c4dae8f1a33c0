"""The wiring read from a config agrees with the elements that the model's own cache allocates."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

import crosslayer
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing import tiny as contract
from tests.cli.test_cli import run
from tests.helpers.allocation import held_bytes
from tests.helpers.shipped import SHIPPED, families, needs, shipped
from tests.helpers.tiny import BASE, CAUSAL, tiny, tokens

PLAIN = ("llama", "mistral", "gemma3_text", "deepseek_v3", "gpt2", "qwen3_next", "falcon", "gpt_bigcode")

GQA = {"num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HIDDEN = {  # families of which a config does not say all, or not in the usual fields
    "mimo_v2_flash": {
        **GQA, **EXPERTS, "head_dim": 16, "v_head_dim": 8, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "inkling_text": {
        **GQA, **EXPERTS, "head_dim": 8, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 16,
        "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16, "unpadded_vocab_size": 64,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    },
    "cpmant": {"dim_head": 16, "dim_ff": 48, "prompt_length": 5, "prompt_types": 4},
    "jamba": {**GQA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
    "longcat_flash": {
        **LATENT, "num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16, "head_dim": 4,
    },
}  # fmt: skip


def config_of(family: str, **changes):
    own = SHIPPED.get(family) or CAUSAL.get(family) or HIDDEN.get(family) or {}
    options = {**BASE, **own, **changes}
    if "num_layers" in own:  # each of them counts as several
        options.pop("num_hidden_layers")
    return AutoConfig.for_model(family, **options)


def allocated(model, length: int) -> tuple[int, ...]:
    """Return the bytes that each layer of a dynamic cache holds after a forward pass."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens(batch=1, length=length), **{CACHE: cache}, use_cache=True)
    counts = [held_bytes(layer) for layer in cache.layers]
    # before transformers 5.23 the cache of Gemma 3n and 4 ends where all further layers read another's
    return (*counts, *[0] * (model.config.num_hidden_layers - len(counts)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by GPT BigCode before transformers 5.23
@pytest.mark.parametrize("family", families(*SHIPPED, *PLAIN))
def test_the_plan_agrees_with_the_elements_that_the_cache_allocates(family):
    model = shipped(family) if family in SHIPPED else tiny(family, dtype=torch.float32)
    for length in (6, 24):  # below the window of 8, and beyond it
        plan = crosslayer.plan(model, length=length, dtype="float32")
        assert plan.layer_bytes == allocated(model, length)
        assert plan.stored_bytes == sum(plan.layer_bytes)


@pytest.mark.parametrize("family", families(*HIDDEN))
def test_the_plan_agrees_where_a_config_says_it_otherwise(family):
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    for length in (6, 24):
        plan = crosslayer.plan(model, length=length, dtype="float32")
        assert plan.layer_bytes == allocated(model, length) and plan.stored_bytes


TOWERS = ("vision_config", "audio_config")


@needs("dots3_note_text")
def test_layers_that_differ_in_fields_of_the_config():
    sliding = {f"swa_{name}": size for name, size in LATENT.items()}
    sliding |= {"swa_kv_lora_rank": 16, "swa_head_dim": 12, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2}
    kinds = ["indexed_attention", "sliding_attention", "indexed_attention"]
    config = config_of(
        "dots3_note_text", **LATENT, **EXPERTS, **sliding, layer_types=kinds, sliding_window_size=8, index_topk=8,
        index_head_dim=8, index_n_heads=2, num_key_value_heads=4, head_dim=12, vocab_size=64,
    )  # fmt: skip
    model = AutoModel.from_config(config).eval()
    for length in (6, 24):
        assert crosslayer.plan(model, length=length, dtype="float32").layer_bytes == allocated(model, length)
    whole = AutoConfig.for_model(
        "dots3_note", text_config=config.to_dict(), **dict.fromkeys(TOWERS, {"adapter_out_dim": 32})
    )
    assert crosslayer.plan(whole, length=24, dtype="float32").layer_bytes == allocated(model, 24)


@needs("inkling_text")
def test_a_multimodal_model_is_as_its_text_model():
    text = config_of("inkling_text")
    whole = AutoConfig.for_model("inkling_mm_model", text_config=text.to_dict())
    assert crosslayer.plan(whole).stored_bytes == crosslayer.plan(text).stored_bytes > 0


ENCODERS = ("bert", "roberta", "electra", "roformer", "layoutlm", "eurobert", "markuplm", "albert")


@pytest.mark.parametrize("family", families(*ENCODERS))
def test_encoders_keep_no_cache_whether_given_as_a_model_or_as_a_config(family, tmp_path):
    model = AutoModel.from_config(
        config_of(family, **({"embedding_size": 32} if family in ("albert", "electra") else {}))
    )
    assert crosslayer.plan(model).stored_bytes == 0
    model.save_pretrained(tmp_path)  # which also names the class in the config
    assert crosslayer.plan(tmp_path).stored_bytes == 0


def test_bert_as_a_decoder_keeps_one():
    model = AutoModelForCausalLM.from_config(config_of("bert", is_decoder=True)).eval()
    assert crosslayer.plan(model, length=6, dtype="float32").layer_bytes == allocated(model, 6)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 10**30}, "num_hidden_layers must be .*got 1000000000000000000000000000000"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to 4096, got 0"),
        (
            "llama",
            {"num_attention_heads": -4, "head_dim": 8},
            "num_attention_heads must be a whole number of at least 1, got -4",
        ),
        (
            "llama",
            {"num_key_value_heads": -2},
            "layer 0: num_key_value_heads must be a whole number of at least 1, got -2",
        ),
        ("qwen3", {"head_dim": -8}, "layer 0: head_dim must be a whole number of at least 1, got -8"),
        ("gemma3_text", {"sliding_window": -8}, "layer 0: sliding_window must be a whole number of at least 1, got -8"),
        ("deepseek_v3", {"kv_lora_rank": -8}, "layer 0: kv_lora_rank must be a whole number of at least 1, got -8"),
        ("gemma3n_text", {"num_kv_shared_layers": 100}, "num_kv_shared_layers must be 0 to 5, got 100"),
        ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers must be 0 to 5, got -1"),
    ],
)
def test_impossible_numbers_are_one_line(family, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.plan(config_of(family, **changes))
    assert "\n" not in str(error.value)


def test_a_config_of_countless_layers_is_refused_before_lists_are_made_of_them(tmp_path):
    for config in ({"num_hidden_layers": 10**30}, {"text_config": {"num_hidden_layers": 10**30}}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text", **config}))
        with pytest.raises(ValueError, match="num_hidden_layers.*1.*4096, got 10+"):
            crosslayer.plan(tmp_path)


@pytest.mark.parametrize(
    ("family", "sources"),
    [
        ("gemma3n_text", (0, 1, 2, 1, 1, 2)),  # the last source of the same mask
        ("gemma4_text", (0, 1, 2, 1, 1, 2)),
        pytest.param("mistral_large4_text", (0, 1, 1, 3, 3, 1), marks=needs("mistral_large4_text")),
        ("glm5_next_text", (None, 1, 2)),
        ("llama", (0, 1, 2)),
    ],
)
def test_who_reads_whom(family, sources):
    plan = crosslayer.plan(config_of(family)).plan
    assert plan.keys == plan.values == sources
    assert plan.queries == tuple(None if source is None else layer for layer, source in enumerate(sources))


@pytest.mark.parametrize("methods", [["cla"], ["svformer"], [{"name": "drop", "attention": (0, 2)}], ["attnres"]])
def test_our_own_models(methods):
    config = contract.config_of(methods)
    plan = crosslayer.plan(config, length=24)
    assert plan.plan == config.plan and plan.methods == (config.methods[0].name(),)
    assert plan.kv_bytes == 2 * contract.predicted(config, 1, 24)
    assert plan.kv_share == config.plan.cached_fraction()
    assert ("attnres" in plan.residual) == (methods == ["attnres"])


def test_storing_less_is_not_reading_less():
    llama, ours = crosslayer.plan(config_of("llama")), crosslayer.plan(contract.config_of(["cla"]))
    assert llama.read_bytes == llama.stored_bytes and ours.read_bytes == 2 * ours.stored_bytes
    sparse = crosslayer.plan(config_of("hy_v4"), length=24, dtype="float32")
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
    plan = crosslayer.plan(config_of(family))
    assert (plan.streams, plan.residual) == (streams, residual)


def masks(family):
    return [states.mask for states in crosslayer.plan(config_of(family)).layers]


def test_masks_in_words():
    assert masks("gemma3n_text")[:3] == ["window 8", "window 8", "full"]
    assert masks("deepseek_v4") == ["window 8 + entries of 16", "window 8 + top 8 of entries of 4", "window 8"]
    assert masks("qwen4_exp_text")[0] == "linear attention"


@needs("mistral_large4_text")
def test_chosen_tokens_and_layers_without_rope_in_words():
    assert masks("mistral_large4_text")[2:4] == ["full, top 8", "full, top 8, no rope"]
    assert crosslayer.plan(config_of("mistral_large4_text")).plan.choices[:4] == (0, 1, 1, 3)


def test_a_config_is_enough(monkeypatch, tmp_path, capsys):
    config_of("gemma3n_text").save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert run(monkeypatch, "plan", tmp_path, "--length", 24, "--dtype", "bfloat16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-7].split() == ["layer", "queries", "keys", "values", "mlp", "cache", "mask"]
    assert [line.split()[0] for line in lines[-6:-2]] == ["0-1", "2", "3-4", "5"]
    assert lines[-4] == "    3-4  own      ← 1      ← 1      own   –            window 8"
    assert "Residual: 4 streams (alternating updates)." in lines
    headline = json.loads(lines[-1])
    assert headline["model"] == tmp_path.name and headline["own_kv_layers"] == 3 and headline["kv_share"] == 0.2639
    assert headline["stored_bytes"] == 2 * (2 * 7 + 24) * 32


@needs("mistral_large4_text")
def test_of_the_hub_nothing_but_the_config_is_needed(monkeypatch, tmp_path):
    config_of("mistral_large4_text").save_pretrained(tmp_path)
    monkeypatch.setattr("crosslayer.wiring.source.hub_source", lambda name: str(tmp_path))
    plan = crosslayer.plan("someone/something")
    assert plan.model == "someone/something" and plan.plan.keys == (0, 1, 1, 3, 3, 1)


def test_an_embedded_model_is_not_converted(monkeypatch, tmp_path):
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path))
    plan = crosslayer.plan("smollm2", length=2048)
    assert plan.stored_bytes == 2048 * 23_040 and plan.dtype == "float16"
    assert plan.parameters == 134_515_008 and plan.weights_bytes == 2 * 134_515_008
    assert not list(tmp_path.iterdir())


def test_an_encoder_keeps_no_cache():
    plan = crosslayer.plan("minilm")
    assert plan.stored_bytes == plan.read_bytes == 0 and "encoder" in plan.sentences()[0]
    assert "cache" not in plan.diagram()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: AutoConfig.for_model("vit"),
            "the config of vit has no vocab_size, so it does not describe a language model",
        ),
        (lambda: AutoConfig.for_model("t5"), "t5 is an encoder-decoder"),
        (
            lambda: AutoConfig.for_model("xlstm"),
            "xlstm has no attention, and keeps states of its own kind, which is not",
        ),
        (lambda: config_of("gemma4_text", num_kv_shared_layers=6), "reads those of another model"),
        (
            lambda: config_of("minimax_m3_vl_text", layer_types=["minimax_m3_sparse"] * 3),
            "layer 0 is of type 'minimax_m3_sparse'; the types that can be read",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(config, message):
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.plan(config())
    assert "\n" not in str(error.value)


def test_bad_options():
    with pytest.raises(ValueError, match="1 token,.*0"):
        crosslayer.plan(config_of("llama"), length=0)
    with pytest.raises(ValueError, match="'float31'"):
        crosslayer.plan(config_of("llama"), dtype="float31")
    with pytest.raises(ValueError, match="not exist"):
        crosslayer.plan("no/such/folder")
