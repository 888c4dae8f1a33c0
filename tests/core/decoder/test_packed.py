"""Packed rows: attention document by document gives what a mask of all tokens gives, and no such mask is built."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from crosslayer.core.decoder import packed
from crosslayer.core.decoder.packed import Documents
from crosslayer.testing import tiny as contract
from crosslayer.training.attention import WITHIN_DOCUMENTS
from tests.helpers.cases import CASES, each
from tests.helpers.tiny import tokens

DOCUMENTS = ((5, 1, 6), (12,), (2, 10))  # of the rows of a batch
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS])  # (B, T)
CAPS = {name for name, (_, changes) in CASES.items() if "attn_logit_softcapping" in changes}  # which SDPA cannot
CROSS = {name for name in CASES if "cross_attention" in name or "shared_choice" in name}  # which change the mask


def loss_and_gradients(model, ids, **options):
    model.zero_grad()
    labels = ids.masked_fill(POSITIONS == 0, -100)
    loss = model(ids, position_ids=POSITIONS, labels=labels, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def masks_of(model, ids):
    """Return the masks that layers got, in a forward pass over packed rows."""
    masks, forward = [], type(model.model.layers[0]).forward

    def shown(self, *args, **kwargs):
        masks.append(kwargs["attention_mask"])
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model.layers[0]), "forward", shown)
        model(ids, position_ids=POSITIONS, use_cache=False)
    return masks


@pytest.mark.parametrize("case", each(sorted(CASES.keys() - CAPS - CROSS)))
def test_loss_and_gradients_are_those_of_a_dense_mask(case, monkeypatch):
    monkeypatch.setattr(packed, "PIECE", 3)
    methods, changes = CASES[case]
    model, ids = contract.build(contract.config_of(methods, **changes)).train(), tokens(batch=3, length=12)
    loss, gradients = loss_and_gradients(model, ids)
    model.set_attn_implementation(WITHIN_DOCUMENTS)
    result, others = loss_and_gradients(model, ids)
    contract.close(result, loss, "loss", 1e-10)
    allowed = 1e-6 if "gemma3" in case else 1e-10  # Gemma's norms of queries and keys are in float32
    for name, gradient in gradients.items():
        contract.close(others[name], gradient, f"gradient of {name}", allowed)


@pytest.mark.parametrize("case", sorted(CROSS))
def test_what_changes_the_mask_itself_is_refused(case):
    methods, changes = CASES[case]
    model = contract.build(contract.config_of(methods, **changes))
    model.set_attn_implementation(WITHIN_DOCUMENTS)
    with pytest.raises(ValueError, match="no mask tensor"):
        loss_and_gradients(model, tokens(batch=3, length=12))


@pytest.mark.parametrize("case", ["cla", "cla, sliding windows", "attnres, linear attention", "attnres"])
def test_no_mask_of_all_tokens_is_built(case):
    methods, changes = CASES[case]
    model, ids = contract.build(contract.config_of(methods, **changes)), tokens(batch=3, length=12)
    model.set_attn_implementation(WITHIN_DOCUMENTS)
    masks = masks_of(model, ids)
    assert len(masks) == 6 and all(isinstance(mask, Documents) for mask in masks)


def test_stock_models_attend_within_documents_too():
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**shape, **heads)).double()
    ids = tokens(batch=3, length=12)
    loss, gradients = loss_and_gradients(model, ids)
    model.set_attn_implementation(WITHIN_DOCUMENTS)
    result, others = loss_and_gradients(model, ids)
    assert all(isinstance(mask, Documents) for mask in masks_of(model, ids))
    contract.close(result, loss, "loss", 1e-10)
    for name, gradient in gradients.items():
        contract.close(others[name], gradient, f"gradient of {name}", 1e-10)


@pytest.mark.parametrize("shape", [{}, {"sliding_window": 5}])
@torch.no_grad()
def test_padded_rows_and_caches_are_those_of_sdpa(shape):
    model, ids = contract.build(contract.config_of(["cla"], **shape)), tokens(batch=2, length=12)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    ways = {}
    for kind in ("sdpa", WITHIN_DOCUMENTS):
        model.set_attn_implementation(kind)
        ways[kind] = [
            model(ids, attention_mask=padding).logits[padding.bool()],
            model(ids, use_cache=False).logits,
            contract.steps(model, ids, [7, 1, 4])[0],
        ]
    for result, expected in zip(ways[WITHIN_DOCUMENTS], ways["sdpa"], strict=True):
        contract.close(result, expected, "logits", 1e-10)


@pytest.mark.parametrize("case", ["linear attention", "attnres, linear attention"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", WITHIN_DOCUMENTS])
@torch.no_grad()
def test_linear_attention_keeps_no_state_over_borders(case, attention):
    methods, changes = CASES[case]
    model, ids = contract.build(contract.config_of(methods, **changes)), tokens(batch=3, length=12)
    model.set_attn_implementation(attention)
    logits = model(ids, position_ids=POSITIONS, use_cache=False).logits
    for row, lengths in enumerate(DOCUMENTS):
        alone = [model(piece[None], use_cache=False).logits[0] for piece in ids[row].split(lengths)]
        contract.close(logits[row], torch.cat(alone), f"row {row}", contract.tolerance(model.config))
