"""What makes vLLM use a prompt store, and what is refused before it starts; no vLLM is needed."""

import json
import os

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from crosslayer.codec.codec import load_codec
from crosslayer.codec.fingerprint import model_print
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.serve import engine, prompts
from tests.cli.test_cli import run
from tests.helpers.bytelevel import byte_level
from tests.helpers.cases import CASES
from tests.helpers.codecs import fitted
from tests.helpers.tiny import tiny
from tests.verbs.serve.test_engine import vllm  # noqa: F401  a fixture


@pytest.fixture
def paths(tmp_path):
    """Folders of a model and of its codec, and one for the store."""
    model, codec = fitted()
    model.save_pretrained(tmp_path / "model")
    byte_level("smollm", 60).save_pretrained(tmp_path / "model")
    codec.save(tmp_path / "codec")
    return tuple(str(tmp_path / name) for name in ("model", "codec", "prompts"))


def flags_of(paths, *flags, limit=None):
    model, codec, store = paths
    config = AutoConfig.from_pretrained(model)
    return prompts.store_flags(model, config, engine.flag_values(flags), store, codec, limit)


def test_vllm_is_told_of_the_connector(paths):
    model, codec, store = paths
    name, text = flags_of(paths, "-tp", "1", "--kv-cache-dtype=bfloat16", "--enable-lora", limit="20GiB")
    told = json.loads(text)
    assert name == "--kv-transfer-config"
    assert (told["kv_connector_module_path"], told["kv_connector"]) == (prompts.MODULE, prompts.CONNECTOR)
    assert (told["kv_role"], told["kv_load_failure_policy"]) == ("kv_both", "recompute")
    checked = load_codec(codec).model_print
    assert told["kv_connector_extra_config"] == {"store": store, "codec": codec, "checked": checked, "limit": "20GiB"}


@pytest.mark.parametrize("flag", ["-tp", "-pp", "--decode-context-parallel-size", "--kv_cache_dtype", "-q"])
def test_flags_that_a_store_cannot_be_used_with(paths, flag):
    with pytest.raises(ValueError, match=r"^`prompt_store` cannot be used with --[a-z-]+ 2: "):
        flags_of(paths, flag, "2")
    with pytest.raises(ValueError, match="--kv-transfer-config"):
        flags_of(paths, "--kv-transfer-config", "{}")


def test_a_model_is_read_a_tensor_at_a_time(paths, monkeypatch):
    model, codec = fitted()
    config = AutoConfig.from_pretrained(paths[0])
    monkeypatch.setattr(prompts, "load_model", None)  # is not called
    assert prompts.served_print(paths[0], config) == model_print(model) == codec.model_print
    tiny("gemma").save_pretrained(paths[2])  # whose embedding is its head, too
    tied = AutoConfig.from_pretrained(paths[2])
    assert prompts.served_print(paths[2], tied) == model_print(tiny("gemma"))
    monkeypatch.undo()
    weights = load_file(f"{paths[0]}/model.safetensors")
    save_file({name.removeprefix("model."): x for name, x in weights.items()}, f"{paths[0]}/model.safetensors")
    monkeypatch.setattr(prompts, "load_model", lambda *names, **options: (model, None))
    assert prompts.served_print(paths[0], config) == codec.model_print  # its files have other names: loaded whole


def test_other_models_are_refused(paths, tmp_path):
    weights = load_file(f"{paths[0]}/model.safetensors")
    weights["model.norm.weight"][3] += 0.1
    save_file(weights, f"{paths[0]}/model.safetensors")
    with pytest.raises(ValueError, match="fitted to different weights or RoPE"):
        flags_of(paths)
    build(config_of(CASES["cla"][0])).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="not converted"):
        flags_of((str(tmp_path / "ours"), *paths[1:]))
    with pytest.raises(ValueError, match="codec.safetensors"):
        flags_of((paths[0], paths[2], paths[2]))
    fitted("mistral")[1].save(tmp_path / "windows")
    with pytest.raises(ValueError, match="sliding window"):
        flags_of((paths[0], str(tmp_path / "windows"), paths[2]))


def test_the_command_line_says_it_in_one_line(vllm, paths, monkeypatch, capsys):  # noqa: F811
    model, codec, store = paths
    for words in (["--prompt-store", store], ["--codec", codec], ["--prompt-limit", "1GiB"]):
        assert run(monkeypatch, "serve", model, *words) == 2
        assert "--prompt-store and --codec must be given together" in capsys.readouterr().err
    both = ["--prompt-store", store, "--codec", codec]
    assert run(monkeypatch, "serve", model, *both, "--prompt-limit", "much") == 2
    assert "--prompt-limit" in capsys.readouterr().err
    assert run(monkeypatch, "serve", model, *both, "--", "-tp", "2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("crosslayer: error: --prompt-store cannot be used with --tensor-parallel-size 2: ")


def test_the_server_is_started_with_the_store(vllm, paths, monkeypatch):  # noqa: F811
    model, codec, store = paths
    started = []
    monkeypatch.setattr("crosslayer.verbs.serve.run.os.execv", lambda program, words: started.extend(words))
    monkeypatch.setattr(engine, "check_port", lambda host, port: None)
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "")  # so that what `serve` sets is taken back after the test
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU")
    run(monkeypatch, "serve", model, "--prompt-store", store, "--codec", codec, "--", "--max-num-seqs", "4")
    at = started.index("--kv-transfer-config")
    assert json.loads(started[at + 1])["kv_connector"] == prompts.CONNECTOR
    assert started[at - 2 : at] == ["--max-num-seqs", "4"]
    assert os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"  # computes on as many cores as without a store
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    run(monkeypatch, "serve", model, "--prompt-store", store, "--codec", codec)
    assert os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"  # whoever sets it has the last word
