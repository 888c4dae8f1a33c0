"""Interventions against the isolation theorem, decoding, padding, and exact restoration."""

import json

import pytest
import torch

from crosslayer.core.transformers_versions import CACHE
from crosslayer.probe.intercept import visited
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.intervene.kinds import (
    Ablate,
    Forbid,
    PositionSwap,
    ScaleValues,
    TokenSwap,
    Waiver,
    intervening,
    load_intervention,
    to_entry,
    waiver,
)
from tests.helpers.tiny import tiny, tokens

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "gpt2")
K = 7


def states(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, output_hidden_states=True, use_cache=False, **inputs).hidden_states


def exact(model):
    """Replace the RMS norms, which compute in float32 whatever the dtype, by torch's, which keep float64."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if not type(norm).__name__.endswith("RMSNorm"):
                continue
            gemma, eps = "Gemma" in type(norm).__name__, getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            own = torch.nn.RMSNorm(norm.weight.shape[0], eps, dtype=torch.float64)
            own.weight.data = norm.weight.data + (1 if gemma else 0)
            setattr(parent, name, own)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_isolated_token_is_the_token_alone_at_every_layer(family, implementation):
    if family == "gemma2" and implementation == "sdpa":
        pytest.skip("SDPA cannot cap")
    model, ids = exact(tiny(family, implementation)), tokens()
    before = states(model, ids)
    with intervening(model, waiver(K)):
        isolated = states(model, ids)
    alone = states(model, ids[:, K : K + 1], position_ids=torch.tensor([[K]]))
    for one, two, three in zip(isolated, alone, before, strict=True):
        assert (one[:, K] - two[:, 0]).abs().max() < 1e-12
        assert (one[:, :K] - three[:, :K]).abs().max() < 1e-12
    assert (isolated[-1][:, K:] - before[-1][:, K:]).abs().max() > 1e-3
    assert all(torch.equal(one, two) for one, two in zip(states(model, ids), before, strict=True))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_isolated_token_of_an_encoder_is_the_token_alone(implementation):
    model, ids = tiny("bert", implementation), tokens()
    with intervening(model, waiver(K)):
        isolated = states(model, ids)
    alone = states(model, ids[:, K : K + 1], position_ids=torch.tensor([[K]]))
    for one, two in zip(isolated, alone, strict=True):
        assert (one[:, K] - two[:, 0]).abs().max() < 1e-12


@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_eager_and_sdpa_attention_agree(family):
    found = []
    for implementation in ("eager", "sdpa"):
        model, ids = tiny(family, implementation, torch.float32), tokens()
        with intervening(model, waiver(K), Forbid((0, 4)), ScaleValues((0, 5), 0.25)):
            found.append(states(model, ids)[-1])
    assert (found[0] - found[1]).abs().max() < 1e-4  # states are of order 10, in float32


EACH = [
    waiver(K, 3),
    Waiver((K,), (1, 2)),
    Forbid((0, 4)),
    ScaleValues((0, 5), 0.25),
    TokenSwap(0, "bos"),
    TokenSwap(6, "random", 3),
    Ablate(1, 5),
]


@pytest.mark.parametrize("one", EACH, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_decoding_with_a_cache_is_the_full_pass(family, one):
    model, ids = tiny(family), tokens(length=16)
    with torch.no_grad(), intervening(model, one):
        full = model(ids, use_cache=False).logits
        cache, steps = None, []
        for part in (ids[:, :5], *ids[:, 5:].split(1, dim=1)):
            out = model(part, **{CACHE: cache}, use_cache=True)
            cache = getattr(out, CACHE)
            steps.append(out.logits)
    assert (torch.cat(steps, dim=1) - full).abs().max() < 1e-9
    with torch.no_grad():
        assert (model(ids, use_cache=False).logits - full).abs().max() > 1e-4


@pytest.mark.parametrize("one", EACH, ids=str)
def test_decoding_with_chosen_tokens_is_the_full_pass_in_one_call_a_layer(one):
    """Unwatched, chosen keys are gathered for a new token, and a prompt runs in blocks of 256 rows."""
    choice = {"name": "shared_choice", "groups": ((0,), (1, 2), (3, 4, 5)), "tokens": 8, "sinks": 1, "window": 2}
    model, ids = build(config_of({**choice, "sparse_choosers": (0, 3)})), tokens(batch=1, length=300)
    with torch.no_grad(), intervening(model, one):
        full = model(ids, use_cache=False).logits
        start = model(ids[:, :290], use_cache=True)
        cache, steps = start[CACHE], [start.logits]
        for part in ids[:, 290:].split(1, dim=1):
            steps.append(model(part, **{CACHE: cache}, use_cache=True).logits)
    assert (torch.cat(steps, dim=1) - full).abs().max() < 1e-9
    calls = []
    with torch.no_grad(), visited(model, calls.append):
        watched = model(ids, use_cache=False).logits
    assert [call.layer for call in calls] == list(range(6))
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
    assert (plain - watched).abs().max() < 1e-9 and (plain - full).abs().max() > 1e-4


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("one", [*EACH, Ablate(1, 5, "mean")], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_positions_do_not_count_left_padding(family, one, cache):
    model, ids = tiny(family), tokens(batch=1, length=12)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 12, dtype=torch.long)], dim=1)
    both, masks = torch.cat([padded, tokens(batch=1, length=16, seed=5)]), torch.cat([mask, torch.ones_like(mask)])
    positions = (masks.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), intervening(model, one):
        single = model(ids, use_cache=False).logits[0]
        batch = model(both, attention_mask=masks, position_ids=positions, use_cache=False).logits[0, 4:]
        if one == Ablate(1, 5, "mean"):
            assert (single - batch).abs().max() < 1e-9
            return  # the mean of other new tokens is not for decoding
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        found = [model.generate(i, attention_mask=m, cache_implementation=cache, **options)
                 for i, m in ((ids, torch.ones_like(ids)), (both, masks))]  # fmt: skip
    assert (single - batch).abs().max() < 1e-9
    assert torch.equal(*(out.sequences[0, -4:] for out in found))
    for alone, together in zip(found[0].logits, found[1].logits, strict=True):
        assert (alone[0] - together[0]).abs().max() < 1e-5  # generate() hands out float32


def test_padding_on_the_right_is_no_token():
    model, ids = tiny("llama"), tokens(batch=2, length=12)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad(), intervening(model, waiver(8)):
        found = model(ids, attention_mask=mask, use_cache=False).logits
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, use_cache=False).logits
    assert (found[0] - plain[0]).abs().max() > 1e-3 and torch.equal(found[1, :6], plain[1, :6])
    with (
        pytest.raises(ValueError, match="position 8"),
        intervening(model, waiver(8)),
        torch.no_grad(),
    ):
        model(ids[1:], attention_mask=mask[1:], use_cache=False)


def test_beams_with_and_without_a_cache_agree():
    model, ids = tiny("llama"), tokens(batch=2, length=12)
    with torch.no_grad(), intervening(model, waiver(K), Forbid((0,))):
        options = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False}
        found = [model.generate(ids, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*found)


def test_inputs_by_position_are_read_too():
    body, ids = tiny("llama").model, tokens(batch=1, length=12)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(16) >= 4).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), intervening(body, waiver(5)):
        named = body(padded, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
        ordered = body(padded, mask, positions, use_cache=False).last_hidden_state
    assert torch.equal(named, ordered)


def test_a_forbidden_column_gets_nothing_and_a_scaled_value_is_scaled():
    model, ids = tiny("llama", "eager"), tokens()
    with torch.no_grad(), intervening(model, Forbid((4,))):
        maps = model(ids, output_attentions=True, use_cache=False).attentions
    assert len(maps) == 3
    for one in maps:
        column = one[:, :, :, 4].clone()
        assert column[:, :, 4].min() > 0
        column[:, :, 4] = 0
        assert column.abs().max() == 0
    with torch.no_grad(), intervening(model, ScaleValues(tuple(range(24)), 0.0)):
        quiet = model(ids, use_cache=False).logits
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        assert (model(ids, use_cache=False).logits - quiet).abs().max() < 1e-9


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "opt"])
def test_position_swaps_reach_the_right_row(family):
    """Swapping in the row of q equals running with the position id of q there, where the model takes position ids."""
    model, ids = tiny(family), tokens(length=10)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    before = model(ids).last_hidden_state if family in ("bert", "roberta") else model(ids).logits
    with torch.no_grad(), intervening(model, PositionSwap(4, 8)):
        swapped = model(ids)
    found = swapped.last_hidden_state if family in ("bert", "roberta") else swapped.logits
    assert (found - before).abs().max() > 1e-4
    positions = torch.arange(10)[None] + (1 if family == "roberta" else 0)  # row 0 of RoBERTa is padding here
    positions[0, 4] += 4
    out = model(ids, position_ids=positions)
    expected = out.last_hidden_state if family in ("bert", "roberta") else out.logits
    assert (found - expected).abs().max() < 1e-10
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())


def test_two_position_swaps_swap():
    model, ids = tiny("gpt2"), tokens(length=10)
    positions = torch.arange(10)[None].clone()
    positions[0, 3], positions[0, 5] = 5, 3
    with torch.no_grad(), intervening(model, PositionSwap(3, 5), PositionSwap(5, 3)):
        found = model(ids).logits
    assert (found - model(ids, position_ids=positions).logits).abs().max() < 1e-10


def test_an_ablation_shows_in_collected_hidden_states():
    model, ids = tiny("llama"), tokens()
    states(model, ids)  # transformers registers its collectors now
    with intervening(model, Ablate(0, 5)):
        assert states(model, ids)[1][:, 5].abs().max() == 0


def test_everything_composes_and_is_restored_after_an_exception():
    model, ids = tiny("gpt2"), tokens()
    states(model, ids)  # transformers adds hooks of its own on the first such call
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    before, weights = states(model, ids), {name: w.clone() for name, w in model.state_dict().items()}
    everything = (
        waiver(7),
        Forbid((0,)),
        ScaleValues((1,), 2.0),
        PositionSwap(2, 9),
        TokenSwap(3, 5),
        Ablate(0, 4, "mean"),
    )
    with intervening(model, *everything):
        assert (states(model, ids)[-1] - before[-1]).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="inside"), intervening(model, *everything):
        raise RuntimeError("inside")
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert all(torch.equal(one, two) for one, two in zip(states(model, ids), before, strict=True))
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks


@pytest.mark.parametrize("one", [*EACH, PositionSwap(1, 2)], ids=str)
def test_round_trip_through_json(one):
    assert load_intervention(json.loads(json.dumps(to_entry(one)))) == one


def test_one_position_needs_no_tuple():
    assert Forbid(3).positions == (3,) and ScaleValues(0, 0.5).positions == (0,)


def test_the_first_token_of_a_causal_model_is_alone_already():
    ids = tokens()
    for implementation in ("sdpa", "eager"):
        model = tiny("llama", implementation)
        with (
            pytest.raises(ValueError, match="position 0"),
            intervening(model, waiver(0, 5)),
        ):
            states(model, ids)
    encoder = tiny("bert")
    with intervening(encoder, waiver(0)):
        isolated = states(encoder, ids)
    assert (isolated[-1][:, 0] - states(encoder, ids[:, :1])[-1][:, 0]).abs().max() < 1e-12


def test_bad_interventions_are_one_clear_line():
    model, ids = tiny("llama"), tokens()
    for one, position in ((waiver(99), 99), (waiver(7, 99), 99), (Forbid((30,)), 30), (TokenSwap(24, 3), 24)):
        text = f"no sequence had a token at position {position}"
        with pytest.raises(ValueError, match=text), intervening(model, one):
            states(model, ids)
    gpt2 = tiny("gpt2")
    with (
        pytest.raises(ValueError, match="position 40"),
        intervening(gpt2, PositionSwap(40, 2)),
    ):
        states(gpt2, ids)
    with pytest.raises(ValueError, match="row already"), intervening(gpt2, PositionSwap(4, 4)):
        pass
    with pytest.raises(ValueError, match="positions.0.*0"):
        waiver(-1)
    with pytest.raises(ValueError, match="waiver: layers"):
        waiver(1, layers=[])
    hybrid = tiny("qwen3_next")
    mixing = r"layers \[0, 1\] mix tokens without softmax attention"
    with pytest.raises(ValueError, match=mixing), intervening(hybrid, waiver(3)):
        pass
    without = r"layer 0 has no softmax attention, only layers \[2\] do"
    with pytest.raises(ValueError, match=without), intervening(hybrid, waiver(3, layers=[0])):
        pass
    with (
        pytest.raises(ValueError, match="layer 3.*layers 0.*2"),
        intervening(model, waiver(1, layers=[3])),
    ):
        pass
    with (
        pytest.raises(ValueError, match="LlamaForCausalLM"),
        intervening(model, PositionSwap(0, 1)),
    ):
        pass
    with (
        pytest.raises(ValueError, match="position 64"),
        intervening(tiny("gpt2"), PositionSwap(64, 1)),
    ):
        pass
    model.config._attn_implementation_internal = "flash_attention_2"
    with (
        pytest.raises(ValueError, match="flash_attention_2"),
        intervening(model, waiver(1)),
    ):
        pass


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "waver"}, "must be one of waiver.* got 'waver'"),
        ({"kind": ["waiver"], "positions": [5]}, r"must be one of waiver.* got \['waiver'\]"),
        ({"kind": "waiver", "positions": [True]}, r"waiver: positions\.0: must be a number, got true"),
        ({"kind": "ablate", "layer": True, "position": 3}, "ablate: layer: must be a number, got true"),
        ({"kind": "waiver", "positions": [1.5]}, r"positions\.0 must be a valid integer, got a number with a fraction"),
        ({"kind": "forbid", "positions": [-1]}, r"forbid: positions\.0 must be greater than or equal to 0"),
        ({"kind": "token_swap", "position": 0, "token": "<s>"}, "must be an id, bos or random, got '<s>'"),
        ({"kind": "waiver", "positions": []}, "waiver: positions: .*at least 1"),
        ({"kind": "waiver", "positions": [1], "layer": 3}, "waiver: layer: Unexpected keyword"),
        ({"kind": "waiver", "positions": [5], 7: 8}, "waiver: 7: Unexpected keyword"),
        ({"kind": "scale_values", "positions": [5], "factor": float("nan")}, "factor must be a finite number"),
    ],
)
def test_a_wrong_entry_of_a_record_is_named(entry, message):
    with pytest.raises(ValueError, match=message):
        load_intervention(entry)


def test_keys_that_are_not_the_tokens_own_are_refused():
    """A token of two layers in a row has two keys; an edit of the mask would reach one of them."""
    model, ids = build(config_of("cross_attention")), torch.arange(3, 15)[None]
    refused = pytest.raises(ValueError, match="layer 1.*24 keys.*12 tokens")
    with torch.no_grad(), refused, intervening(model, waiver(5)):
        model(ids)
