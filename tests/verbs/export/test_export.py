"""Exported files hold the model: logits, computed from the files alone, are ours; what has no form is refused."""

import copy
import errno
import importlib.util
import json

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import crosslayer
from crosslayer.core.transformers_versions import attention_that_caps
from crosslayer.models.embedded import cache_folder
from crosslayer.output.manifest import check_files, read_manifest
from crosslayer.testing.tiny import build, config_of
from tests.cli.test_cli import run
from tests.helpers.naive_forms import deci_logits, gguf_facts, gguf_logits
from tests.helpers.text import tokenizer as word_level
from tests.helpers.tiny import tiny
from tests.verbs.export.models import SHAPES, of_family, ours, words

IDS = torch.tensor([3, 250, 7, 7, 120, 41, 9, 333, 2, 18, 77, 5])  # (T,)
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
GGUF = tuple(name for name in SHAPES if name != "without MLPs")
DECI = tuple(name for name in SHAPES if name not in ("with W_c", "llama3", "linear"))  # the reader knows no scaling


@torch.no_grad()
def logits(model):
    return model(IDS[None], use_cache=False).logits[0]


@pytest.mark.parametrize("shape", GGUF)
def test_a_gguf_file_holds_the_model_as_llama_cpp_reads_it(shape, tmp_path):
    model = ours(shape)
    result = crosslayer.export(model, tmp_path / "out", words(), to="gguf")
    torch.testing.assert_close(gguf_logits(tmp_path / "out" / "model.gguf", IDS), logits(model), **CLOSE)
    facts, _ = gguf_facts(tmp_path / "out" / "model.gguf")
    assert result.architecture == facts["general.architecture"]
    assert check_files(tmp_path / "out") == []


