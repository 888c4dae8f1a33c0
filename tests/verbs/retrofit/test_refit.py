"""W_o of readers, fitted with W_c or alone, against ridge regression written out."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import crosslayer
from crosslayer.core.decoder.convert import convert_weights, plain_decoder
from crosslayer.core.methods import load_method
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.streams import computes_the_same, layers_of
from tests.helpers.tiny import VOCABULARY, tiny

UNIATTN = {"name": "uniattn", "superblocks": ((1, 2), (3, 4, 5)), "compensation": "attention"}
CLA = {"name": "cla", "groups": ((1, 2), (3, 4, 5)), "compensation": "attention"}
READERS = [2, 4, 5]
CHOICE = {
    "name": "shared_choice",
    "groups": ((1, 2), (3, 4, 5)),
    "sparse_choosers": (3,),
    "tokens": 4,
    "sinks": 1,
    "window": 2,
}


def plain(method):
    return {**method, "compensation": None}


@pytest.fixture(scope="module")
def source():
    return tiny("llama", num_hidden_layers=6)


def text(sequences=24, length=12, seed=1):
    return torch.randint(3, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(seed))


def domains():
    ids = text()
    return {"a": ids[:8], "b": ids[8:16], "c": ids[16:]}


def seen(source, model, layer, ids):
    """Return heads, normed input and what the stream lacks after attention of a layer, (rows, …) each, by hooks."""
    kept, handles = {}, []

    def keep(name, of_input):
        def hook(module, args, output=None):
            kept[name] = (args[0] if of_input else output).flatten(0, 1).double()

        return hook

    ours = model.model.layers[layer]
    handles.append(ours.self_attn.o_proj.register_forward_pre_hook(keep("heads", True)))
    handles.append(ours.input_layernorm.register_forward_hook(keep("normed", False)))
    handles.append(ours.register_forward_pre_hook(lambda module, args: kept.update(stream=args[0])))
    handles.append(ours.post_attention_layernorm.register_forward_pre_hook(keep("reached", True)))
    model(ids)
    position = torch.arange(ids.shape[1])[None]
    theirs = source.model.layers[layer]
    handles.append(theirs.post_attention_layernorm.register_forward_pre_hook(keep("target", True)))
    mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    theirs(
        kept["stream"],
        attention_mask=mask.to(kept["stream"].dtype),
        position_embeddings=source.model.rotary_emb(kept["stream"], position),
    )
    for handle in handles:
        handle.remove()
    return kept["heads"], kept["normed"], kept["target"] - kept["reached"]


@pytest.mark.parametrize(
    ("method", "fit", "layers"),
    [
        (UNIATTN, "refit", READERS),
        (CLA, "refit", READERS),
        (UNIATTN, "refit-o", READERS),
        (CLA, "refit-o", READERS),
        (CHOICE, "refit-o", [2, 3, 4, 5]),
    ],
)
@torch.no_grad()
def test_against_ridge_regression_from_below(source, method, fit, layers):
    """For the penalties that were chosen: each block shrinks towards what the model had, by its own mean square."""
    given = method if fit == "refit" or method is CHOICE else plain(method)
    converted = convert(source, given, calibration=domains(), fit=fit)
    naive = convert_weights(source, [load_method(given)]).model
    assert [fitted.layer for fitted in converted.fits] == layers
    for fitted in converted.fits:
        heads, normed, error = seen(source, naive, fitted.layer, text())
        x = torch.cat([heads, normed], 1) if fit == "refit" else heads  # (rows, I)
        penalties = torch.full((heads.shape[1],), fitted.output_penalty * heads.square().sum(0).mean())
        if fit == "refit":
            penalties = torch.cat(
                [penalties, torch.full((normed.shape[1],), fitted.penalty * normed.square().sum(0).mean())]
            )
        rows = torch.cat([x, penalties.double().sqrt().diag()])  # ridge is least squares with rows with target zero
        expected = torch.cat([error, torch.zeros(len(penalties), error.shape[1], dtype=torch.float64)])
        weight = torch.linalg.lstsq(rows, expected).solution
        ours, theirs = (model.model.layers[fitted.layer] for model in (converted.model, naive))
        theirs.self_attn.o_proj.weight = torch.nn.Parameter(theirs.self_attn.o_proj.weight + weight[: heads.shape[1]].T)
        torch.testing.assert_close(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight, rtol=0, atol=1e-6)
        if fit == "refit":
            theirs.compensation.weight.copy_(weight[heads.shape[1] :].T)
            torch.testing.assert_close(ours.compensation.weight, theirs.compensation.weight, rtol=0, atol=1e-6)
        assert fitted.token_before == pytest.approx(error.square().sum(1).mean().sqrt().item(), rel=1e-6)
        rest = error - x @ weight
        assert fitted.token_after == pytest.approx(rest.square().sum(1).mean().sqrt().item(), rel=1e-6)


def test_a_layer_that_attends_to_its_own_choice_is_changed(source):
    original, model = plain_decoder(source), convert_weights(source, [load_method(CHOICE)]).model
    pairs = zip(layers_of(original), layers_of(model), strict=True)
    assert [computes_the_same(*pair) for pair in pairs] == [True, True, False, False, False, False]


def left_out(source, method, fit):
    return [fitted.left_out for fitted in convert(source, method, calibration=domains(), fit=fit).fits]


def test_both_together_leave_less_of_a_domain_left_out_than_either(source):
    both, own, output = (
        left_out(source, UNIATTN, "refit")[0],
        left_out(source, UNIATTN, "layerwise")[0],
        left_out(source, plain(UNIATTN), "refit-o")[0],
    )  # of the first fitted layer, below which the three are the same
    assert both < min(own, output)


def test_nothing_is_added_and_the_original_stays(source):
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    converted = convert(source, plain(UNIATTN), calibration=domains(), fit="refit-o", share_weights=True)
    assert converted.weights.new == [] and list(converted.refitted) == [
        f"model.layers.{layer}.self_attn.o_proj.weight" for layer in READERS
    ]
    for name, weight in source.state_dict().items():
        assert torch.equal(weight, before[name])
    changed = {name for name, weight in converted.model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == set(converted.refitted)


@pytest.mark.parametrize("fit", ["refit", "refit-o"])
def test_the_report_says_what_was_refitted_and_what_it_brings(source, fit, tmp_path):
    options = {"method": "cla", "layers": "1-2,3-5", "length": 12, "windows": 16}
    texts = {"text": text(60, seed=3), "calibration_text": text(40, seed=4)}
    refitted = crosslayer.retrofit(source, **texts, **options, compensation=fit, calibration=40)
    bare = crosslayer.retrofit(source, text=texts["text"], **options, compensation="none")
    assert len(refitted.weights.refitted) == 3 and (fit == "refit") == bool(refitted.weights.new)
    without = [refitted.row("without the fit", "KL", domain).value for domain in refitted.domains]
    assert without == pytest.approx([bare.of("KL", domain).value for domain in bare.domains])
    sentences = " ".join(refitted.sentences())
    assert "lowers" in sentences and "W_o" in sentences and ("W_c" in sentences) == (fit == "refit")
    refitted.save(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = text(2, seed=9)
    torch.testing.assert_close(model(ids).logits, refitted.model(ids).logits)


def test_a_search_refits_readers_and_adds_w_c_elsewhere(source):
    report = crosslayer.retrofit(
        source, text(120, seed=3), calibration_text=text(60, seed=4), kv_budget=0.6, compensation="refit", length=12,
        windows=16, calibration=40,
    )  # fmt: skip
    readers = {layer for layer, sources in enumerate(report.plan.keys) if sources not in (None, layer)}
    readers |= {layer for layer, sources in enumerate(report.plan.queries) if sources not in (None, layer)}
    assert len(report.weights.refitted) == len(readers)


REFUSED = {
    "drop": (
        {"method": "drop"},
        "W_o.*drop has none; use layerwise",
    ),
    "mlp": ({"method": "uniattn", "compensation": "refit", "target": "mlp"}, "`target` mlp has no effect"),
    "target": (
        {"method": "uniattn", "compensation": "refit-o", "target": "attention"},
        "`target` attention has no effect",
    ),
    "text": ({"method": "cla", "calibration": 3}, r"`calibration` must be at least \d+ \(refit fits \d+ inputs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_refitted_is_a_line(source, case):
    options, message = REFUSED[case]
    options = {"layers": "1-2,3-5" if options["method"] != "drop" else "1,3", "compensation": "refit", **options}
    with pytest.raises(ValueError, match=message):
        crosslayer.retrofit(source, text(60), calibration_text=text(40), length=12, windows=16, **options)


def test_a_norm_on_the_update_is_in_the_way():
    with pytest.raises(ValueError, match="W_o cannot.*refitted"):
        convert(tiny("gemma2"), {"name": "cla", "groups": ((0, 2),)}, calibration=domains(), fit="refit-o")


@pytest.mark.parametrize("chosen", [{"method": "cla", "layers": "0+2"}, {"kv_budget": 0.8}], ids=str)
def test_a_norm_on_the_update_is_said_before_layers_are_chosen(chosen):
    options = {"length": 12, "windows": 16, "calibration": 40}
    with pytest.raises(ValueError, match="W_o cannot.*refitted"):
        crosslayer.retrofit(tiny("gemma2"), text(60), **chosen, **options, compensation="refit")
    report = crosslayer.retrofit(tiny("gemma2"), text(120), **chosen, **options)
    assert report.calibration.fit == "layerwise"
