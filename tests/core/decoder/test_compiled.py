"""Compiled as a whole or layer by layer, a model has the same gradients; no layer is compiled anew for its depth."""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from transformers import StaticCache

from crosslayer.core.methods import method_class, method_names, to_entry
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import build, close, config_of, tolerance
from tests.helpers.daily import daily
from tests.helpers.tiny import tokens

# dynamo asks for the gradients of what enters a graph
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
CASES = {
    "resformer, all": ([{"name": "resformer", "source": "all"}], {}),
    "attnres, experts": (["attnres"], {"num_local_experts": 2, "num_experts_per_tok": 1}),
}


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


GRADIENTS = [
    (method, checkpointing)
    for method in ({"name": "attnres"}, {"name": "attnres", "block": 5}, "mudd", "denseformer")
    for checkpointing in (False, True)
]


@pytest.mark.parametrize("case", daily(GRADIENTS, GRADIENTS[3]), ids=str)
def test_gradients_of_compiled_models(case):
    method, checkpointing = case
    model = build(config_of([method], num_hidden_layers=4)).train()
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


@pytest.mark.parametrize("case", daily([*CASES, *method_names()], "attnres"))
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_each_kind_of_layer_is_compiled_once(case):
    """As many graphs for 12 layers as for 24, no more in later steps, and never the compiler's limit of 8 a frame."""
    graphs = []
    for layers in (12, 24):
        torch._dynamo.reset()
        methods, shape = CASES.get(case) or ([to_entry(method_class(case).example(layers))], {})
        counter = CompileCounter()
        model = build(config_of(methods, num_hidden_layers=layers, **shape)).train()
        ids = tokens(batch=1, length=4)
        for layer in model.model.layers:
            layer.compile(backend=counter)
        counts = []
        for _ in range(3):
            model(ids, labels=ids, use_cache=False).loss.backward()
            counts.append(counter.frame_count)
        assert counts[0] > 0 and counts[1] == counts[2]
        graphs.append(counts[2])
    assert graphs[0] == graphs[1]


def test_compiled_training_runs_the_operators():
    graphs = []

    def compiler(graph, inputs):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    model = build(config_of(["attnres"], num_hidden_layers=3)).train()
    gradients(model, torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True))
    forward, backward = graphs
    # 6 sublayers and the final norm read; the first reads the embedding alone, as it is
    assert forward["crosslayer.depth_attention.default"] == 6
    assert backward["crosslayer.depth_attention_backward.default"] == 6
    assert backward["crosslayer.depth_attention_source_gradient.default"] == 7  # once each


@pytest.mark.slow
@pytest.mark.parametrize("method", ["attnres", "hyper_connections"])
def test_exported_programs_have_operators_of_torch_alone(method):
    model, ids = build(config_of([method])), tokens(batch=1, length=6)
    program = torch.export.export(model, (ids,), {"use_cache": False, "attention_mask": None}, strict=False)
    assert "crosslayer" not in str(program.graph)
    close(
        program.module()(ids, use_cache=False, attention_mask=None).logits,
        model(ids, use_cache=False).logits,
        "exported",
    )


@pytest.mark.parametrize("name", daily(method_names(), "cla"))
def test_decoding_with_a_static_cache_is_compiled_once(name):
    """As `generate` does it on a GPU: a graph for the prompt, one for all later tokens, and the numbers of no cache."""
    config = config_of([to_entry(method_class(name).example(6))])
    model, ids, graphs = build(config), tokens(length=9), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    cache = StaticCache(config=config, max_cache_len=16)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        parts = [compiled(ids[:, :4], **{CACHE: cache}, position_ids=torch.arange(4)[None]).logits]
        for position in range(4, 9):
            step = torch.tensor([[position]])
            parts.append(compiled(ids[:, position : position + 1], **{CACHE: cache}, position_ids=step).logits)
    close(torch.cat(parts, dim=1), expected, "compiled with a static cache", tolerance(config))
    assert len(graphs) <= 2