def test_a_gguf_file_tells_layers_apart(tmp_path):
    crosslayer.export(ours("both"), tmp_path / "out", words(), to="gguf")
    facts, tensors = gguf_facts(tmp_path / "out" / "model.gguf")
    assert facts["deci.block_count"] == 4  # layers 0, 2, 3 and 5 of the model
    pairs = facts["deci.attention.head_count_kv"]
    assert facts["deci.attention.head_count"][2] == pairs[2] == 0 and pairs.count(0) == 1
    assert not any(name.startswith("blk.2.attn") for name in tensors)
    crosslayer.export(ours("with W_c"), tmp_path / "compensated", words(), to="gguf")
    facts, tensors = gguf_facts(tmp_path / "compensated" / "model.gguf")
    assert facts["deci.attention.head_count"][3] > 0 == facts["deci.attention.head_count_kv"][3]
    weight = ours("with W_c").model.layers[3].attn_compensation.weight
    assert torch.equal(tensors["blk.3.attn_output.weight"], weight)
    assert {name for name in tensors if name.startswith("blk.3.attn")} == {
        "blk.3.attn_norm.weight",
        "blk.3.attn_output.weight",
    }


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_gguf_file_holds_the_tokenizer(name, tmp_path):
    tokenizer = words(name)
    crosslayer.export(ours("plain"), tmp_path / "out", tokenizer, to="gguf")
    facts, _ = gguf_facts(tmp_path / "out" / "model.gguf")
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    assert facts["tokenizer.ggml.model"] == "gpt2" and facts["tokenizer.ggml.pre"] == name
    assert len(tokens) == len(types) == 400
    vocabulary = tokenizer.get_vocab()
    assert all(tokens[number] == text for text, number in vocabulary.items())
    assert types[:3] == [3, 3, 3] and types[vocabulary["<tool>"]] == 4 and types[5] == 1
    assert set(types[len(vocabulary) :]) == {5}
    left, _, right = facts["tokenizer.ggml.merges"][0].partition(" ")
    assert left + right in vocabulary
    assert (facts["tokenizer.ggml.bos_token_id"], facts["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert facts["tokenizer.ggml.add_bos_token"] is False
    assert facts["tokenizer.chat_template"] == tokenizer.chat_template


def test_lower_dtypes_keep_vectors_in_float32(tmp_path):
    model = ours("without attention").bfloat16()
    assert crosslayer.export(model, tmp_path / "out", words(), to="gguf").dtype == "bfloat16"
    facts, tensors = gguf_facts(tmp_path / "out" / "model.gguf")
    assert facts["general.file_type"] == 32
    weights = model.state_dict()
    assert torch.equal(tensors["blk.0.ffn_up.weight"], weights["model.layers.0.mlp.up_proj.weight"].float())
    assert torch.equal(tensors["output_norm.weight"], weights["model.norm.weight"].float())


@pytest.mark.parametrize("shape", DECI)
def test_a_deci_folder_holds_the_model_as_vllm_reads_it(shape, tmp_path):
    model = ours(shape)
    crosslayer.export(model, tmp_path / "out", words(), to="deci")
    torch.testing.assert_close(deci_logits(tmp_path / "out", IDS), logits(model), **CLOSE)
    assert check_files(tmp_path / "out") == []
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a whale").input_ids == words()("a whale").input_ids
    again, tokenizer = crosslayer.load_model(str(tmp_path / "out"))  # its code never runs
    torch.testing.assert_close(logits(again), logits(model), **CLOSE)
    assert again.config.plan.stored_states() == crosslayer.plan(tmp_path / "out").plan.stored_states()
    assert read_manifest(tmp_path / "out").plan == again.config.plan  # which verify compares
    made = crosslayer.generate(str(tmp_path / "out"), "a whale", max_new_tokens=3)
    assert made.text == crosslayer.generate(model, "a whale", words(), max_new_tokens=3).text


def test_the_config_class_of_a_deci_folder_gives_blocks_by_attribute(tmp_path):
    crosslayer.export(ours("without MLPs"), tmp_path / "out", words(), to="deci")
    spec = importlib.util.spec_from_file_location("configuration_decilm", tmp_path / "out" / "configuration_decilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.DeciLMConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["DeciLMForCausalLM"] and config.model_type == "nemotron-nas"
    blocks = config.block_configs
    assert [block.attention.no_op for block in blocks] == [False, False, False, False, True, False]
    assert [block.ffn.no_op for block in blocks] == [False, True, False, False, False, False]
    assert blocks[0].attention.n_heads_in_group == config.num_attention_heads // config.num_key_value_heads
    assert not hasattr(blocks[0].ffn, "ffn_mult")  # vLLM would compute another width from it
    assert json.loads(config.to_json_string(use_diff=False))["block_configs"][4]["attention"]["no_op"] is True
    assert copy.deepcopy(blocks)[4].attention.no_op is True  # vLLM copies configs


def test_biases_of_a_deci_folder_are_those_of_vllm(tmp_path):
    crosslayer.export(ours("some biases"), tmp_path / "out", words(), to="deci")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["qkv_bias"], config["attention_bias"], config["mlp_bias"]) == (True, False, False)


@pytest.mark.parametrize("shape", ["plain", "tied", "whole layers"])
def test_whole_layers_leave_a_stock_llama(shape, tmp_path):
    model = ours(shape)
    result = crosslayer.export(model, tmp_path / "out", words(), to="hf")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(stock) is LlamaForCausalLM and result.layers == stock.config.num_hidden_layers
    torch.testing.assert_close(logits(stock), logits(model), **CLOSE)
    assert check_files(tmp_path / "out") == [] and read_manifest(tmp_path / "out").plan is None
    assert "crosslayer" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral"])
def test_what_llama_cannot_hold_another_stock_class_does(family, tmp_path):
    model = of_family(family)
    result = crosslayer.export(model, tmp_path / "out", words(), to="hf")
    assert result.architecture == type(tiny(family)).__name__
    attention = attention_that_caps(model.config)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation=attention)
    torch.testing.assert_close(logits(stock), logits(model), **CLOSE)


def test_a_stock_model_goes_to_every_form(tmp_path):
    model = tiny("llama", vocab_size=400).float()
    model.save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    for to in ("hf", "deci", "gguf"):
        result = crosslayer.export(tmp_path / "model", tmp_path / to, to=to)
        assert (result.model, result.layers, result.dtype) == ("model", 3, "float32")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "hf", "deci", "gguf"}  # no lock is left
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) is LlamaForCausalLM
    torch.testing.assert_close(deci_logits(tmp_path / "deci", IDS), logits(model), **CLOSE)
    torch.testing.assert_close(gguf_logits(tmp_path / "gguf" / "model.gguf", IDS), logits(model), **CLOSE)


def test_cards_of_all_forms_say_what_the_model_is_and_how_it_is_used(tmp_path):
    model = ours("plain")
    model.name_or_path = str(cache_folder() / "smollm2-0123456789abcdef")  # as if loaded from there
    for to, install in (("hf", "pip install transformers"), ("deci", "pip install '.[vllm]'")):
        crosslayer.export(model, tmp_path / to, words(), to=to)
        card = (tmp_path / to / "README.md").read_text()
        data = ModelCard(card).data
        assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and data.license == "apache-2.0"
        assert data.pipeline_tag == "text-generation" and data.language == "en"
        use = card.partition("## Use\n")[2]
        assert use.partition("```sh\n")[2].startswith(install) and ("AutoTokenizer" in use) == (to == "hf")
        serving = {
            "hf": "python -m vllm.entrypoints.openai.api_server --model FOLDER\n",
            "deci": "crosslayer serve FOLDER\n",
        }
        assert f"\n{serving[to]}" in use
    crosslayer.export(tmp_path / "hf", tmp_path / "again", to="deci")  # the card goes along
    again = (tmp_path / "again" / "README.md").read_text()
    assert ModelCard(again).data.base_model == data.base_model and again.count("## Use") == 1


