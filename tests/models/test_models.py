"""Loading by name, and what is refused."""

import json
import logging
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import crosslayer
from crosslayer import hub
from crosslayer.models import load as models
from crosslayer.models.load import public_name, resolve_dtype
from crosslayer.testing.tiny import build, config_of
from tests.helpers.tiny import tiny


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama saved with the tokenizer of the embedded model."""
    _, tokenizer = crosslayer.load_model("minilm")
    model = tiny("llama", dtype=torch.float32, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_embedded_models_load_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = crosslayer.load_model("smollm2")
    started = time.thread_time()  # not of a busy machine's clock, nor of threads that wait for one another
    model, tokenizer = crosslayer.load_model("smollm2")
    loading = time.thread_time() - started
    # where memory is short, even new pages cost seconds: 1.7 s for as many numbers, and not 0.1
    started = time.thread_time()
    torch.ones(model.num_parameters())
    filling = time.thread_time() - started
    assert loading < max(2, 8 * filling)  # 0.3 s when quiet; the promise is 2
    assert model.config.num_hidden_layers == 30 and model.dtype == torch.float32 and not model.training
    assert tokenizer.decode(tokenizer("Hello world").input_ids) == "Hello world"
    encoder, _ = crosslayer.load_model("minilm")
    assert type(encoder).__name__ == "BertModel"


def test_a_local_folder(folder):
    model, _ = crosslayer.load_model(str(folder), dtype="bfloat16", device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.bfloat16


def test_scores_are_capped_where_the_config_says_so(folder):
    model = tiny("gemma2", dtype=torch.float32, vocab_size=40_000)
    model.save_pretrained(folder)
    loaded, _ = crosslayer.load_model(str(folder), device="cpu")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_unknown_models_are_one_line(tmp_path, folder):
    cases = {
        str(tmp_path / "missing"): "does not exist",
        str(folder / "config.json"): "is a file",
        str(tmp_path): "no config.json",
        "./nowhere": "model folder './nowhere' does not exist",
        "some/where/else": "model folder 'some/where/else' does not exist",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            crosslayer.load_model(name)
        assert "\n" not in str(error.value)


def test_weights_must_be_safetensors(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights"):
        crosslayer.load_model(str(folder))
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights"):
        crosslayer.load_model(str(folder))


def test_nan_in_the_weights_is_named(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 with NaN or infinity, such as model.layers.1.mlp.up_proj.weight"):
        crosslayer.load_model(str(folder))


def test_missing_weights_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights \(model.layers.1.mlp.up_proj.weight\)"):
        crosslayer.load_model(str(folder))


def test_a_checkpoint_of_more_layers_than_its_config_names_is_refused(folder):
    """It would be loaded in half, without a word."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"9 weights \(model.layers.2.input_layernorm.weight") as error:
        crosslayer.load_model(str(folder))
    assert "\n" not in str(error.value) and "not in" in str(error.value)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"9 weights \(model.layers.3.input_layernorm.weight"):
        crosslayer.load_model(str(folder))


def add_weights(folder, *names):
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.zeros(4) for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_buffers_of_old_checkpoints_are_no_weights(folder):
    add_weights(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.position_ids")
    crosslayer.load_model(str(folder))
    add_weights(folder, "model.layers.0.self_attn.q_proj.bias")
    with pytest.raises(ValueError, match=r"1 weights \(model.layers.0.self_attn.q_proj.bias\)"):
        crosslayer.load_model(str(folder))


def test_an_encoder_does_without_its_head_and_says_so(folder, caplog):
    from transformers import BertForMaskedLM

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = tiny("bert", vocab_size=vocabulary).config
    BertForMaskedLM(config).save_pretrained(folder)
    with caplog.at_level(logging.WARNING):
        model, _ = crosslayer.load_model(str(folder))
    assert type(model).__name__ == "BertModel"
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: 5 weights (cls.predictions.bias, cls.predictions.transform.LayerNorm.bias, "
        "cls.predictions.transform.LayerNorm.weight, …) belong to a head and are left out"
    ]
    changed = {**json.loads((folder / "config.json").read_text()), "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"16 weights \(.*encoder.layer.2.attention.*"):
        crosslayer.load_model(str(folder))


def test_ours_have_nothing_left_over(folder):
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = config_of([{"name": "svformer", "anchors": [0, 3]}])
    config.vocab_size = vocabulary
    build(config).float().save_pretrained(folder)
    crosslayer.load_model(str(folder))
    add_weights(folder, "model.pooler.weight")
    with pytest.raises(ValueError, match=r"1 weights \(model.pooler.weight\)"):
        crosslayer.load_model(str(folder))


@pytest.mark.parametrize(
    ("family", "buffers"),
    [
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        ("gpt_neo", ["transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"]),
    ],
)
def test_only_buffers_are_left_over(family, buffers):
    assert all(models.LEFT_OVER.search(name) for name in buffers), family
    for name in (
        "h.0.attn.c_attn.bias",
        "layers.0.self_attn.q_proj.bias",
        "transformer.h.0.attn.attention.out_proj.bias",
    ):
        assert not models.LEFT_OVER.search(name)


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transformers_weights": "adapter_model.bin"}, "names the weights 'adapter_model.bin'; crosslayer loads only"),
        ({"_attn_implementation": "evil/kernel"}, "asks for attention 'evil/kernel', Hub code that never runs"),
        ({"attn_implementation": "evil/kernel"}, "asks for attention 'evil/kernel', Hub code that never runs"),
    ],
)
def test_a_config_brings_neither_pickles_nor_code(folder, values, message):
    torch.save({}, folder / "adapter_model.bin")
    change(folder, **values)
    with pytest.raises(ValueError, match=message):
        crosslayer.load_model(str(folder))


def test_an_adapter_beside_a_model_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter .*merge"):
        crosslayer.load_model(str(folder))


def test_a_bad_config_is_one_line(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "abc"}))
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        crosslayer.load_model(str(folder))
    assert "\n" not in str(error.value)


