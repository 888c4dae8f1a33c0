"""Verification passes on models that are right, and every row of it fails on a fault planted for it."""

import dataclasses
import json
import struct

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, MambaConfig, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama

from crosslayer.decoder.attention import CrossLayerAttention
from crosslayer.output import manifest
from crosslayer.testing import build, config_of
from crosslayer.verification import verify_model as verify
from crosslayer.verification.checks import CHECKS
from crosslayer.verification.record import VerifyRecord
from tests.cli.test_cli import run
from tests.helpers.tiny import VOCABULARY, tiny

METHODS = {
    "uniattn": {"name": "uniattn", "superblocks": [[1, 2], [3, 4, 5]]},
    "cla": {"name": "cla", "group": 3, "start": 1, "end": 5},
    "svformer": {"name": "svformer", "anchors": [0, 3]},
    "drop": {"name": "drop", "attention": [2], "mlp": [1], "layers": [4]},
}


def ours(method):
    return build(config_of([METHODS[method]])).float()


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "the": 3, "whale": 4} | {f"w{i}": i for i in range(5, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture
def saved(tmp_path):
    """A folder with a model of ours, its tokenizer and its manifest."""
    return save(ours("svformer"), tmp_path / "model")


def save(model, folder):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("a model")
    (folder / "figures").mkdir()
    (folder / "figures" / "one.svg").write_text("<svg/>")
    manifest.write_manifest(folder, model)
    return folder


def edit(folder, change):
    """Change the manifest in place, and make the hashes right again where `change` returns names."""
    path = folder / "manifest.json"
    record = json.loads(path.read_text())
    for name in change(record) or ():
        record["files"][name] = manifest._digest(folder / name)
    path.write_text(json.dumps(record))


def only(monkeypatch, *names):
    monkeypatch.setattr(verify, "CHECKS", {name: CHECKS[name] for name in CHECKS if name in names})


def by_name(rows):
    return {row.name: row for row in rows}


def statuses(rows):
    return {(row.name, row.dtype): row.status for row in rows}


# ---- what is right passes


@pytest.mark.parametrize("method", METHODS)
def test_every_row_passes_on_ours(method):
    rows = verify.verify(ours(method), dtypes=("float32",), compile_backend="aot_eager")
    assert rows[0].status == verify.NOT_APPLICABLE and "not a local folder" in rows[0].reason
    assert [row for row in rows[1:] if row.status != verify.PASS] == [] and len(rows) == 1 + len(CHECKS)
    assert all(row.difference is not None and row.tolerance is not None for row in rows[1:])


def test_every_row_passes_on_a_stock_llama_in_two_dtypes_and_leaves_it_alone():
    model, steps = tiny("llama", dtype=torch.float32).train(), []
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config
    model.model.embed_tokens.weight.requires_grad_(False)
    rows = verify.verify(model, compile_backend="aot_eager", progress=lambda *step: steps.append(step))
    assert {row.status for row in rows[1:]} == {verify.PASS}
    total = verify.check_count(("float32", "bfloat16"))
    named = [f"{name}, {dtype}" for dtype in ("float32", "bfloat16") for name in CHECKS]
    assert steps[1:] == [*((i, total, name) for i, name in enumerate(named)), (total, total, "")]
    assert steps[0] == (0, total, "manifest and plain pass")
    assert len({row.tolerance for row in rows[1:] if row.dtype == "bfloat16"}) > 1  # the logits' own, and exact ones
    assert model.training and not model.is_activation_checkpointing and model.dtype == torch.float32
    assert model.config.to_dict() == config and model.config._attn_implementation == "sdpa"
    assert model.generation_config is generation
    assert not model.model.embed_tokens.weight.requires_grad and model.lm_head.weight.requires_grad
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # from inductor's own modules
def test_inductor_passes():
    row = by_name(verify.verify(ours("cla"), dtypes=("float32",)))["compiled"]
    assert row.status == verify.PASS, row


def test_cache_bytes_know_sliding_windows(monkeypatch):
    only(monkeypatch, "cache bytes")
    for family in ("mistral", "gemma3_text", "gemma2"):
        row = verify.verify(tiny(family, dtype=torch.float32), dtypes=("float32",))[1]
        assert row.status == verify.PASS and row.difference == 0, row


def test_a_saved_folder_passes_and_its_record_is_written(monkeypatch, saved, tmp_path, capsys):
    names = [name for name in CHECKS if name != "compiled"]  # inductor takes long
    only(monkeypatch, *names)
    assert run(monkeypatch, "verify", saved, "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    headline = json.loads(out.strip().splitlines()[-1])
    assert headline["model"] == "model" and headline["failed"] == headline["not_applicable"] == 0
    assert headline["passed"] == 3 + 2 * len(names) and "PASS" in out
    text = (tmp_path / "out" / "record.json").read_text()
    record = VerifyRecord.model_validate(json.loads(text))
    assert len(record.checks) == headline["passed"] and str(tmp_path) not in text
    assert f"All {headline['passed']} checks that apply passed." in (tmp_path / "out" / "report.html").read_text()
    assert run(monkeypatch, "verify", saved, "--out", tmp_path / "out") == 2


# ---- planted faults


def lose_one_layer(monkeypatch):
    """One layer of a stock model does without the cache."""
    original = modeling_llama.LlamaAttention.forward

    def forward(self, *args, past_key_values=None, **kwargs):
        return original(self, *args, past_key_values=None if self.layer_idx == 1 else past_key_values, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)


def forget_the_past(monkeypatch):
    """One layer of ours stores its states, but reads only the new ones."""
    original = CrossLayerAttention._cached

    def cached(self, states, cache):
        found, new = original(self, states, cache), states[1].shape[2]
        if self.layer_idx == 3:
            found[1] = torch.cat([torch.zeros_like(found[1][:, :, :-new]), found[1][:, :, -new:]], 2)
        return found

    monkeypatch.setattr(CrossLayerAttention, "_cached", cached)


def test_a_layer_that_bypasses_the_cache_fails(monkeypatch):
    lose_one_layer(monkeypatch)
    only(monkeypatch, "cache, token by token", "cache, uneven chunks", "beam search", "cache bytes", "save and load")
    rows = verify.verify(tiny("llama", dtype=torch.float32))
    found = statuses(rows)
    for dtype in ("float32", "bfloat16"):
        assert found.pop(("save and load", dtype)) == verify.PASS
    found.pop(("manifest", None))
    assert set(found.values()) == {verify.FAIL}


def test_a_layer_that_forgets_the_past_fails(monkeypatch):
    forget_the_past(monkeypatch)
    only(monkeypatch, "cache, token by token", "cache, uneven chunks", "left-padded batch", "beam search")
    rows = verify.verify(ours("uniattn"))[1:]
    assert {row.status for row in rows} == {verify.FAIL}
    assert all(row.difference > 3 * row.tolerance for row in rows if row.difference is not None)


def no_reordering(monkeypatch):
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda self, beams: None)


def no_padding_mask(monkeypatch):
    original = modeling_llama.LlamaModel.forward

    def forward(self, *args, attention_mask=None, **kwargs):
        return original(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)


def change_when(monkeypatch, condition):
    """The norms are 1 % larger wherever `condition` holds."""
    original = modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, x: original(self, x) * (1.01 if condition(self) else 1)
    )


def change_when_compiled(monkeypatch):
    change_when(monkeypatch, lambda norm: torch.compiler.is_compiling())


def change_at_every_call(monkeypatch):
    calls = iter(range(10**6))
    change_when(monkeypatch, lambda norm: norm.training and next(calls) % 2)


def scale_eager(monkeypatch):
    original = modeling_llama.eager_attention_forward

    def eager(*args, scaling, **kwargs):
        return original(*args, scaling=scaling * 1.01, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)


def lose_a_weight(monkeypatch):
    original = modeling_llama.LlamaForCausalLM.state_dict

    def state_dict(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return {name: weight * 1.0001 if "layers.1.mlp.up" in name else weight for name, weight in found.items()}

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "state_dict", state_dict)


def keep_twice(monkeypatch):
    original = DynamicLayer.update

    def update(self, keys, values, *args, **kwargs):
        found = original(self, keys, values, *args, **kwargs)
        self.spare = self.keys.clone()
        return found

    monkeypatch.setattr(DynamicLayer, "update", update)


def static_cache_one_off(monkeypatch):
    from transformers.cache_utils import StaticLayer

    original = StaticLayer.update

    def update(self, keys, values, *args, **kwargs):
        return original(self, keys, values * (1.01 if keys.shape[2] == 1 else 1), *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", update)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("static cache", static_cache_one_off),
        ("beam search", no_reordering),
        ("left-padded batch", no_padding_mask),
        ("compiled", change_when_compiled),
        ("checkpointed gradients", change_at_every_call),
        ("save and load", lose_a_weight),
        ("eager and SDPA", scale_eager),
        ("cache bytes", keep_twice),
    ],
)
def test_every_row_can_fail(monkeypatch, name, fault):
    only(monkeypatch, name)
    model = tiny("llama", dtype=torch.float32)
    right = verify.verify(model, dtypes=("float32",), compile_backend="aot_eager")[1]
    fault(monkeypatch)
    wrong = verify.verify(model, dtypes=("float32",), compile_backend="aot_eager")[1]
    assert (right.status, wrong.status) == (verify.PASS, verify.FAIL), wrong