UNIATTN = {"name": "uniattn", "superblocks": [[1, 2], [3, 4]]}
REFUSED = {
    "shared maps": ([UNIATTN], "gguf", ("uniattn (superblocks", "layer 2 reads the queries of layer 1", "no other")),
    "shared values": (["svformer"], "deci", ("svformer", "values", "no other")),
    "mixed values": (["resformer"], "hf", ("resformer", "mixes", "no other")),
    "no attention": (
        [{"name": "drop", "attention": [2, 3]}],
        "hf",
        ("layers 2-3", "drop (", "with part layer", "deci or gguf"),
    ),
    "W_c": (
        [{"name": "drop", "attention": [2], "compensation": "attention"}],
        "deci",
        ("W_c", "with compensation none", "use `to` gguf"),
    ),
    "no MLP": ([{"name": "drop", "mlp": [1, 2]}], "gguf", ("layers 1-2 have no MLP", "use `to` deci")),
    "first layer": ([{"name": "drop", "attention": [0]}], "gguf", ("layer 0 has no attention", "no other")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_form_is_refused_by_name(case, tmp_path):
    methods, to, parts = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        crosslayer.export(ours(methods), tmp_path / "out", words(), to=to)
    message = str(caught.value)
    assert message.startswith(f"cannot export to {to}: ") and "\n" not in message
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("mistral", "window of 8"),
        ("qwen3", "qk_norm"),
        ("gemma2", "'gemma2'"),
        ("gemma3_text", "'gemma3'"),
        ("mixtral", "experts"),
    ],
)
def test_layers_unlike_llamas_are_refused_but_as_a_stock_class(family, part, tmp_path):
    for to in ("gguf", "deci"):
        with pytest.raises(ValueError, match=rf"{part}.*; use `to` hf"):
            crosslayer.export(of_family(family), tmp_path / "out", words(), to=to)


def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError, match="WordLevel;.*byte-level BPE"):
        crosslayer.export(ours("plain"), tmp_path / "out", word_level(), to="gguf")
    with pytest.raises(ValueError, match=r"needs a tokenizer\.json"):
        crosslayer.export(ours("plain"), tmp_path / "out", to="gguf")
    small = build(config_of([], vocab_size=99)).float()
    with pytest.raises(ValueError, match="must be below 99"):
        crosslayer.export(small, tmp_path / "out", words(), to="gguf")
    assert not (tmp_path / "out").exists()


def test_the_folder_is_looked_at_before_the_model_is_loaded_and_written_after(monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("crosslayer.verbs.export.run.ready_model", full)
    with pytest.raises(OSError, match="No space") as caught:
        crosslayer.export(ours("plain"), tmp_path / "out", words(), to="hf")
    assert caught.value.filename is None and not list(tmp_path.iterdir())  # the cache is full, and not this folder
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="'out' exists"):
        crosslayer.export(ours("plain"), tmp_path / "out", words(), to="hf")


def test_the_command_line_writes_replaces_and_refuses(monkeypatch, tmp_path, capsys):
    model = ours("without attention").bfloat16()
    model.save_pretrained(tmp_path / "small")
    words().save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "README.md").write_text(
        "---\nlibrary_name: transformers\n---\n\n# small\n\n## Use\n\nimport crosslayer\n\n## Limits\n\nmany\n"
    )
    out = tmp_path / "out"
    assert run(monkeypatch, "export", tmp_path / "small", "--to", "gguf", "--out", out) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (line["model"], line["architecture"], line["layers"], line["dtype"]) == ("small", "deci", 6, "bfloat16")
    card = (out / "README.md").read_text()
    assert "llama-cli -m FOLDER/model.gguf" in card and "import crosslayer" not in card
    assert "many" in card and "library_name: gguf" in card and "pipeline_tag: text-generation" in card
    assert run(monkeypatch, "export", tmp_path / "small", "--to", "gguf", "--out", out) == 2
    assert "--force" in capsys.readouterr().err
    arguments = ("export", tmp_path / "small", "--to", "deci", "--out", out, "--dtype", "float32", "--force")
    assert run(monkeypatch, *arguments) == 0
    stored, _ = crosslayer.load_model(str(tmp_path / "small"), dtype="float32")
    torch.testing.assert_close(deci_logits(out, IDS), logits(stored), **CLOSE)
    (out / "mine.txt").write_text("keep me")
    assert run(monkeypatch, *arguments) == 2 and (out / "mine.txt").exists()
    capsys.readouterr()
    assert run(monkeypatch, "export", tmp_path / "small", "--to", "hf", "--out", tmp_path / "hf") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("crosslayer: error: cannot export to hf: layers 2, 4 lack ")
    assert error.endswith("; use --to deci or gguf")
    assert run(monkeypatch, "export", tmp_path / "small", "--to", "onnx", "--out", tmp_path / "hf") == 2
    assert "'onnx'" in capsys.readouterr().err
