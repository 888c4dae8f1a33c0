"""A codec whose file was changed is refused."""

import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from crosslayer.codec.codec import FILE, load_codec
from tests.helpers.codecs import fitted


def damaged(folder, change):
    """Write a codec whose tensors and header `change` alters."""
    _, codec = fitted()
    codec.save(folder)
    tensors = load_file(folder / FILE)
    with safe_open(folder / FILE, "pt") as file:
        facts = json.loads(file.metadata()["crosslayer_codec"])
    change(tensors, facts)
    save_file(tensors, folder / FILE, metadata={"crosslayer_codec": json.dumps(facts)})


@pytest.mark.parametrize("sources", [[-1], [2], [0, 5], ["0"]])
def test_sources_that_come_later_are_refused(sources, tmp_path):
    damaged(tmp_path, lambda tensors, facts: facts["layers"][1].update(sources=sources))
    with pytest.raises(ValueError, match="fit"):
        load_codec(tmp_path)


@pytest.mark.parametrize("name", ["offset", "predict", "down", "up", "shift", "classes"])
def test_tensors_of_another_size_are_refused(name, tmp_path):
    def change(tensors, facts):
        tensors[f"layers.1.{name}"] = tensors[f"layers.1.{name}"][:-1].clone()

    damaged(tmp_path, change)
    with pytest.raises(ValueError, match="fit"):
        load_codec(tmp_path)


def test_classes_out_of_order_are_refused(tmp_path):
    def change(tensors, facts):
        tensors["layers.0.classes"] = tensors["layers.0.classes"].flip(0).clone()

    damaged(tmp_path, change)
    with pytest.raises(ValueError, match="fit"):
        load_codec(tmp_path)