def test_bfloat16_finds_positions_that_are_off_by_one(monkeypatch):
    """The mildest of the faults: the tolerance adapts to rounding, and must not adapt to it."""
    original = modeling_llama.LlamaModel.forward

    def forward(self, input_ids, past_key_values=None, **kwargs):
        if past_key_values is not None and (seen := past_key_values.get_seq_length()):
            kwargs["position_ids"] = (torch.arange(input_ids.shape[1]) + seen + 1)[None]
        return original(self, input_ids, past_key_values=past_key_values, **kwargs)

    only(monkeypatch, "cache, uneven chunks")
    model = tiny("llama", dtype=torch.float32)
    assert verify.verify(model, dtypes=("bfloat16",))[1].status == verify.PASS
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    assert verify.verify(model, dtypes=("bfloat16",))[1].status == verify.FAIL


def test_a_tolerance_that_tells_little_is_said_to_be_weak(monkeypatch):
    only(monkeypatch, "cache, uneven chunks", "save and load")
    monkeypatch.setattr(verify, "WEAK", 1e-3)
    rows = by_name(verify.verify(tiny("llama", dtype=torch.float32), dtypes=("bfloat16",)))
    assert rows["cache, uneven chunks"].reason.startswith("weak: rounding alone")
    assert "weak" not in rows["save and load"].reason


