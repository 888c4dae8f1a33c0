"""Models with several residual streams, with attention over depth, and with attention to compressed entries."""

import json

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.probe import measures as m
from crosslayer.probe.intercept import visited
from crosslayer.probe.maps import map_sums, over_tokens
from crosslayer.probe.model import attention_layers, layer_stack
from crosslayer.probe.stream import split, streams
from crosslayer.testing import tiny as contract
from tests.helpers.shipped import SHIPPED, families, needs, shipped
from tests.helpers.tiny import tokens
from tests.verbs.diagnose.test_families import output

SEVERAL = ("gemma3n_text", "deepseek_v4", "glm5_next_text", "hy_v4", "qwen4_exp_text")
IDS = tokens(batch=1)


def watch(model) -> list:
    seen = []
    with torch.no_grad(), streams(model, seen.append):
        output(model, IDS)
    return seen


def around(model, ids) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each layer receives and returns, by hooks that know nothing of streams."""
    pairs: list = []

    def keep(_, args, kwargs, out):
        pairs.append((next(iter(args), kwargs.get("hidden_states")), out[0] if isinstance(out, tuple) else out))

    hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layer_stack(model)]
    with torch.no_grad():
        output(model, ids)
    for hook in hooks:
        hook.remove()
    return pairs


@pytest.mark.parametrize("family", families(*SHIPPED))
def test_every_layer_is_visited_and_outputs_are_bit_equal(family):
    model, ids, calls, seen = shipped(family), tokens(), [], []
    with torch.no_grad():
        plain, single = output(model, ids), output(model, IDS)
        with visited(model, calls.append):
            assert torch.equal(plain, output(model, ids))
        with visited(model, calls.append), streams(model, seen.append):
            assert torch.equal(single, output(model, IDS))
    assert [call.layer for call in calls] == attention_layers(model.config) * 2
    assert [stream.layer for stream in seen] == list(range(model.config.num_hidden_layers))


@pytest.mark.parametrize("family", SEVERAL)
def test_streams_are_those_that_layers_hand_on(family):
    model = shipped(family)
    for stream, (received, returned) in zip(watch(model), around(model, IDS), strict=True):
        assert stream.entering.shape == (4, 24, 32)
        assert torch.equal(stream.entering, split(received, 32)) and torch.equal(stream.leaving, split(returned, 32))
        assert torch.allclose(stream.before, stream.entering.mean(dim=0)) and not stream.over_depth


def test_streams_in_every_form():
    inner = torch.randn(3, 5, 4)  # (N, T, C)
    forms = [inner[:, None], inner.transpose(0, 1)[None], inner.transpose(0, 1).reshape(1, 5, 12)]
    assert all(torch.equal(split(form, 4), inner) for form in forms)
    assert torch.equal(split(inner[:1], 4), inner[:1])


@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next_text", "hy_v4", "qwen4_exp_text"])
def test_attention_writes_each_stream(family):
    """The streams behind attention are what the connection of the MLP receives."""
    model, received = shipped(family), []
    name = "mlp_hyper_connection" if family == "qwen4_exp_text" else "ffn_hc"
    hooks = [
        layer.get_submodule(name).register_forward_hook(lambda _, args, out: received.append(split(args[0], 32)))
        for layer in layer_stack(model)
    ]
    seen = watch(model)
    for hook in hooks:
        hook.remove()
    for stream, streams_between in zip(seen, received, strict=True):
        if stream.layer in attention_layers(model.config):
            assert torch.equal(stream.around_attention[1], streams_between)
        else:
            assert stream.around_attention is None


def test_what_attention_changes_where_it_writes_no_stream():
    """Gemma 3n adds attention to a prediction made out of all streams."""
    model, normed = shipped("gemma3n_text"), []
    for layer in layer_stack(model):
        for name in ("input_layernorm", "pre_feedforward_layernorm"):
            layer.get_submodule(name).register_forward_pre_hook(lambda _, args: normed.append(args[0]))
    for stream in watch(model):
        pair = normed[2 * stream.layer : 2 * stream.layer + 2]
        assert all(map(torch.equal, stream.around_attention, pair))


@pytest.mark.parametrize("family", families(*SHIPPED))
def test_the_mlp_is_the_right_one(family):
    model, expected = shipped(family), []
    for layer in layer_stack(model):
        # whose output is added, where there is one: a norm, or a convolution
        behind = getattr(layer, "post_feedforward_layernorm", None) or getattr(layer, "post_mlp_convolution", None)
        (behind or layer.mlp).register_forward_hook(lambda _, args, out: expected.append(out.reshape(-1, 32)))
    assert all(torch.equal(s.mlp_update, update) for s, update in zip(watch(model), expected, strict=True))


@needs("inkling2_text")
def test_attention_over_depth_is_what_sublayers_read():
    model, reads, finals = shipped("inkling2_text"), [], []
    for index, layer in enumerate(layer_stack(model)):
        first = "input_layernorm" if index % 2 == 0 else "q_input_layernorm"
        for name in (first, "post_attention_layernorm"):
            layer.get_submodule(name).register_forward_pre_hook(lambda _, args: reads.append(args[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: finals.append(args[0]))
    seen = watch(model)
    assert [stream.over_depth for stream in seen] == [False, True, True, True]
    for stream in seen:
        before, middle = reads[2 * stream.layer : 2 * stream.layer + 2]
        assert torch.equal(stream.entering, before) and torch.equal(stream.around_attention[1], middle)
        if stream.layer < 3:
            assert torch.equal(stream.leaving, reads[2 * stream.layer + 2])
    assert seen[-1].leaving is None and len(finals) == 1


@pytest.mark.parametrize("block", [None, 2])
def test_our_own_attention_over_depth(block):
    model = contract.build(contract.config_of([{"name": "attnres", "block": block}]))
    ids = tokens(batch=1)
    with torch.no_grad():
        reads = model(ids, output_hidden_states=True).hidden_states
        seen = []
        with streams(model, seen.append):
            model(ids)
    for stream, read, after in zip(seen, reads, reads[1:], strict=False):
        assert torch.equal(stream.entering, read)
        if stream.layer < len(seen) - 1:
            assert torch.equal(stream.leaving, after)
    assert crosslayer.diagnose(model, ids).model.over_depth


@pytest.mark.parametrize("family", families(*SHIPPED))
def test_a_diagnosis_says_what_it_measured(family):
    model = shipped(family)
    diagnosis = crosslayer.diagnose(model, tokens())
    several = family in SEVERAL
    assert diagnosis.model.streams == (4 if several else 1) and diagnosis.model.over_depth == ("inkling2" in family)
    assert any("4 residual streams" in sentence for sentence in diagnosis.sentences()) == several
    assert any("attention over" in sentence for sentence in diagnosis.sentences()) == ("inkling2" in family)
    page = diagnosis.page()
    assert ("stream 3" in page) == several and ("the streams" in page) == several
    assert (diagnosis.by_stream is not None) == several
    attended = np.isfinite(diagnosis.entropy)
    assert np.flatnonzero(attended).tolist() == attention_layers(model.config)
    assert np.isfinite(diagnosis.attention_io_similarity).tolist() == attended.tolist()
    assert crosslayer.Diagnosis.from_record(json.loads(json.dumps(diagnosis.record()))) == diagnosis


def test_measures_of_each_stream_and_of_their_mean(tmp_path):
    model = shipped("deepseek_v4")
    diagnosis = crosslayer.diagnose(model, IDS)
    diagnosis.save(tmp_path / "out")
    assert (tmp_path / "out" / "figures" / "layer_io_similarity_by_stream.svg").is_file()
    assert crosslayer.load_result(tmp_path / "out") == diagnosis
    for stream in watch(model):
        norms = [m.over_median(m.hidden_norms(single)).item() for single in stream.entering]
        assert np.allclose(diagnosis.by_stream.hidden_norm_ratio.array()[stream.layer], norms)
        mean = m.over_median(m.hidden_norms(stream.entering.mean(dim=0)))
        assert np.isclose(diagnosis.hidden_norm_ratio[stream.layer], mean)
        cosines = [m.mean_cosine(*pair).item() for pair in zip(*stream.around_attention, strict=True)]
        assert np.allclose(diagnosis.by_stream.attention_io_similarity.array()[stream.layer], cosines)


@pytest.mark.parametrize("family", families("deepseek_v4", "inkling2_text", "hy_v4", "mistral_large4_text"))
def test_maps_are_those_of_eager_attention(family):
    """Over the tokens: entries and sinks take their part of the softmax, biases and chosen tokens are in."""
    model = shipped(family)
    model.set_attn_implementation("eager")
    calls, maps = [], []
    hooks = [
        module.register_forward_hook(lambda _, args, out: maps.append(out[1]))
        for layer in layer_stack(model)
        for name, module in layer.named_children()
        if name == "self_attn"
    ]
    with torch.no_grad(), visited(model, calls.append):
        output(model, IDS)
    for hook in hooks:
        hook.remove()
    sums = map_sums([over_tokens(call) for call in calls])
    expected = torch.stack([weights[0, :, :, :24].double().mean(dim=0) for weights in maps])  # (L, T, T)
    assert torch.allclose(sums.columns, expected.sum(dim=1), atol=1e-5)
    assert torch.allclose(sums.diagonal_by_head.nanmean(dim=1), expected.diagonal(dim1=1, dim2=2), atol=1e-5)


def test_compressed_entries_are_said():
    diagnosis = crosslayer.diagnose(shipped("deepseek_v4"), tokens())
    assert diagnosis.model.masks[:2] == ["causal with further keys, window 8"] * 2
    assert diagnosis.model.masks[2] == "causal, window 8"
    assert any(
        sentence.startswith("Layers 0-1 also attend to keys that are not their tokens")
        for sentence in diagnosis.sentences()
    )


def test_interventions_refuse_compressed_entries():
    with pytest.raises(ValueError, match="layer 0.*tokens.*"):
        crosslayer.intervene(shipped("deepseek_v4"), tokens(), interventions=[crosslayer.waiver(5)])
