"""The fingerprint leaves the model as it was."""

import copy

import pytest
import torch

from crosslayer.output.manifest import fingerprint
from crosslayer.probe.model import layer_stack
from crosslayer.testing import tiny as contract
from tests.helpers.cases import SINGLE
from tests.helpers.tiny import CAUSAL, tiny


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


@pytest.mark.parametrize("family", [*CAUSAL, "tied", *SINGLE])
def test_it_is_that_of_the_model_in_float32_which_is_never_held_whole(family):
    if family in SINGLE:
        model = contract.build(contract.config_of(SINGLE[family])).bfloat16()
    else:
        changes = {"tie_word_embeddings": True} if family == "tied" else {}
        model = tiny("llama" if family == "tied" else family, dtype=torch.bfloat16, **changes)
    expected = fingerprint(copy.deepcopy(model).float())
    stored = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    always_wide = {id(p) for p in model.parameters() if p.dtype == torch.float32}  # DeepSeek's router
    wide = []

    def count(module, *_):
        widened = [
            any(p.dtype == torch.float32 and id(p) not in always_wide for p in layer.parameters())
            for layer in layer_stack(model)
        ]
        wide.append(sum(widened))

    for module in layer_stack(model):
        module.register_forward_hook(count)
    assert fingerprint(model) == expected
    assert len(wide) == len(layer_stack(model)) and max(wide) == 1
    left = model.state_dict()
    assert all(left[name].data_ptr() == pointer for name, (pointer, _) in stored.items())
    assert all(
        torch.equal(left[name], value) and left[name].dtype == value.dtype for name, (_, value) in stored.items()
    )


def test_a_model_that_fails_is_left_as_it_was():
    model = tiny("llama", dtype=torch.bfloat16)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fingerprint(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)
