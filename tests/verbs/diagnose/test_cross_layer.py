"""The short forms of cross-layer attention against loops over heads and rows."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import crosslayer
from crosslayer.probe.intercept import visited
from crosslayer.verbs.diagnose.sequence import CrossLayerCosines
from tests.helpers.tiny import tiny, tokens


def naive(call, other, window):
    """Return mean cosines of Eq. 4 and Eq. 6 with Eq. 2, a row and a head at a time."""
    heads, size, _ = call.query[0].shape
    group = heads // call.key.shape[1]
    rows = {form: [] for form in ("true", "current", "identity")}
    for row in range(size):
        first = max(0, row - window + 1)
        parts = {form: [] for form in rows}
        for head in range(heads):
            q, kv = call.query[0, head, row], head // group
            k, v = call.key[0, kv, first : row + 1], call.value[0, kv, first : row + 1]
            k2, v2 = other.key[0, kv, first : row + 1], other.value[0, kv, first : row + 1]
            both = torch.softmax(torch.cat([k @ q, k2 @ q]) * call.scaling, 0)
            own = torch.softmax(k @ q * call.scaling, 0)
            parts["true"].append(both @ torch.cat([v, v2]))
            parts["current"].append(own @ (v + v2) / 2)
            parts["identity"].append(own @ v + other.value[0, kv, row])
        for form, heads_of_row in parts.items():
            rows[form].append(torch.cat(heads_of_row))
    true = rows.pop("true")
    return {
        form: sum(float(a @ b / (a.norm() * b.norm())) for a, b in zip(true, short, strict=True)) / size
        for form, short in rows.items()
    }


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_cosines_with_true_cross_layer_attention(family):
    model, ids, calls = tiny(family), tokens(batch=1, length=12), []
    with torch.no_grad(), visited(model, calls.append):
        model.base_model(ids, use_cache=False)
    cosines = crosslayer.diagnose(model, ids, cross_layer=True).cross_layer
    window = 8 if family == "mistral" else 12
    for source, other in (("previous", calls[1]), ("first", calls[0])):
        for form, expected in naive(calls[2], other, window).items():
            by_layer = getattr(cosines, f"{form}_{source}").array()
            assert by_layer[2] == pytest.approx(expected, abs=1e-10)
            assert np.isnan(by_layer[0])  # nothing is below the first layer


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_no_mask_means_causal_within_the_window(family):
    model, ids, calls = tiny(family), tokens(batch=1, length=24), []
    with torch.no_grad(), visited(model, calls.append):
        model.base_model(ids, use_cache=False)
    by_mask = []
    for mask in (True, False):
        cosines = CrossLayerCosines()
        for call in calls:
            assert (call.window is not None) == (family == "mistral")
            cosines.measure(call if mask else dataclasses.replace(call, mask=None))
        by_mask.append(torch.stack([cosine for form in cosines.by_form.values() for cosine in form.values()]))
    assert (by_mask[0] - by_mask[1]).abs().max() < 1e-12


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_response_of_a_map_to_the_layer_below_by_loops(family):
    model, ids = tiny(family, num_hidden_layers=3), tokens(batch=1, length=12)
    cosines = crosslayer.diagnose(model, ids, cross_layer=True).cross_layer
    hidden, calls = [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    with torch.no_grad(), visited(model, calls.append):
        model.base_model(ids, use_cache=False)
    cos, sin = model.model.rotary_emb(hidden[0], torch.arange(12)[None])
    window = 8 if family == "mistral" else 12
    for number in (1, 2):
        layer, key = model.model.layers[number], calls[number - 1].key[0]
        with torch.no_grad():
            queries = []
            for x in hidden[number - 1 : number + 1]:
                q = layer.self_attn.q_proj(layer.input_layernorm(x)).view(1, 12, -1, key.shape[-1]).transpose(1, 2)
                queries.append(apply_rotary_pos_emb(q, q, cos, sin)[0][0])
        norms, ratios = [], []
        for head in range(len(queries[0])):
            for row in range(12):
                k = key[head * len(key) // len(queries[0]), max(0, row - window + 1) : row + 1]
                old, new = (k @ q[head, row] * layer.self_attn.scaling for q in queries)
                jacobian = torch.autograd.functional.jacobian(lambda scores: torch.softmax(scores, 0), old)
                norms.append(jacobian.norm().item())
                ratios.append(((jacobian @ (new - old)).norm() / torch.softmax(old, 0).norm()).item())
        assert cosines.softmax_jacobian.array()[number] == pytest.approx(np.mean(norms), abs=1e-9)
        assert cosines.map_response.array()[number] == pytest.approx(np.mean(ratios), abs=1e-9)
    assert np.isnan(cosines.map_response.array()[0])


def test_capped_scores_are_refused():
    with pytest.raises(ValueError, match="layer 0: `cross_layer`"):
        crosslayer.diagnose(tiny("gemma2", "eager"), tokens(), cross_layer=True)
