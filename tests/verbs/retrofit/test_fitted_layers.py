"""The search measures compensated models: the fit of each layer, the inputs of layers, and the KL that ranks."""

import pytest
import torch

from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.methods import load_method, merge_plans
from crosslayer.corpus.windows import Windows, repeating
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.measure import FittedLayers, LayerInputs, SearchObjective, _subset, lowest_changed
from crosslayer.verbs.retrofit.moments import Moments
from crosslayer.verbs.retrofit.original import Original
from tests.helpers.tiny import VOCABULARY, tiny

LENGTH = 12
DROP_3 = {"name": "drop", "attention": (3,), "compensation": "attention"}
CLA_3 = {"name": "cla", "groups": ((2, 3),), "compensation": "attention"}
UNIATTN_4 = {"name": "uniattn", "superblocks": ((1, 2), (3, 4)), "compensation": "attention"}


@pytest.fixture(scope="module")
def source():
    return tiny("llama", num_hidden_layers=6)


def text(sequences=24, seed=1):
    return torch.randint(3, VOCABULARY, (sequences, LENGTH), generator=torch.Generator().manual_seed(seed))


def domains():
    ids = text()
    return {"a": ids[:8], "b": ids[8:16], "c": ids[16:]}


def windows(ids):
    return Windows(ids, tuple(range(len(ids))), ("a",) * len(ids))


def fitted_weights(model, layer):
    weights = model.model.layers[layer].state_dict()
    return {name: weights[name] for name in weights if "compensation" in name or name == "self_attn.o_proj.weight"}


@pytest.mark.parametrize(
    ("method", "lowest"),
    [
        (DROP_3, 3),
        (CLA_3, 2),
        (UNIATTN_4, 1),
        ({"name": "drop", "mlp": (0, 4)}, 0),
        ({"name": "drop", "mlp": (5,), "attention": (4,)}, 4),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_conversion_runs_on_from_the_first_layer_that_it_changes(source, method, lowest):
    ids = text(5)
    converted = convert_weights(source, [load_method(method)]).model
    assert lowest_changed(merge_plans([load_method(method)], 6)) == lowest
    inputs = LayerInputs(convert_weights(source, []).model, ids)
    logits = torch.stack(inputs.logits(converted))
    torch.testing.assert_close(logits, converted(ids).logits, rtol=0, atol=1e-6)  # the same sums in other batches
    torch.testing.assert_close(torch.stack(inputs.logits(inputs.plain)), source(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "fit"), [(DROP_3, "layerwise"), (CLA_3, "layerwise"), (CLA_3, "refit")], ids=["drop", "cla", "refit"]
)
@torch.no_grad()
def test_a_layer_is_fitted_on_the_original_whatever_else_changes(source, method, fit, monkeypatch):
    """Where a single layer changes, the converted stream below it is the original's: so the usual fit is the oracle."""
    with monkeypatch.context() as patched:
        solve = Moments.solve
        patched.setattr(Moments, "solve", lambda self, fit, roughly: solve(self, fit, roughly=True))
        alone = convert(source, method, calibration=domains(), fit=fit).model
    fitted = FittedLayers(convert_weights(source, []).model, domains(), fit, width=128)
    dropped = (0, 1, 5) if method is not DROP_3 else (0, 1, 3, 5)
    others = {"name": "drop", "attention": dropped, "compensation": "attention"}
    methods = [others] if method is DROP_3 else [others, method]
    both = convert_weights(source, [load_method(entry) for entry in methods]).model
    fitted.apply(both)
    for name, weight in fitted_weights(alone, 3).items():
        torch.testing.assert_close(fitted_weights(both, 3)[name], weight, rtol=0, atol=1e-6)
    assert len(fitted.cache) == 4
    single = convert_weights(source, [load_method(method)]).model
    fitted.apply(single)  # nothing is fitted again
    assert len(fitted.cache) == 4
    for name, weight in fitted_weights(single, 3).items():
        assert torch.equal(fitted_weights(both, 3)[name], weight)


@torch.no_grad()
def test_the_search_ranks_by_the_kl_of_the_compensated_model(source):
    ids = text(4, seed=2)
    fitted = torch.cat(list(domains().values()))
    calibration = Windows(fitted, tuple(range(24)), ("a",) * 8 + ("b",) * 8 + ("c",) * 8)
    original = Original(source, {"search": windows(ids), "calibration": calibration})
    drop = [load_method(DROP_3)]
    measured = SearchObjective(original, "layerwise").kl(drop)
    converted = convert(source, DROP_3, calibration=domains(), fit="layerwise").model
    again = torch.cat([ids[:, :8], ids[:, 1:5]], dim=1)  # the last four are what follows the first token once more
    assert torch.equal(repeating(ids)[0], again) and repeating(ids)[1] == 8
    before, after = source(again).logits.log_softmax(-1), converted(again).logits.log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)  # (N, T)
    expected = (kl[:, :7].mean() + kl[:, 8:11].mean()) / 2  # the last token of either half has no target in it
    assert measured == pytest.approx(expected.item(), rel=1e-4)
    bare = [load_method({"name": "drop", "attention": (3,)})]
    assert SearchObjective(original).kl(bare) != pytest.approx(measured, rel=1e-2)


def test_a_fit_reads_no_more_text_than_it_needs():
    many = [torch.zeros(400, 256, dtype=torch.long)] * 3
    assert [len(ids) for ids in _subset(many, "layerwise", 576)] == [11] * 3  # 8,192 tokens are 32 windows
    assert [len(ids) for ids in _subset(many, "refit", 8192)] == [32] * 3  # two thirds of them fit 8,192 inputs
    few = [torch.zeros(4, 256, dtype=torch.long)] * 3
    assert [len(ids) for ids in _subset(few, "layerwise", 64)] == [4] * 3
