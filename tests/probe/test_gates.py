"""Output gates: what a model multiplies the heads' outputs with, against its own projections."""

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.probe.gates import gate_of, output_gates
from crosslayer.probe.intercept import visited
from crosslayer.probe.model import layer_stack
from tests.helpers.shipped import needs, shipped
from tests.helpers.tiny import tiny, tokens

IDS = tokens(batch=1, length=20)


def recorded(model):
    with torch.no_grad(), output_gates(model) as gates:
        model(input_ids=IDS, use_cache=False)
    return gates


def gated():
    """Qwen3-Next with a gate in its last layer alone, since the others have linear attention."""
    return tiny("qwen3_next", dtype=torch.float32)


def of_projection(model):
    """The sigmoids (T, H, D) of the half of W_q's output that is the gate."""
    found = []
    attention = layer_stack(model)[2].self_attn

    def keep(module, args, output):
        found.append(torch.sigmoid(output[0].unflatten(-1, (-1, 2, attention.head_dim))[:, :, 1]))

    hook = attention.q_proj.register_forward_hook(keep)
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    hook.remove()
    return found[0]


def test_a_gate_is_that_of_the_projection():
    model = gated()
    gates = recorded(model)
    assert list(gates) == [2] and gates[2].shape == (20, 4)
    assert torch.allclose(gates[2], of_projection(model).mean(dim=-1), atol=1e-5)


@needs("inkling2_text")
def test_every_layer_of_inkling_2_has_a_gate():
    gates = recorded(shipped("inkling2_text", hidden_size=64))
    assert all(((gate >= 0) & (gate <= 1)).all() for gate in gates.values())
    assert set(gates) == {0, 1, 2, 3}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "olmo2", "gpt_oss"])
def test_models_without_a_gate_have_none(family):
    model = tiny(family, dtype=torch.float32)
    assert recorded(model) == {}
    assert crosslayer.diagnose(model, IDS).output_gates is None


def test_a_norm_is_no_gate():
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(1, 30, 4, 8, generator=generator)
    gain = torch.rand(4 * 8, generator=generator).view(1, 1, 4, 8)
    normed = gain * out * torch.rsqrt(out.square().mean(dim=(2, 3), keepdim=True) + 1e-6) / 10
    assert gate_of(normed, out) is None and gate_of(out * 1.5, out) is None and gate_of(-out, out) is None
    gate = torch.rand(1, 30, 4, 8, generator=generator)
    assert torch.allclose(gate_of(gate * out, out), gate[0].mean(dim=-1), atol=1e-5)
    by_head = torch.rand(1, 30, 4, 1, generator=generator)
    assert torch.allclose(gate_of(by_head * out, out), by_head[0, :, :, 0], atol=1e-5)


def test_attention_after_the_gate_weighs_each_row_by_it(tmp_path):
    """By loops over heads and rows of the layer's map."""
    model, calls = gated(), []
    result = crosslayer.diagnose(model, IDS)
    with torch.no_grad(), visited(model, calls.append):
        model(input_ids=IDS, use_cache=False)
    (call,) = calls
    gate = of_projection(model).mean(dim=-1)  # (T, H)
    received = torch.zeros(20)
    for head in range(4):
        for row in range(20):
            scores = call.key[0, head // 2, : row + 1] @ call.query[0, head, row] * call.scaling
            received[: row + 1] += gate[row, head] * scores.softmax(dim=0)
    expected = received / gate.sum()
    gates = result.output_gates
    assert gates.first_token_share.mean[2] == pytest.approx(float(expected[0]), rel=1e-4)
    assert np.isnan(gates.first_token_share.array()[:2]).all()
    assert np.allclose(gates.mean.array()[2], gate.mean(dim=0), atol=1e-5)
    assert gates.importance_by_position.mean[2] == pytest.approx(expected.tolist(), rel=1e-3)
    assert gates.most_closed == (2, pytest.approx(float(gate.mean()), rel=1e-4))
    assert any("output gates" in line for line in result.sentences())
    result.save(tmp_path / "folder")
    assert crosslayer.load_result(tmp_path / "folder") == result
    assert {"output_gates", "gated_first_token"} <= {panel.key for panel in result.layout().panels}
