"""GGUF files are read by their metadata alone, and hostile ones end in one line."""

import json
import struct
from typing import Any

import pytest

import crosslayer
from tests.cli.test_cli import run

INTEGER, BOOLEAN, TEXT, ARRAY = 4, 7, 8, 9


def packed(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(name: str, value) -> bytes:
    if isinstance(value, str):
        return packed(name) + struct.pack("<I", TEXT) + packed(value)
    if isinstance(value, list):
        kind = TEXT if isinstance(value[0], str) else INTEGER
        items = b"".join(packed(one) if kind == TEXT else struct.pack("<I", one) for one in value)
        return packed(name) + struct.pack("<IIQ", ARRAY, kind, len(value)) + items
    if isinstance(value, bool):
        return packed(name) + struct.pack("<I?", BOOLEAN, value)
    return packed(name) + struct.pack("<II", INTEGER, value)


def gguf(architecture: str, tensors: int = 0, kind: str | None = None, **fields) -> bytes:
    """Return a file of metadata and so many tensors of 8 × 16; `__` in the name of a field is a dot."""
    named = {f"{architecture}.{name.replace('__', '.')}": value for name, value in fields.items()}
    entries = {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"] * 50, **named}
    entries |= {"general.type": kind} if kind else {}
    body = b"".join(entry(name, value) for name, value in entries.items())
    body += b"".join(packed(f"t{i}") + struct.pack("<IQQIQ", 2, 8, 16, 2, 0) for i in range(tensors))
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries)) + body


LLAMA: dict[str, Any] = {
    "block_count": 4,
    "embedding_length": 64,
    "attention__head_count": 8,
    "attention__head_count_kv": 2,
}


def test_a_llama(tmp_path):
    (tmp_path / "m.gguf").write_bytes(gguf("llama", **LLAMA))
    plan = crosslayer.plan(tmp_path / "m.gguf", length=512)
    assert plan.stored_bytes == 512 * 4 * 2 * (2 * 8) * 2 and plan.dtype == "float16"
    assert plan.engine == "llama.cpp" and plan.stored_at(300) == plan.stored_at(512)
    assert plan.weights_bytes == (tmp_path / "m.gguf").stat().st_size
    assert crosslayer.plan(tmp_path, length=512).stored_bytes == plan.stored_bytes


def test_weights_are_counted_as_they_are_loaded(tmp_path):
    (tmp_path / "m.gguf").write_bytes(gguf("llama", tensors=5, **LLAMA))
    plan = crosslayer.plan(tmp_path, engine="transformers", dtype="float32", memory="1GiB")
    assert plan.parameters == 5 * 8 * 16 and plan.weights_bytes == 4 * 5 * 8 * 16
    assert plan.fitting_length() == (2**30 - plan.weights_bytes) // (4 * 2 * 2 * 8 * 4)
    packed = crosslayer.plan(tmp_path)  # llama.cpp loads the file as it is
    assert packed.weights_bytes == (tmp_path / "m.gguf").stat().st_size and packed.parameters is None


def test_an_encoder_has_no_cache(tmp_path):
    for causal, stored in ((False, 0), (True, 256 * 4 * 2 * 16 * 2)):
        (tmp_path / "m.gguf").write_bytes(gguf("bert", **LLAMA, attention__causal=causal))
        plan = crosslayer.plan(tmp_path / "m.gguf", length=256)
        assert (plan.caches, plan.stored_bytes) == (causal, stored)


KINDS = [("llama", "adapter", "a LoRA adapter"), ("clip", None, "a projector"), ("qwen2vl", "mmproj", "a projector")]
KINDS += [("imatrix", "imatrix", "an importance matrix")]


@pytest.mark.parametrize(("architecture", "kind", "words"), KINDS)
def test_a_file_beside_the_model_is_not_taken_for_it(tmp_path, architecture, kind, words):
    (tmp_path / "a.gguf").write_bytes(gguf(architecture, kind=kind))
    for source in (tmp_path / "a.gguf", tmp_path):
        with pytest.raises(ValueError, match=f"a.gguf is {words}, not a model"):
            crosslayer.plan(source)
    (tmp_path / "m.gguf").write_bytes(gguf("llama", kind="model", **LLAMA))
    assert crosslayer.plan(tmp_path, length=512).stored_bytes == 512 * 4 * 2 * (2 * 8) * 2


