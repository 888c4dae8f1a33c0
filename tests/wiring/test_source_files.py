"""Which files of a folder count, and what a size is."""

import io
import json

import pytest

import crosslayer
from crosslayer.models.load import load_model
from crosslayer.wiring.engines import parse_bytes
from tests.helpers.saved import ours, save

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}": (1024 if "i" in ending else 1000) ** power
    for power, prefix in enumerate("kmgtp", 1)
    for ending in ("", "b", "i", "ib")
}


@pytest.mark.parametrize("unit", UNITS)
def test_a_size_is_a_number_with_a_unit(unit):
    for text in (f"1536{unit}", f" 1536 {unit.upper()} ", f"1536.0{unit.capitalize()}"):
        assert parse_bytes(text, "x") == 1536 * UNITS[unit]
    assert parse_bytes(f"4096.5{unit}", "x") == int(4096.5 * UNITS[unit])


@pytest.mark.parametrize(
    "text",
    [
        "1,5GiB",
        "1,000MB",
        "10%",
        "80 %",
        "24GiB free",
        "24 GiB/2",
        "1.5.5GB",
        "20GB;x",
        "GiB",
        "",
        "-1GB",
        "1e9",
        "24",
        "0.1",
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="24GiB"):
        parse_bytes(text, "x")


def test_shards_beside_a_whole_file_are_not_read(tmp_path):
    folder = save(ours("svformer"), tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    assert crosslayer.plan(folder).weights_bytes == len(whole)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (folder / name).write_bytes(whole)
    index = {"metadata": {"total_size": 7}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert crosslayer.plan(folder).weights_bytes == len(whole)  # transformers reads this file alone
    (folder / "model.safetensors").unlink()
    assert crosslayer.plan(folder).weights_bytes == 7
    index = {"metadata": None, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert crosslayer.plan(folder).weights_bytes == len(whole)  # without a total size, the files that it names


def test_a_config_with_a_byte_order_mark(tmp_path, monkeypatch):
    folder = save(ours("svformer"), tmp_path / "model")
    before = crosslayer.plan(folder).stored_bytes
    config = folder / "config.json"
    config.write_text(config.read_text(), encoding="utf-8-sig")
    assert crosslayer.plan(folder).stored_bytes == before
    monkeypatch.setattr("sys.stdin", io.StringIO(config.read_text(encoding="utf-8")))  # as PowerShell pipes it
    assert crosslayer.plan("-").stored_bytes == before
    with pytest.raises(ValueError) as error:  # transformers itself does not read it
        load_model(str(folder))
    assert "\n" not in str(error.value) and "config.json" in str(error.value)
