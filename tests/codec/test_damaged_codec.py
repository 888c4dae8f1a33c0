"""A codec whose file was changed is refused: the decoder on a GPU reads its tables without further checks."""

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


@pytest.mark.parametrize("number, value", [(0, 1), (1, -3), (-1, 0)])
def test_tables_that_do_not_add_up_are_refused(number, value, tmp_path):
    def change(tensors, facts):
        name = next(name for name in tensors if name.endswith(".frequencies"))
        tensors[name][number] = value

    damaged(tmp_path, change)
    with pytest.raises(ValueError, match="fit"):
        load_codec(tmp_path)


def test_a_table_needs_a_value_for_each_code(tmp_path):
    def change(tensors, facts):
        name = next(name for name in tensors if name.endswith(".centers"))
        tensors[name] = tensors[name][:-1].clone()

    damaged(tmp_path, change)
    with pytest.raises(ValueError, match="fit"):
        load_codec(tmp_path)


def test_classes_out_of_order_are_refused(tmp_path):
    def change(tensors, facts):
        tensors["layers.0.classes"] = tensors["layers.0.classes"].flip(0).clone()

    damaged(tmp_path, change)
    with pytest.raises(ValueError, match="fit"):
        load_codec(tmp_path)
