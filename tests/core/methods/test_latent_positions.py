"""Keys made of cached latents have the positions of their tokens, wherever there is padding."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from crosslayer.core.latents import column_positions
from crosslayer.core.methods.kv_latents import KVLatents
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import build, config_of, tokens

METHODS = [KVLatents(rank=0.25), KVLatents(bits=((4, 2, 1, 0), (8, 2, 0, 0), (2, 2, 2, 2)), groups=((0, 2),))]
LENGTH = 14
LAYOUTS = {
    "left": "00011111111111",
    "right": "11111110000000",
    "second turn": "00111100111111",
    "two gaps": "01001100110101",
    "padding between two turns": "11100000001111",
    "none": "1" * LENGTH,
}


@pytest.fixture(scope="module", params=METHODS, ids=["numbers", "codes"])
def model(request):
    return build(config_of(request.param, num_hidden_layers=3))


def padded(rows, seed=0):
    """Return ids, mask and positions (B, LENGTH) of rows such as "0011"."""
    mask = torch.tensor([[int(cell) for cell in row] for row in rows])
    return tokens(len(rows), LENGTH, seed) * mask, mask, (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def in_chunks(model, ids, mask, positions, ends, cache):
    """Run padded ids through a cache; return logits (B, T, V)."""
    logits, start = [], 0
    for end in ends:
        named = {"position_ids": None if positions is None else positions[:, start:end], CACHE: cache}
        logits.append(model(ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **named).logits)
        start = end
    return torch.cat(logits, 1)


def check_rows(logits, model, ids, mask):
    """Compare the logits of each row with those of its tokens alone."""
    for row, keep in enumerate(mask.bool()):
        with torch.no_grad():
            alone = model(ids[row : row + 1, keep], use_cache=False).logits[0]
        assert (logits[row, keep] - alone).abs().max() < 1e-6, (row, keep)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("ends", [[LENGTH], [7, LENGTH], [3, 8, 9, 13, LENGTH], list(range(1, LENGTH + 1))], ids=str)
def test_layouts(model, ends, static):
    ids, mask, positions = padded(LAYOUTS.values())
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 3) if static else DynamicCache(config=model.config)
    check_rows(in_chunks(model, ids, mask, positions, ends, cache), model, ids, mask)


rows = st.text("01", min_size=LENGTH, max_size=LENGTH).filter(lambda row: "1" in row)


@settings(max_examples=15)
@given(st.lists(rows, min_size=1, max_size=3), st.sets(st.integers(1, LENGTH - 1)), st.integers(0, 99))
@example(["11110000000001", "00001111111111"], {4, 13}, 0)
def test_any_layout(layout, cuts, seed):
    ids, mask, positions = padded(layout, seed)
    model = build(config_of(METHODS[seed % 2], num_hidden_layers=3))
    cache = DynamicCache(config=model.config)
    check_rows(in_chunks(model, ids, mask, positions, [*sorted(cuts), LENGTH], cache), model, ids, mask)


def test_rows_are_reordered_and_tokens_removed_between_turns(model):
    ids, mask, positions = padded(LAYOUTS.values())
    cache, order = DynamicCache(config=model.config), torch.tensor([4, 2, 2, 0, 5, 3])
    in_chunks(model, ids, mask, positions, [4, 9], cache)
    cache.reorder_cache(order)
    cache.crop(-2)
    ids, mask, positions = ids[order], mask[order], positions[order]
    named = {"position_ids": positions[:, 7:], CACHE: cache}
    with torch.no_grad():
        logits = model(ids[:, 7:], attention_mask=mask, **named).logits
        full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 7:]
    assert (logits - full)[mask[:, 7:].bool()].abs().max() < 1e-6


def test_without_ids_positions_are_columns_as_in_llama(model):
    """A model that is given no position_ids counts columns, with a cache and without."""
    ids, mask, _ = padded([LAYOUTS["second turn"], LAYOUTS["right"]])
    with torch.no_grad():
        full = model(ids, attention_mask=mask, use_cache=False).logits
    logits = in_chunks(model, ids, mask, None, [5, 9, LENGTH], DynamicCache(config=model.config))
    assert (logits - full)[mask.bool()].abs().max() < 1e-6


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}])
def test_generation_after_a_gap(model, options):
    """Rows of a batch with padding before and between their turns continue as they do alone."""
    ids, mask, _ = padded([LAYOUTS["second turn"], LAYOUTS["padding between two turns"], LAYOUTS["none"]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    together = model.generate(ids, attention_mask=mask, **options)[:, LENGTH:]
    for row, keep in enumerate(mask.bool()):
        alone = ids[row : row + 1, keep]
        continued = model.generate(alone, attention_mask=torch.ones_like(alone), **options)[0, alone.shape[1] :]
        assert torch.equal(together[row], continued), row


def test_positions_from_anywhere():
    """Without a gap any first position will do; behind one, cached positions would be a guess, and are refused."""
    mask, ids = torch.tensor([[0, 1, 1, 1, 1, 1]]), torch.tensor([[9, 10]])
    assert column_positions(ids, mask, 4, 6)[0, 1:].tolist() == [6, 7, 8, 9, 10]
    assert column_positions(ids, None, 4, 6)[0].tolist() == [5, 6, 7, 8, 9, 10]
    four = torch.zeros(1, 1, 2, 6, dtype=torch.float64).masked_fill(mask == 0, torch.finfo(torch.float64).min)
    assert column_positions(ids, four, 4, 8)[0, 1:6].tolist() == [6, 7, 8, 9, 10]
    gap = torch.tensor([[1, 1, 0, 1, 1, 1]])
    assert column_positions(torch.tensor([[3, 4]]), gap, 4, 6)[0, [0, 1, 3, 4, 5]].tolist() == [0, 1, 2, 3, 4]
    assert column_positions(torch.tensor([[4, 5]]), gap, 4, 6)[0].tolist() == [0, 1, 2, 3, 4, 5]
    for ids, mask in [([[9, 10]], gap), ([[9, 11]], None), ([[1, 2]], torch.tensor([[1, 1, 1, 0, 1, 1]]))]:
        with pytest.raises(ValueError, match="position_ids"):
            column_positions(torch.tensor(ids), mask, 4, 6)
    with pytest.raises(ValueError, match="mask"):
        column_positions(torch.tensor([[4, 5]]), object(), 4, 6)
