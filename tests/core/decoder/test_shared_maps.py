"""Eager attention builds softmax maps, and layers that share one use the source's; the result is that of computing it.

The float32 softmax of transformers' eager attention is replaced by one in float64, so that runs can be compared.
"""

import pytest
import torch

from crosslayer.core.decoder import attention
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import build, close, config_of, tokens, tolerance
from tests.helpers.cases import CASES
from tests.helpers.eager import use_float64_softmax
from tests.helpers.live_bytes import LiveBytes

SHARED = {  # by case: how many of 6 layers compute a map
    "uniattn, two blocks": 4,
    "uniattn heads": 4,
    "uniattn + drop of readers": 4,
    "uniattn + resformer, gemma2": 4,
    "svformer all, every two": 3,
    "uniattn, sliding windows": 4,
    "cla": 6,
    "llama": 6,
}
CAPPED = {"attn_logit_softcapping": 3.0}


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch):
    use_float64_softmax(monkeypatch)


@pytest.fixture
def maps(monkeypatch):
    """The shapes of the maps that were built, in order."""
    built, eager = [], attention.eager_attention_forward

    def counted(*args, **kwargs):
        out, weights = eager(*args, **kwargs)
        built.append(tuple(weights.shape))
        return out, weights

    monkeypatch.setattr(attention, "eager_attention_forward", counted)
    return built


def eager(case, **changes):
    methods, shape = CASES[case]
    model = build(config_of(methods, **{**shape, **changes}))
    model.set_attn_implementation("eager")
    return model


def computing_all(model):
    """Let no layer hand over its map."""
    for layer in model.model.layers:
        if layer.self_attn is not None:
            layer.self_attn.shares_map = False
    return model


@pytest.mark.parametrize("case", SHARED)
def test_as_many_maps_as_sources(case, maps):
    model, ids = eager(case), tokens(length=9)
    with torch.no_grad():
        result = model(ids, use_cache=False).logits
    assert maps == [(2, 4, 9, 9)] * SHARED[case]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        close(result, model(ids, use_cache=False).logits, case, tolerance(model.config))


@pytest.mark.parametrize("changes", [{}, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("case", ["uniattn, two blocks", "uniattn, sliding windows"])
def test_decoding_with_padding_and_a_cache(case, changes, maps):
    ids = tokens(length=12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    results = []
    for model in (eager(case, **changes), computing_all(eager(case, **changes))):
        with torch.no_grad():
            cache = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True)[CACHE]
            results.append(model(ids[:, 8:], attention_mask=mask, **{CACHE: cache}).logits)
    assert [shape[:3] for shape in maps] == [(2, 4, 8)] * 4 + [(2, 4, 4)] * 4 + [(2, 4, 8)] * 6 + [(2, 4, 4)] * 6
    close(*results, case)


def test_gradients():
    gradients = []
    for model in (eager("uniattn, two blocks"), computing_all(eager("uniattn, two blocks"))):
        model.train()
        model(tokens(length=9), labels=tokens(length=9)).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    shared, computed = gradients
    assert shared.keys() == computed.keys()
    for name, gradient in shared.items():
        close(gradient, computed[name], name)


def test_dropout_differs_from_layer_to_layer(maps):
    model = eager("uniattn, two blocks", attention_dropout=0.5).train()
    model(tokens(length=9))
    assert len(maps) == 6


@pytest.mark.parametrize("case", ["cla", "cross_attention", "shared_choice", "yoco", "resformer"])
def test_other_ways_to_share_share_no_map(case):
    plan = config_of(CASES[case][0]).plan
    assert not any(attention.find_map_sources(plan))


def test_maps_live_only_until_their_last_reader():
    """16 layers in pairs: two maps at a time, not eight."""
    peaks = []
    for methods in (
        [],
        [{"name": "uniattn", "superblocks": [[i, i + 1] for i in range(0, 16, 2)], "compensation": None}],
    ):
        model = build(config_of(methods, num_hidden_layers=16, max_position_embeddings=512)).float().eval()
        model.set_attn_implementation("eager")
        ids = tokens(length=384)
        with torch.no_grad(), LiveBytes() as live:
            model(ids, use_cache=False, logits_to_keep=1)
        peaks.append(live.peak)
    assert peaks[1] <= 1.8 * peaks[0], peaks