def test_damaged_weights_are_one_line(folder):
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        crosslayer.load_model(str(folder))
    assert "\n" not in str(error.value)


def test_dtypes():
    assert resolve_dtype(None, torch.device("cpu")) == torch.float32
    assert resolve_dtype(None, torch.device("cuda")) == "auto"
    with pytest.raises(ValueError, match="float32, float64, bfloat16, float16"):
        resolve_dtype("int4", torch.device("cpu"))


# ---- the hub


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does; `slow` hangs."""

    def do_HEAD(self):  # noqa: N802
        errors = {"gated": (401, "GatedRepo"), "missing": (404, "RepoNotFound"), "empty": (404, "EntryNotFound")}
        kind = self.path.split("/")[2]
        if "/resolve/" in self.path:  # huggingface_hub asks about other things too
            self.server.asked.append(self.path)
        if kind == "slow":
            time.sleep(3)
        status, code = errors.get(kind, (500, "")) if kind != "broken" else (503, "")
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """The requests that a hub on this machine got; nothing is in the cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads, server.block_on_close, server.asked = True, False, []
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setattr(hub, "PATIENCE", 1.0)
    point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
    yield server.asked
    server.shutdown()
    server.server_close()


def point_at(monkeypatch, address, cache):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def put_into_cache(folder, cache, name):
    """Lay a model out as huggingface_hub keeps it."""
    kept = cache / f"models--{name.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("a" * 40)
    shutil.copytree(folder, kept / "snapshots" / ("a" * 40))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "owner/missing",
            "there is no folder 'owner/missing', and no public model of this name",
        ),
        ("owner/gated", "model 'owner/gated' is gated: accept its terms on the Hugging Face hub"),
        ("owner/empty", "'owner/empty' on the Hugging Face hub has no config.json"),
        ("owner/broken", r"there is no folder 'owner/broken', and the Hugging Face hub cannot be reached \(.*503"),
        ("owner/slow", "the Hugging Face hub cannot be reached"),
    ],
)
def test_what_the_hub_says_is_one_line_and_comes_at_once(fake_hub, name, message):
    started = time.monotonic()
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.load_model(name)
    assert time.monotonic() - started < 2 and len(fake_hub) == 1
    assert "\n" not in str(error.value) and "gemma3, minilm)" in str(error.value)


def test_the_hub_is_waited_for_under_five_seconds():
    assert max(hub.PATIENCE, hub.BRIEFLY) < 5


def test_an_address_that_is_never_found_is_not_waited_for(monkeypatch, fake_hub):
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *_, **__: time.sleep(3))
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"cannot.*reached \(no.*1 s\)"):
        crosslayer.load_model("owner/anything")
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("offline", [False, True])
def test_a_model_in_the_cache_loads_without_the_hub(monkeypatch, folder, tmp_path, offline):
    point_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    message = "HF_HUB_OFFLINE is set" if offline else "hub cannot be reached"
    with pytest.raises(ValueError, match=message):
        crosslayer.load_model("owner/kept")
    put_into_cache(folder, tmp_path / "cache", "owner/kept")
    started = time.monotonic()
    model, _ = crosslayer.load_model("owner/kept")
    assert time.monotonic() - started < 5 and type(model).__name__ == "LlamaForCausalLM"


def test_what_is_no_name_of_the_hub_is_not_sought_there(fake_hub):
    for name in ("./model", "a/b/c", "~/model", "-model", "model.", "a--b", "what ever", "x" * 97):
        with pytest.raises(ValueError, match="model folder"):
            crosslayer.load_model(name)
    assert not fake_hub


# ---- the cache of converted models


def test_a_result_calls_a_model_by_its_folder_and_the_model_of_a_run_by_the_run(tmp_path):
    (tmp_path / "attnres" / "model").mkdir(parents=True)
    assert public_name(tmp_path / "attnres" / "model") == "model"
    (tmp_path / "attnres" / "record.json").write_text("{}")
    assert public_name(tmp_path / "attnres" / "model") == public_name(tmp_path / "attnres") == "attnres"
    assert public_name("owner/name") == "owner/name"
