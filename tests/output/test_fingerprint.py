"""The fingerprint leaves the model as it was."""

import pytest

from crosslayer import testing as contract
from crosslayer.output.manifest import fingerprint


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_every_module_keeps_its_own_mode(kind):
    model = contract.build(contract.config_of(["cla"]))
    model = model.float() if kind == "float32" else model
    model.train()
    model.model.layers[1].eval()  # frozen by its owner
    before = {name: module.training for name, module in model.named_modules()}
    first = fingerprint(model)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert fingerprint(model.eval()) == first
