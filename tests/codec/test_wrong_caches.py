"""A store takes and gives only what the codec's weights computed, at the positions that it counts."""

import copy
import time

import pytest
import torch

from crosslayer.codec import format
from crosslayer.codec.codec import Codec, load_codec
from crosslayer.codec.fingerprint import SeenWeights
from crosslayer.codec.states import read_shapes
from crosslayer.codec.store import PromptStore
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.codecs import cache_of, fitted, random_ids


def opened(folder, family: str = "llama") -> tuple:
    model, codec = fitted(family)
    return copy.deepcopy(model), PromptStore(folder, Codec(codec.chain, codec.model_print), block=16)


def padded(rows: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch whose first row begins with padding, and its mask."""
    ids, mask = rows.clone(), torch.ones_like(rows)
    ids[0] = torch.cat([torch.zeros(pad, dtype=rows.dtype), rows[0, : rows.shape[1] - pad]])
    mask[0, :pad] = 0
    return ids, mask


@torch.no_grad()
def columns_cache(model, ids, mask):
    """Return the cache of a forward pass that counts columns, as transformers' models do without position_ids."""
    return model(ids, attention_mask=mask, use_cache=True)[CACHE]


@pytest.mark.parametrize("pad", [1, 7, 30])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_positions_that_count_padding_are_refused(tmp_path, family, pad):
    model, store = opened(tmp_path, family)
    ids, mask = padded(random_ids(2, 60, 7), pad)
    shifted = columns_cache(model, ids, mask)
    for refused in (lambda: store.save(ids, shifted, mask), lambda: store.codec.encode(shifted, ids, mask)):
        with pytest.raises(ValueError, match="position_ids"):
            refused()
    assert store.match(ids[0, pad:].numpy().astype("uint32")) == 0
    for seed in range(10):
        ids, mask = padded(random_ids(2, pad + 12, seed), pad)
        assert store.save(ids, cache_of(model, ids, mask), mask) > 0


def test_a_loaded_batch_is_continued_with_position_ids(tmp_path):
    model, store = opened(tmp_path)
    ids, mask = padded(random_ids(2, 60, 7), 20)
    store.save(ids[:, :50], cache_of(model, ids[:, :50], mask[:, :50]), mask[:, :50])
    cache, length = store.load(ids, model, mask)
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, length:]
    row = ids[:1, 20:]
    alone, columns = store.load(row, model)  # the same blocks, so what the codec rounds is the same
    with torch.no_grad():
        own = model(ids[:, length:], attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache})
        expected = model(row[:, columns:], use_cache=True, **{CACHE: alone})
    assert columns == length - 20
    torch.testing.assert_close(own.logits[:1], expected.logits, atol=1e-4, rtol=1e-4)  # without positions: 4.0


def test_weights_that_change_after_a_check_are_refused(tmp_path):
    ids = random_ids(1, 40, 5)

    def step(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model(ids, labels=ids).loss.backward()
        optimizer.step()

    def replace(model):
        attention = model.model.layers[1].self_attn
        attention.k_proj.weight = torch.nn.Parameter(attention.k_proj.weight * 1.5)

    def merge(model):  # as PEFT does: `_version` and address stay
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.data += 0.1

    def adapt(model):
        own = torch.nn.Linear(4, 4)
        model.model.layers[0].self_attn.k_proj.register_module("adapter", own)

    for change in (step, replace, merge, adapt):
        model, store = opened(tmp_path / change.__name__)
        store.save(ids, cache_of(model, ids), model=model)
        assert store.load(ids, model)[1] == store.load(ids, model)[1] == 39
        change(model)
        with pytest.raises(ValueError, match="different weights"):
            store.load(ids, model)
        with pytest.raises(ValueError, match="different weights"):
            store.save(ids, cache_of(model, ids), model=model)


def test_a_change_of_one_parameter_through_data_is_seen_after_some_calls(tmp_path):
    model, _ = opened(tmp_path)
    seen = SeenWeights(model)
    assert all(seen.same(model) for _ in range(5))
    model.model.layers[2].mlp.up_proj.weight.data += 1
    assert not all(seen.same(model) for _ in range(len(list(model.parameters()))))


def test_an_unchanged_model_is_checked_quickly(tmp_path):
    """Reading the weights takes longer than noticing that none changed, even for a model of 0.1 MB."""
    model, store = opened(tmp_path)
    store.codec.check(model)
    begin = time.perf_counter()
    for _ in range(20):
        store.codec.check(model)
    each = (time.perf_counter() - begin) / 20
    assert each < 0.01  # some 0.3 ms for 300 parameters; the bound leaves room for a busy machine


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number):
    model, store = opened(tmp_path)
    ids = random_ids(1, 40, 5)
    cache = cache_of(model, ids)
    cache.layers[2].keys[0, 0, 7, 3] = number
    with pytest.raises(ValueError, match="layer 2"):
        store.save(ids, cache)
    with pytest.raises(ValueError, match="layer 2"):
        store.codec.encode(cache, ids)
    assert store.load(ids, model)[1] == 0


def test_ids_that_are_no_tensor_and_padding_without_a_mask_are_refused(tmp_path):
    model, store = opened(tmp_path)
    rows = random_ids(2, 40, 5)
    ids, mask = padded(rows, 10)
    cache = cache_of(model, ids, mask)
    for wrong in ([1, 2, 3], "text", torch.zeros(1, 3)):
        with pytest.raises(ValueError, match="ids must be"):
            store.load(wrong, model)
        with pytest.raises(ValueError, match="ids must be"):
            store.save(wrong, cache)
    for refused in (lambda: store.load(ids, model), lambda: store.save(ids, cache)):
        with pytest.raises(ValueError, match="mask"):
            refused()
    text = rows.clone()
    text[:, :3] = 9  # all rows begin alike, and 9 is no padding
    assert store.save(text, cache_of(model, text)) == 80
    model.config.pad_token_id = 9
    with pytest.raises(ValueError, match="mask"):
        store.load(text, model)
    assert store.load(text, model, torch.ones_like(text))[1] == 39


def test_a_small_file_does_not_ask_for_a_large_cache():
    model, codec = fitted()
    ids = random_ids(1, 20, 5)
    data = codec.encode(cache_of(model, ids), ids)
    ((_, own),) = format.unpack_file(data)
    for pad, right in ((0, True), (20 * format.MOST_PADDING, True), (20 * format.MOST_PADDING + 1, False)):
        file = format.pack_file([(pad, own)])
        if right:
            assert codec.decode(file).get_seq_length() == pad + 20
        else:
            with pytest.raises(ValueError, match="padding must be"):
                codec.decode(file)


def test_any_flipped_bit_of_a_codec_is_noticed(tmp_path):
    _, codec = fitted()
    codec.save(tmp_path)
    path = tmp_path / "codec.safetensors"
    whole, generator = path.read_bytes(), torch.Generator().manual_seed(0)
    for at in torch.randint(len(whole), (60,), generator=generator).tolist():
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="fit"):
            load_codec(tmp_path)
    path.write_bytes(whole)
    assert load_codec(tmp_path).id == codec.id


def test_weights_with_nan_are_named_as_the_cause():
    model = copy.deepcopy(fitted()[0])
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 1 .*NaN"):
        read_shapes(model)