def test_an_exception_and_a_nan_are_rows_that_fail(monkeypatch):
    def breaks(subject):
        raise RuntimeError("out of\nluck")

    found = {"breaks": breaks, "nan": lambda subject: dataclasses.replace(exact, difference=float("nan"))}
    exact = CHECKS["cache bytes"](verify._subject(tiny("llama"), torch.arange(3, 20)[None], "float32", ""))
    monkeypatch.setattr(verify, "CHECKS", found)
    rows = by_name(verify.verify(tiny("llama"), dtypes=("float32",)))
    assert rows["breaks"].status == rows["nan"].status == verify.FAIL
    assert rows["breaks"].reason == "RuntimeError: out of luck" and rows["nan"].difference is None


# ---- what cannot be had


def test_what_a_model_or_machine_lacks_is_not_applicable(monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none():
        raise InvalidCxxCompiler

    only(monkeypatch, "compiled", "static cache", "eager and SDPA")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    rows = by_name(verify.verify(tiny("gemma2", dtype=torch.float32), dtypes=("float32",)))
    assert {rows[name].status for name in ("compiled", "eager and SDPA")} == {verify.NOT_APPLICABLE}
    assert "no C++ compiler" in rows["compiled"].reason and "no SDPA" in rows["eager and SDPA"].reason
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "_can_compile_fullgraph", False)
    rows = by_name(verify.verify(tiny("llama", dtype=torch.float32), dtypes=("float32",)))
    assert rows["static cache"].status == verify.NOT_APPLICABLE and "one graph" in rows["static cache"].reason


