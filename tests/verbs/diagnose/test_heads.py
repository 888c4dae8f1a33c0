"""Single heads, the last token's row, the MLP's channels and a fixed prefix, against loops over eager maps."""

import json
import math
import statistics

import numpy as np
import pytest
import torch

import crosslayer
from tests.helpers.text import WORDS, tokenizer, words
from tests.helpers.tiny import tiny, tokens

K, LENGTH = 9, 24


def maps_of(model, ids):
    """Return the eager maps of every layer, (L, H, T, T)."""
    with torch.no_grad():
        return [layer[0].double() for layer in model(ids[None], output_attentions=True).attentions]


@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_the_last_row_is_that_of_the_maps(family):
    model, ids = tiny(family, "eager"), tokens()
    bins = crosslayer.diagnose(model, ids).last_row_by_position
    effect = crosslayer.intervene(model, ids, interventions=[crosslayer.waiver(K)], controls=0, scan="none")
    maps = [maps_of(model, sequence) for sequence in ids]
    for found in (bins, effect.last_row_by_position.before):
        ends = [*found.edges[1:], LENGTH]
        for layer in range(len(maps[0])):
            rows = [sum(head[-1] for head in of[layer]) / len(of[layer]) for of in maps]
            mean = sum(rows) / len(rows)
            expected = [float(mean[start:stop].mean()) for start, stop in zip(found.edges, ends, strict=True)]
            assert found.mean[layer] == pytest.approx(expected, abs=1e-6)
    assert effect.last_row_by_position.after != effect.last_row_by_position.before


@pytest.mark.parametrize(("family", "causal"), [("llama", True), ("bert", False)])
def test_attention_received_in_each_head(family, causal):
    model, ids = tiny(family, "eager"), tokens()
    effect = crosslayer.intervene(model, ids, interventions=[crosslayer.waiver(K)], controls=0, scan="none")
    maps = [maps_of(model, sequence) for sequence in ids]
    for position in effect.positions:
        k, by_head = position.position, position.attention_by_head.before.array()
        rows = [row for row in range(LENGTH) if row != k and (row > k or not causal)]
        for layer, head in np.ndindex(by_head.shape):
            received = [float(of[layer][head, row, k]) for of in maps for row in rows]
            assert by_head[layer, head] == pytest.approx(statistics.fmean(received), abs=1e-6)
        received = position.attention_received
        for when in ("before", "after"):
            heads, mean = getattr(position.attention_by_head, when).array(), getattr(received, when).array()
            assert heads.mean(axis=1) == pytest.approx(mean, abs=1e-12)
    assert effect.attention_by_head.shape == (2, *by_head.shape)
    loaded = crosslayer.Effect.from_record(json.loads(json.dumps(effect.record())))
    assert loaded == effect and loaded.page() == effect.page() and "by head" in effect.page()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss_behind": [1.0, 2.0, 3.0]}, r"must have the shape \(\)"),
        ({"attention_by_head": [0.1, 0.2]}, r"must have the shape \(3,\)"),
        ({"attention_received": [[0.1], [0.1], [0.1]]}, r"must have the shape \(3,\)"),
    ],
    ids=str,
)
def test_measures_of_other_shapes_are_refused(change, said):
    record = crosslayer.intervene(tiny("llama"), tokens(), interventions=[crosslayer.waiver(K)], controls=0).record()
    for name, mean in change.items():
        record["positions"][0][name]["before"]["mean"] = mean
    with pytest.raises(ValueError, match=said):
        crosslayer.Effect.from_record(record)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_largest_channels_by_loops(family):
    model, ids, found = tiny(family, "eager"), tokens(), []
    name = "post_feedforward_layernorm" if family == "gemma2" else "mlp"  # whose output is added to the stream
    modules = [layer.get_submodule(name) for layer in model.model.layers]
    hooks = [module.register_forward_hook(lambda _, args, out: found.append(out[0, 0])) for module in modules]
    diagnosis = crosslayer.diagnose(model, ids)
    for hook in hooks:
        hook.remove()
    layers = len(hooks)
    for layer, tops in enumerate(diagnosis.top_channels):
        outputs = [[float(value) for value in output] for output in found[layer::layers]]  # of each sequence
        ratios = []
        for channel in range(len(outputs[0])):
            of = [abs(output[channel]) / statistics.median(map(abs, output)) for output in outputs]
            ratios.append(sum(of) / len(of))
        order = sorted(range(len(ratios)), key=lambda channel: -ratios[channel])[:5]
        assert [top[0] for top in tops] == order
        for channel, value, ratio in tops:
            assert value == pytest.approx(mean_size([output[channel] for output in outputs]), rel=1e-4)
            assert ratio == pytest.approx(ratios[channel], rel=1e-4)


