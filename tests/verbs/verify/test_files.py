"""Files that were damaged or edited fail before anything is loaded, and plan and logits are the manifest's."""

import json
import struct

import pytest
import torch

from crosslayer import load_model, verify
from crosslayer.output import manifest
from crosslayer.verbs.verify import run as module
from tests.cli.test_cli import run
from tests.helpers.saved import edit_manifest, ours, save
from tests.helpers.tiny import tiny
from tests.helpers.verifications import by_name, only, statuses


@pytest.fixture
def saved(tmp_path):
    return save(ours("svformer"), tmp_path / "model")


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
    monkeypatch.setattr(module, "load_model", None)  # a call would raise TypeError
    assert manifest.check_files(saved) == [reason]
    assert run(monkeypatch, "verify", saved) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.strip().splitlines()[-1])["failed"] == 1
    assert "FAIL" in captured.out and "Traceback" not in captured.err


def test_a_shuffled_plan_fails_though_its_hash_was_made_again(saved):
    shuffle_the_plan(saved)
    edit_manifest(saved, lambda record: ["config.json"])
    verification = verify(saved)
    assert statuses(verification) == [("manifest: files", "PASS"), ("load", "FAIL")]
    assert "or misshapen" in verification.failed[0].reason


def test_plan_and_fingerprint_are_the_manifests(monkeypatch, saved):
    only(monkeypatch)

    def other_plan(record):
        record["plan"]["values"][1] = 1

    model, _ = load_model(str(saved))
    assert {row.status for row in verify(model, folder=saved).checks} == {"PASS"}
    edit_manifest(saved, other_plan)
    rows = by_name(verify(model, folder=saved))
    assert rows["manifest: plan"].status == "FAIL" and "differ in" in rows["manifest: plan"].reason
    assert rows["manifest: fingerprint"].status == "PASS"
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.1)
    assert by_name(verify(model, folder=saved))["manifest: fingerprint"].status == "FAIL"


def test_a_stock_model_has_a_manifest_without_a_plan(monkeypatch, tmp_path):
    only(monkeypatch)
    model = tiny("llama", dtype=torch.bfloat16)
    folder = save(model, tmp_path / "model")
    record = json.loads((folder / "manifest.json").read_text())
    assert record["plan"] is None and record["methods"] is None and len(record["fingerprint"]["ids"]) == 24
    assert "figures/loss.svg" in record["files"] and "manifest.json" not in record["files"]
    assert {row.status for row in verify(folder, dtypes=("float32",)).checks} == {"PASS"}


def test_a_folder_that_cannot_be_loaded_is_a_row(saved):
    (saved / "manifest.json").unlink()
    truncate(saved)
    assert statuses(verify(saved)) == [("manifest", "NOT APPLICABLE"), ("load", "FAIL")]


def test_a_retrofit_without_its_manifest_fails_and_a_model_that_was_trained_on_does_not(monkeypatch, saved, tmp_path):
    only(monkeypatch)
    (saved / "record.json").write_text('{"schema": "crosslayer/retrofit/1"}')
    (saved / "manifest.json").unlink()
    assert run(monkeypatch, "verify", saved) == 1
    verification = verify(saved)
    assert statuses(verification) == [("manifest: files", "FAIL")]
    assert "manifest.json is missing" in verification.failed[0].reason
    model, words = load_model(str(saved))
    model.save_pretrained(tmp_path / "further")
    words.save_pretrained(tmp_path / "further")
    assert statuses(verify(tmp_path / "further", dtypes=("float32",))) == [("manifest", "NOT APPLICABLE")]
    for text in ("[]", "{", "[" * 100_000, '{"schema": 1}', '{"schema": "crosslayer/bench/1"}'):
        (saved / "record.json").write_text(text)
        assert verify(saved, dtypes=("float32",)).checks[0].status == "NOT APPLICABLE"
