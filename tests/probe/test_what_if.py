"""What a what-if takes: plans and methods that are plans; and what it refuses."""

import pytest
import torch

import crosslayer
from crosslayer.core.checkpointing import enable_checkpointing
from crosslayer.core.methods import load_method
from crosslayer.core.methods.cla import CLA
from crosslayer.core.methods.shared_choice import SharedChoice
from crosslayer.verbs.retrofit.convert import convert
from tests.helpers.shipped import shipped
from tests.helpers.tiny import tiny, tokens

DROPPED = {"name": "drop", "attention": [2]}


@pytest.mark.parametrize("methods", ["cla", CLA(), {"name": "cla"}, ["cla"], [CLA()]])
def test_methods_stand_for_their_plans(methods):
    model, ids = tiny("llama"), tokens()
    with torch.no_grad():
        with crosslayer.what_if(model, load_method("cla").plan(3)):
            expected = model(ids).logits
        with crosslayer.what_if(model, methods):
            assert torch.equal(model(ids).logits, expected)
        assert not torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("methods", ["resformer", {"name": "attnres", "block": 2}, ["cla", "resformer"]])
def test_a_method_that_mixes_is_refused_by_name(methods):
    name = "attnres" if isinstance(methods, dict) else "resformer"
    message = rf"^{name}: a what-if can share or remove states, but not mix"
    with pytest.raises(ValueError, match=message), crosslayer.what_if(tiny("llama"), methods):
        pass


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chosen_tokens_are_those_of_the_converted_model(attention):
    """The masks of a what-if give the logits of the decoder, which reads chosen rows; cached too, and with padding."""
    methods = [SharedChoice(groups=((0, 1, 2),), tokens=4, sinks=1, window=2)]
    model, ids = tiny("llama").float(), tokens(length=12)  # in float64 eager attention gives NaN for padding
    model.set_attn_implementation(attention)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    converted = convert(model, methods, share_weights=True).model
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    with torch.no_grad():
        expected, generated = converted(ids, attention_mask=mask).logits, converted.generate(ids, **options)
        plain = model(ids, attention_mask=mask).logits
        with crosslayer.what_if(model, methods):
            logits = model(ids, attention_mask=mask).logits
            assert torch.equal(model.generate(ids, **options), generated)
    kept = mask.bool()
    assert (logits - expected)[kept].abs().max() < 1e-4
    assert (plain - expected)[kept].abs().max() > 1e-3


def test_a_plan_does_not_say_how_to_choose():
    plan = SharedChoice(groups=((0, 1),)).plan(3)
    with pytest.raises(ValueError, match="the method"), crosslayer.what_if(tiny("llama"), plan):
        pass


def test_layers_with_indexers_cannot_choose():
    """They attend to chosen tokens already."""
    model = shipped("glm_moe_dsa")
    with pytest.raises(ValueError, match="chosen tokens"), crosslayer.what_if(model, SharedChoice(groups=((0, 1),))):
        pass


def test_layers_with_windows_cannot_choose():
    model = tiny("mistral", sliding_window=4)
    with pytest.raises(ValueError, match="chosen tokens"), crosslayer.what_if(model, SharedChoice(groups=((0, 1),))):
        pass


def test_a_plan_that_changes_nothing_is_refused():
    plan = load_method("resformer").plan(3)
    with pytest.raises(ValueError, match="changes nothing"), crosslayer.what_if(tiny("llama"), plan):
        pass


@pytest.mark.parametrize("methods", ["cla", DROPPED])
def test_training_with_checkpointing_is_refused(methods):
    model, ids = tiny("llama"), tokens()
    enable_checkpointing(model, {"use_reentrant": False})
    message = r"activation_checkpointing_disable\(\)"
    with pytest.raises(ValueError, match=message), crosslayer.what_if(model.train(), methods):
        pass
    with crosslayer.what_if(model.eval(), methods), torch.no_grad():  # nothing is computed twice
        model(ids)


def test_a_layer_that_is_computed_again_is_refused():
    model, ids = tiny("llama"), tokens()
    enable_checkpointing(model, {"use_reentrant": False})
    with crosslayer.what_if(model, "cla"):
        loss = model.train()(ids, labels=ids, use_cache=False).loss
        with pytest.raises(ValueError, match=r"activation_checkpointing_disable\(\)"):
            loss.backward()


def test_training_without_checkpointing():
    model, ids = tiny("llama").train(), tokens()
    with crosslayer.what_if(model, "cla"):
        model(ids, labels=ids, use_cache=False).loss.backward()
    layers = model.model.layers
    assert layers[0].self_attn.k_proj.weight.grad.any() and layers[1].self_attn.k_proj.weight.grad is None