def test_bad_input(monkeypatch, capsys):
    for dtypes in ((), ("float33",), ("float32", "float32")):
        with pytest.raises(ValueError, match="name each once"):
            verify.verify(tiny("llama"), dtypes=dtypes)
    with pytest.raises(ValueError, match="verify needs a causal LM; BertModel"):
        verify.verify(tiny("bert"))
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match="verify needs a model with a key-value cache; MambaForCausalLM keeps states"):
        verify.verify(mamba)
    with pytest.raises(ValueError, match="12 positions; verify needs 22"):
        verify.verify(tiny("llama", max_position_embeddings=12))
    for words, message in ((["minilm"], "needs a causal LM"), (["./nowhere"], "does not exist")):
        assert run(monkeypatch, "verify", *words) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


# ---- files


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return "model.safetensors is changed"


def flip_one_bit(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8 + struct.unpack("<Q", data[:8])[0] + 100] ^= 1  # the lowest bit of a weight
    path.write_bytes(data)
    return "model.safetensors is changed"


def shuffle_the_plan(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["cross_layer"][0]["anchors"] = [0, 2]
    path.write_text(json.dumps(config))
    return "config.json is changed"


def add_a_file(folder):
    (folder / "figures" / "more.bin").write_text("x")
    return "figures/more.bin is not listed"


def add_a_link(folder):
    (folder / "elsewhere").symlink_to(folder.parent, target_is_directory=True)
    return "elsewhere is not listed"


def lose_a_file(folder):
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json is missing"


@pytest.mark.parametrize("fault", [truncate, flip_one_bit, shuffle_the_plan, add_a_file, add_a_link, lose_a_file])
def test_tampered_files_fail_before_anything_is_loaded(monkeypatch, saved, capsys, fault):
    assert manifest.check_files(saved) == []
    reason = fault(saved)
    monkeypatch.setattr(verify, "load_model", None)  # a call would raise TypeError
    assert manifest.check_files(saved) == [reason]
    assert run(monkeypatch, "verify", saved) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.strip().splitlines()[-1])["failed"] == 1
    assert "FAIL" in captured.out and "Traceback" not in captured.err


def test_a_shuffled_plan_fails_though_its_hash_was_made_again(saved):
    shuffle_the_plan(saved)
    edit(saved, lambda record: ["config.json"])
    rows = verify.verify_source(str(saved))
    assert [(row.name, row.status) for row in rows] == [("manifest: files", "PASS"), ("load", "FAIL")]
    assert "are missing or misshapen" in rows[1].reason


def test_plan_and_fingerprint_are_the_manifests(monkeypatch, saved):
    monkeypatch.setattr(verify, "CHECKS", {})

    def other_plan(record):
        record["plan"]["values"][1] = 1

    model, _ = verify.load_model(str(saved))
    assert {row.status for row in verify.verify(model, folder=saved)} == {verify.PASS}
    edit(saved, other_plan)
    rows = by_name(verify.verify(model, folder=saved))
    assert rows["manifest: plan"].status == verify.FAIL and "plan in config.json" in rows["manifest: plan"].reason
    assert rows["manifest: fingerprint"].status == verify.PASS
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.1)
    assert by_name(verify.verify(model, folder=saved))["manifest: fingerprint"].status == verify.FAIL


def test_a_stock_model_has_a_manifest_without_a_plan(monkeypatch, tmp_path):
    monkeypatch.setattr(verify, "CHECKS", {})
    model = tiny("llama", dtype=torch.bfloat16)
    folder = save(model, tmp_path / "model")
    record = json.loads((folder / "manifest.json").read_text())
    assert record["plan"] is None and record["methods"] is None and len(record["fingerprint"]["ids"]) == 24
    assert "figures/one.svg" in record["files"] and "manifest.json" not in record["files"]
    assert {row.status for row in verify.verify_source(str(folder), dtypes=("float32",))} == {verify.PASS}