def mean_size(values):
    """Return the mean magnitude, with the sign of the mean: the sign may differ between sequences."""
    return math.copysign(sum(map(abs, values)) / len(values), sum(values))


def test_the_largest_activations_by_loops():
    model, ids = tiny("llama", "eager"), tokens(batch=3, length=19)
    states = model(ids, output_hidden_states=True).hidden_states
    diagnosis = crosslayer.diagnose(model, ids)
    opposite = 0
    for layer in range(len(model.model.layers)):
        sequences = states[layer].tolist()
        medians = []
        for hidden in sequences:
            sizes = sorted(abs(value) for token in hidden for value in token)
            medians.append(sizes[(len(sizes) - 1) // 2])
        for tops, start, end in ((diagnosis.top_activations, 0, 1), (diagnosis.top_activations_others, 1, 19)):
            channels = range(len(sequences[0][0]))
            largest = [[max((t[c] for t in hidden[start:end]), key=abs) for hidden in sequences] for c in channels]
            ratios = [sum(abs(v) / m for v, m in zip(of, medians, strict=True)) / len(of) for of in largest]
            assert [channel for channel, _, _ in tops[layer]] == sorted(channels, key=lambda c: -ratios[c])[:5]
            for channel, value, ratio in tops[layer]:
                opposite += min(largest[channel]) < 0 < max(largest[channel])
                assert value == pytest.approx(mean_size(largest[channel]), rel=1e-5)
                assert ratio == pytest.approx(ratios[channel], rel=1e-5)
    assert opposite  # else a mean of signed values would pass


def test_a_model_without_a_separate_mlp_has_no_channels():
    diagnosis = crosslayer.diagnose(tiny("gpt_neox", dtype=torch.float32), tokens())
    assert [bool(tops) for tops in diagnosis.top_channels] == np.isfinite(diagnosis.mlp_l1_l2).tolist()


@pytest.fixture(scope="module")
def model():
    return tiny("llama", "eager", vocab_size=len(WORDS))


def test_the_share_of_each_token_of_a_prefix(model):
    text, options = [words(0, 200), words(200, 400), words(400, 500)], {"sequences": 8, "length": LENGTH}
    diagnosis = crosslayer.diagnose(model, text, tokenizer(), prefix="w1 w2 w3", **options)
    assert diagnosis.settings.prefix == [WORDS["w1"], WORDS["w2"], WORDS["w3"]]
    share = diagnosis.prefix_share
    assert share.array().shape == (3, 3) and share.array()[:, 0] == pytest.approx(diagnosis.first_token_share)
    assert share.array()[:, 2] == pytest.approx(np.array(diagnosis.importance_by_position.mean)[:, 2])
    assert diagnosis.importance_by_position.edges[:4] == [0, 1, 2, 3]
    assert (
        set(diagnosis.settings.documents) >= {0, 1, 2} and share.over == "documents" == diagnosis.measures.entropy.over
    )
    assert "bootstrap over" in diagnosis.page() and "Attention on the" in diagnosis.page()
    loaded = crosslayer.Diagnosis.from_record(json.loads(json.dumps(diagnosis.record())))
    assert loaded == diagnosis and crosslayer.diagnose(model, text, tokenizer(), **options).prefix_share is None


def test_every_position_of_a_prefix_has_a_bin_in_an_intervention(model):
    prefix = [*range(10, 22)]
    effect = crosslayer.intervene(
        model, [words(0, 400)], tokenizer(), interventions=[crosslayer.waiver(15)], prefix=prefix, length=LENGTH,
        sequences=2, controls=0, scan="none",
    )  # fmt: skip
    assert effect.settings.prefix == prefix and effect.main.attention_received.before.over == "sequences"
    assert effect.attention_by_position.after.edges[:13] == [*range(13)]


@pytest.mark.parametrize(
    ("text", "prefix", "said"),
    [
        (tokens(), "w1", "`prefix` must be None for token ids"),
        ([words(0, 400)], [600], "token ids must be below .* to 600"),
        ([words(0, 400)], " ".join(["w1"] * LENGTH), f"length = {LENGTH} leave no text next to {LENGTH} fixed tokens"),
    ],
    ids=str,
)
def test_a_prefix_that_cannot_be_is_refused(model, text, prefix, said):
    with pytest.raises(ValueError, match=said):
        crosslayer.diagnose(model, text, tokenizer(), prefix=prefix, sequences=2, length=LENGTH)
