"""Compiled as a whole or layer by layer, a model has the same gradients; no layer is compiled anew for its depth."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from crosslayer.core.methods import method_class, method_names, to_entry
from crosslayer.testing.tiny import build, config_of
from tests.helpers.tiny import tokens

# dynamo asks for the gradients of what enters a graph
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
GROWING = ("attnres", "denseformer", "identity_mapping", "kvsharer", "mudd")  # what a layer reads depends on its depth
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in method_names() if name not in GROWING]


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(model, compiled=None):
    model.zero_grad()
    ids, call = tokens(), model if compiled is None else compiled
    call(ids, labels=ids, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "method", [{"name": "attnres"}, {"name": "attnres", "block": 5}, "mudd", "denseformer"], ids=str
)
def test_gradients_of_compiled_models(method, checkpointing):
    model = build(config_of([method])).train()
    expected = gradients(model)
    if checkpointing:
        model.activation_checkpointing_enable()
    whole = gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    by_layer = gradients(model)
    for one, two, other in zip(whole, by_layer, expected, strict=True):
        scale = other.abs().max().clamp(min=1)
        assert (one - other).abs().max() <= 1e-12 * scale and (two - other).abs().max() <= 1e-12 * scale


@pytest.mark.parametrize("name", [*GROWING, *OTHERS])
def test_each_kind_of_layer_is_compiled_once(name):
    """As many graphs for 12 layers as for 40, and no more in later steps."""
    graphs = []
    for layers in (12, 40):
        torch._dynamo.reset()
        entry, counter = to_entry(method_class(name).example(layers)), CompileCounter()
        model, ids = build(config_of([entry], num_hidden_layers=layers)).train(), tokens(batch=1, length=4)
        for layer in model.model.layers:
            layer.compile(backend=counter)
        counts = []
        for _ in range(3):
            model(ids, labels=ids, use_cache=False).loss.backward()
            counts.append(counter.frame_count)
        assert counts[0] > 0 and counts[1] == counts[2]
        graphs.append(counts[2])
    assert graphs[0] == graphs[1]