def test_a_folder_that_cannot_be_loaded_is_a_row(saved):
    (saved / "manifest.json").unlink()
    truncate(saved)
    rows = verify.verify_source(str(saved))
    assert [(row.name, row.status) for row in rows] == [("manifest", "NOT APPLICABLE"), ("load", "FAIL")]


def test_a_retrofit_without_its_manifest_fails_and_a_model_that_was_trained_on_does_not(monkeypatch, saved, tmp_path):
    monkeypatch.setattr(verify, "CHECKS", {})
    (saved / "record.json").write_text('{"schema": "crosslayer/retrofit/1"}')
    (saved / "manifest.json").unlink()
    assert run(monkeypatch, "verify", saved) == 1
    rows = verify.verify_source(str(saved))
    assert [(row.name, row.status) for row in rows] == [("manifest: files", "FAIL")]
    assert "the manifest.json of a retrofit is missing" in rows[0].reason
    model, words = verify.load_model(str(saved))
    model.save_pretrained(tmp_path / "further")
    words.save_pretrained(tmp_path / "further")
    rows = verify.verify_source(str(tmp_path / "further"), dtypes=("float32",))
    assert [(row.name, row.status) for row in rows] == [("manifest", "NOT APPLICABLE")]
    for text in ("[]", "{", "[" * 100_000, '{"schema": 1}', '{"schema": "crosslayer/bench/1"}'):
        (saved / "record.json").write_text(text)
        assert verify.verify_source(str(saved), dtypes=("float32",))[0].status == verify.NOT_APPLICABLE


def test_the_check_that_runs_is_on_the_screen(monkeypatch, saved, capsys):
    only(monkeypatch, "cache bytes", "save and load")
    assert run(monkeypatch, "verify", saved, "--dtypes", "float32") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verifying")]
    assert [line.split("; now ")[1:] for line in lines] == [
        [], ["manifest and plain pass"], ["save and load, float32"], ["cache bytes, float32"], [],
    ]  # fmt: skip


def as_text(text):
    return lambda record: text


def with_file(name):
    return lambda record: json.dumps({**record, "files": {name: "0" * 64}})


def with_print(**changes):
    return lambda record: json.dumps({**record, "fingerprint": {**record["fingerprint"], **changes}})


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (as_text("{"), "manifest.json: "),
        (as_text("[]"), "valid dictionary"),
        (as_text("[" * 100_000), "nested too deeply"),
        (as_text('{"schema": "crosslayer/manifest/2"}'), "schema"),
        (with_file("../secret"), "not a path inside"),
        (with_file("/etc/passwd"), "not a path inside"),
        (with_file("a/../../b"), "not a path inside"),
        (with_file("..\\b"), "not a path inside"),
        (with_print(std=float("nan")), "fingerprint.std"),
        (with_print(logits=[1.0]), "fingerprint.logits"),
        (with_print(ids=["a"]), "fingerprint.ids"),
    ],
)
def test_a_hostile_manifest_is_one_line(monkeypatch, saved, hostile, message):
    path = saved / "manifest.json"
    path.write_text(hostile(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"^manifest\.json: ") as found:
        manifest.check_files(saved)
    assert message in str(found.value) and "\n" not in str(found.value)
    assert [row.status for row in verify.verify_source(str(saved))] == [verify.FAIL]


def test_ids_beyond_the_vocabulary_fail(monkeypatch, saved):
    monkeypatch.setattr(verify, "CHECKS", {})
    path = saved / "manifest.json"
    path.write_text(with_print(ids=[10**6])(json.loads(path.read_text())))
    row = by_name(verify.verify_source(str(saved)))["manifest: fingerprint"]
    assert row.status == verify.FAIL and "the vocabulary has 64" in row.reason


def test_a_manifest_is_written_whole_or_not_at_all(monkeypatch, saved):
    before = (saved / "manifest.json").read_text()
    monkeypatch.setattr(manifest.Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        manifest.write_manifest(saved, ours("svformer"))
    assert (saved / "manifest.json").read_text() == before and manifest.check_files(saved) == []