def test_windows_by_period_and_by_list(tmp_path):
    fields: dict[str, Any] = {
        **LLAMA,
        "attention__key_length": 16,
        "attention__value_length": 16,
        "attention__sliding_window": 8,
    }
    (tmp_path / "two.gguf").write_bytes(gguf("gemma2", **fields))
    masks = [states.mask for states in crosslayer.plan(tmp_path / "two.gguf").layers]
    assert masks == ["window 8", "full", "window 8", "full"]
    (tmp_path / "six.gguf").write_bytes(gguf("gemma3", **fields))
    plan = crosslayer.plan(tmp_path / "six.gguf", method={"name": "drop", "attention": [1]}, engine="transformers")
    assert plan.type == "gemma3_text" and plan.shared[0].pretrained == "yes, by retrofit"
    fields |= {"attention__shared_kv_layers": 1}
    fields |= {"attention__key_length_swa": 8, "attention__value_length_swa": 8}
    fields |= {"attention__sliding_window_pattern": [1, 0, 1, 0]}
    (tmp_path / "list.gguf").write_bytes(gguf("gemma4", **fields))
    plan = crosslayer.plan(tmp_path / "list.gguf", length=100, engine="transformers")
    assert plan.plan.keys == (0, 1, 2, 1)
    assert plan.stored_bytes == 2 * (2 * 7 * 2 * 2 * 8 + 100 * 2 * 2 * 16)


def test_latents_are_keys_and_values_at_once(tmp_path):
    fields: dict[str, Any] = {
        **LLAMA,
        "attention__head_count_kv": 1,
        "attention__kv_lora_rank": 16,
        "attention__key_length": 20,
    }
    (tmp_path / "m.gguf").write_bytes(gguf("deepseek2", **fields))
    assert crosslayer.plan(tmp_path / "m.gguf", length=256).stored_bytes == 256 * 4 * 20 * 2


def test_layers_without_attention(tmp_path):
    fields: dict[str, Any] = {
        **LLAMA,
        "attention__head_count_kv": [0, 2, 0, 0],
        "ssm__conv_kernel": 4,
        "ssm__state_size": 16,
    }
    fields |= {"ssm__inner_size": 128, "ssm__group_count": 2}
    (tmp_path / "m.gguf").write_bytes(gguf("granitehybrid", **fields))
    plan = crosslayer.plan(tmp_path / "m.gguf", length=256)
    assert plan.kv_bytes == 256 * 2 * 16 * 2
    assert plan.fixed_bytes == 3 * 4 * ((128 + 2 * 2 * 16) * 3 + 128 * 16)


def test_a_file_in_parts(tmp_path):
    name = "m-0000{}-of-00002.gguf"
    (tmp_path / name.format(1)).write_bytes(gguf("llama", **LLAMA))
    (tmp_path / name.format(2)).write_bytes(gguf("llama", tensors=3) + bytes(1000))
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert crosslayer.plan(tmp_path / name.format(2)).weights_bytes == size
    assert crosslayer.plan(tmp_path / name.format(2), engine="vllm").weights_bytes == 3 * 8 * 16 * 2
    (tmp_path / name.format(1)).unlink()
    with pytest.raises(ValueError, match="2 parts; m-00001-of-00002.gguf"):
        crosslayer.plan(tmp_path / name.format(2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "damaged: it claims 1152921504606846976 items"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**50), "damaged: it claims a text of 1125899906842624 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + packed("a") + struct.pack("<I", 77), "a value of type 77"),
        (gguf("llama", **LLAMA)[:-9], "in the middle of its header, after 5 fields; architecture llama"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "damaged: it claims 1152921504606846976 items"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + packed("t") + struct.pack("<I", 9), "its tensor 't' has 9 axes"),
        (gguf("rwkv7", **LLAMA), "the KV cache of architecture 'rwkv7' cannot be read"),
        (gguf("unheard_of", **LLAMA, attention__sliding_window=8), "which layers of architecture 'unheard_of' have"),
        (gguf("llama", **{**LLAMA, "block_count": 5000}), "block_count must be from 1 to 4096, got 5000"),
        (gguf("llama", **{**LLAMA, "attention__head_count_kv": [1, 2]}), "for each of 4 layers"),
        (gguf("llama", block_count=4), "llama.attention.head_count has no whole number"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, data, message):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.plan(tmp_path / "m.gguf")
    assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value)


def test_every_cut_ends_in_one_line(tmp_path):
    data = gguf("llama", tensors=2, **LLAMA)
    for end in range(len(data)):
        (tmp_path / "m.gguf").write_bytes(data[:end])
        with pytest.raises(ValueError, match="GGUF file|in"):
            crosslayer.plan(tmp_path / "m.gguf")


def test_from_a_shell(monkeypatch, tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(gguf("llama", **LLAMA))
    assert run(monkeypatch, "plan", tmp_path / "m.gguf", "--length", "256,512", "--kv-dtype", "q8_0") == 0
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["stored_bytes_by_length"] == {"256": 34816, "512": 69632} and headline["model"] == "m.gguf"
