"""Quantized caches: against a loop over tokens, however a text is cut or padded, with sharing, beams and eviction."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import DynamicLayer

import crosslayer
from crosslayer.cache import attention, quantized
from crosslayer.cache.columns import ColumnLayer
from crosslayer.cache.kv_cache import held_bytes
from crosslayer.cache.offsets import key_offsets
from crosslayer.cache.quantizers import RANGE, pack, quantizer_of, rotation, unpack
from crosslayer.cache.running import quantized_cache, smaller_cache, stored_kinds
from crosslayer.core.transformers_versions import CACHE, EMPTY_LAYER
from crosslayer.probe.intercept import intercepted
from crosslayer.testing.tiny import TOLERANCE, build, config_of, tokens
from crosslayer.wiring.kv_bits import KvBits, groups, parse_kv_bits, stored_bytes, token_bytes
from crosslayer.wiring.read import model_plan
from tests.helpers.daily import daily
from tests.helpers.quantized import add_key_biases, shift_of
from tests.helpers.smaller_caches import EAGER, PLANS, UNIATTN, attending_with
from tests.helpers.tiny import tiny

KINDS = ("int8", "int4", "int3", "int2", "fp8")
FEW = ("int8", "int4", "fp8")  # all ways to store
OFTEN = daily(FEW, "int4")
RECENT = 5
FLOAT32 = 1e-5  # transformers computes norms and rotary tables in float32 whatever the dtype


@pytest.fixture(autouse=True)
def _blocks_of_a_few_queries(monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", 7)  # texts are short here


def test_every_float8_is_decoded_as_torch_does():
    stored = torch.arange(256).to(torch.uint8)
    numbers = stored.view(torch.float8_e4m3fn)
    stored = stored[~numbers.isnan()]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        out = torch.empty(len(stored), dtype=dtype)
        quantizer_of("fp8").decode((stored,), out)
        assert torch.equal(out, stored.view(torch.float8_e4m3fn).to(dtype))


def bits_of(kind, **options):
    return KvBits(kind, everywhere=kind, recent=RECENT, **options)


def rounded_states(kind, states):
    codec = quantizer_of(kind)
    if kind == "fp8":
        return codec.rounded(states)
    matrix = rotation(states.shape[-1], states.dtype, states.device)
    return codec.rounded(states @ matrix) @ matrix.T


def naive(kind, offsets):
    """Return an attention function that goes through the queries, over keys and values as each reads them."""

    def attend(module, query, key, value, mask, scaling=None, **_):
        groups = query.shape[1] // key.shape[1]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        states = [states.repeat_interleave(groups, 1) for states in (key, value)]
        shift = 0.0 if kind == "fp8" else shift_of(offsets[module.layer_idx], key.shape[2])
        coarse = [rounded_states(kind, key - shift) + shift, rounded_states(kind, value)]
        if kind in ("int4", "int3", "int2"):  # the first token
            coarse = [torch.cat([s[:, :, :1], c[:, :, 1:]], 2) for s, c in zip((key, value), coarse, strict=True)]
        coarse = [each.repeat_interleave(groups, 1) for each in coarse]
        rows = []
        for at in range(query.shape[2]):
            exact = max(0, at - RECENT + 1) if kind in ("int4", "int3", "int2") else at + 1
            k, v = (
                torch.cat([c[:, :, :exact], s[:, :, exact : at + 1]], 2) for s, c in zip(states, coarse, strict=True)
            )
            weights = ((query[:, :, at : at + 1] * scaling) @ k.transpose(2, 3)).softmax(-1)
            rows.append(weights @ v)
        return torch.cat(rows, 2).transpose(1, 2), None

    return attend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("qwen2", "sdpa"), ("qwen3", "sdpa")],
)
def test_a_text_is_read_as_a_loop_over_tokens_reads_it(family, implementation, kind):
    # in eager attention's float32 the loop differs by 1e-7, which may turn a code into its neighbor; not in this text
    model, ids = tiny(family, implementation), tokens(2, 24, seed=1 if implementation == "eager" else 0)
    add_key_biases(model)
    plain = model(ids, use_cache=False).logits
    with smaller_cache(model, bits=bits_of(kind)):
        ours = model(ids, use_cache=False).logits
    with attending_with(model, naive(kind, key_offsets(model))):
        expected = model(ids, use_cache=False).logits
    tolerance = EAGER if implementation == "eager" else FLOAT32 if family == "qwen3" else TOLERANCE
    assert (ours - expected).abs().max() < tolerance < 1e-4 < (ours - plain).abs().max()


@pytest.mark.parametrize("kind", OFTEN)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_cuts_make_no_difference_and_bytes_are_those_predicted(plan, kind):
    model, ids, bits = build(config_of(plan)), tokens(2, 24), bits_of(kind)
    with smaller_cache(model, bits=bits) as new_cache:
        full = model(ids, use_cache=False).logits
        for sizes in ([24], [1] * 24, [9, 1, 1, 13], [20, 4]):
            cache = new_cache()
            pieces = [model(part, **{CACHE: cache}).logits for part in ids.split(sizes, dim=1)]
            assert (torch.cat(pieces, 1) - full).abs().max() < TOLERANCE, sizes
            states, heads, size = model.config.plan.stored_states(), 2, model.config.head_dim
            assert held_bytes(cache).allocated == 2 * states * heads * stored_bytes(kind, size, 24, 8, recent=RECENT)


@pytest.mark.parametrize("text", ["8@0,4@1", "4@0,8@1", "fp8@0,4@1-5", "4@0-2,fp8@3-5", "8@2,4@3", "4@2,8@3"])
@pytest.mark.parametrize("plan", daily(["svformer", UNIATTN, "cla"], UNIATTN), ids=str)
def test_keys_and_values_of_a_layer_may_have_types_of_their_own(plan, text):
    """Both keep the latest tokens exact, one of them does, or none."""
    model, ids = build(config_of(plan)), tokens(2, 24)
    stores = [model.config.plan.stored(layer) for layer in range(6)]
    bits = replace(parse_kv_bits(text), recent=RECENT)
    if not any(bits.at(layer) for layer in range(6) if stores[layer]):
        return
    with smaller_cache(model, bits=bits) as new_cache:
        full = model(ids, use_cache=False).logits
        for sizes in ([1] * 24, [9, 1, 14]):
            cache = new_cache()
            pieces = [model(part, **{CACHE: cache}).logits for part in ids.split(sizes, dim=1)]
            assert (torch.cat(pieces, 1) - full).abs().max() < TOLERANCE, sizes


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(("4@0-2,2@3-5", "8@1,3@2-4", "fp8@0,4@5")))
def test_layers_may_differ_however_a_text_is_cut(sizes, text):
    model, bits = build(config_of("svformer")), parse_kv_bits(text)
    bits = KvBits(bits.text, bits.everywhere, bits.layers[:1] + (None,) * 5, recent=RECENT) if "@5" in text else bits
    ids = tokens(1, sum(sizes))
    with smaller_cache(model, bits=bits) as new_cache:
        cache = new_cache()
        pieces = [model(part, **{CACHE: cache}).logits for part in ids.split(sizes, dim=1)]
        assert (torch.cat(pieces, 1) - model(ids, use_cache=False).logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma3_text", "gemma3n_text"])
def test_stock_models_read_texts_in_pieces_as_whole(family, kind):
    """Gemma 3's layers with a window stay as they are; Gemma 3n's upper layers read those of lower ones."""
    shape = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    more = {"num_kv_shared_layers": 2, "laurel_rank": 4, "vocab_size_per_layer_input": 64} if "3n" in family else {}
    more |= {"hidden_size_per_layer_input": 4} if "3n" in family else {}
    model = tiny(family, **(shape | {"sliding_window": 8} | more if "gemma" in family else {}))
    ids = tokens(1, 24)
    with smaller_cache(model, bits=bits_of(kind)) as new_cache:
        cache = new_cache()
        pieces = [model(part, **{CACHE: cache}).logits for part in ids.split([9, 1, 1, 13], dim=1)]
        full = model(ids, use_cache=False).logits
    assert (torch.cat(pieces, 1) - full).abs().max() < FLOAT32
    assert (full - model(ids, use_cache=False).logits).abs().max() > FLOAT32


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("plan", ["svformer", "cla"])
def test_beams_and_padded_rows_are_those_of_single_texts(plan, kind):
    model, ids = build(config_of(plan)), tokens(2, 12)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "length_penalty": 0.0, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with smaller_cache(model, bits=bits_of(kind)) as new_cache:
        out = model.generate(
            ids,
            attention_mask=mask,
            **{CACHE: new_cache()},
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        for row, pad in ((0, 4), (1, 0)):
            sequence = out.sequences[row : row + 1, pad:]
            logits = model(sequence, use_cache=False).logits[:, 11 - pad : -1]
            score = logits.log_softmax(-1).gather(-1, sequence[:, 12 - pad :, None]).sum()
            assert (score - out.sequences_scores[row]).abs() < 1e-5  # generate keeps its scores in float32


@pytest.mark.parametrize("kind", OFTEN)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("pads", [(3, 20, 0), (20, 0, 5), (0, 7, 1)])
def test_padding_anywhere_makes_no_difference(pads, family, kind):
    """Two turns of a text with padding before, between and behind them, beside another text with none."""
    model, text = tiny(family), tokens(2, 24)
    add_key_biases(model)
    first, between, last = pads
    columns = first + 12 + between + 12 + last
    ids, mask = torch.zeros(2, columns, dtype=torch.long), torch.zeros(2, columns, dtype=torch.long)
    ids[1], mask[1] = tokens(1, columns, seed=3)[0], 1
    for start, part in ((first, text[0, :12]), (first + 12 + between, text[0, 12:])):
        ids[0, start : start + 12], mask[0, start : start + 12] = part, 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with smaller_cache(model, bits=bits_of(kind)) as new_cache:
        alone = model(text[:1], use_cache=False).logits[0]
        beside = model(ids[1:], use_cache=False).logits[0]
        scored = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for sizes in ([columns], [first + 12, columns - first - 12], [1] * columns):
            cache, pieces, end = new_cache(), [], 0
            for size in sizes:
                start, end = end, end + size
                options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], CACHE: cache}
                pieces.append(model(ids[:, start:end], **options).logits)
            for logits in (torch.cat(pieces, 1), scored):
                assert (logits[0, mask[0].bool()] - alone).abs().max() < FLOAT32, sizes
                assert (logits[1] - beside).abs().max() < FLOAT32, sizes


@pytest.mark.parametrize("kind", OFTEN)
@pytest.mark.parametrize("spec", ["h2o:0.4", "streaming:32"])
@pytest.mark.parametrize("plan", [None, "cla", UNIATTN], ids=str)
def test_what_is_kept_under_eviction_is_quantized(plan, spec, kind):
    model, ids, bits = build(config_of(plan)), tokens(2, 50), bits_of(kind)
    with smaller_cache(model, spec, bits) as new_cache:
        full = model(ids, use_cache=False).logits
        for sizes in ([50], [20, *[1] * 30], [33, 17]):
            cache = new_cache()
            pieces = [model(part, **{CACHE: cache}).logits for part in ids.split(sizes, dim=1)]
            assert (torch.cat(pieces, 1) - full).abs().max() < TOLERANCE, sizes
    states, size = model.config.plan.stored_states(), model.config.head_dim
    columns = cache.layers[0].columns[0].memory[0].shape[2]
    assert columns < 50
    assert held_bytes(cache).allocated - cache.overhead_bytes() == 2 * states * 2 * columns * token_bytes(kind, size)
    with smaller_cache(model, spec):
        assert (model(ids, use_cache=False).logits - full).abs().max() > 1e-4


@pytest.mark.parametrize("kind", FEW)
def test_plan_says_what_is_allocated(kind):
    bits = KvBits(kind, everywhere=kind)
    for model in (build(config_of("svformer")), build(config_of(UNIATTN)), tiny("llama")):
        with smaller_cache(model, bits=bits) as new_cache:
            for sizes in ([50, 1], [60, *[1] * 4], [1]):
                cache, length = new_cache(), sum(sizes)
                for part in tokens(1, length).split(sizes, dim=1):
                    model(part, **{CACHE: cache})
                planned = crosslayer.plan(model, length=length, dtype="float64", kv_dtype=kind).stored_bytes
                assert planned == held_bytes(cache).allocated, (type(model), sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("item", [2, 4])
def test_no_text_takes_more_bytes_than_the_plain_cache(kind, item):
    for size in (16, 64, 80, 128):
        for length in range(1, 300):
            assert stored_bytes(kind, size, length, item) <= length * size * item, (size, length)


@pytest.mark.parametrize("bits", ["8", "4", "fp8@0-1"])
def test_verify_checks_a_quantized_cache(bits):
    checks = crosslayer.verify(build(config_of(UNIATTN)), kv_bits=bits).applicable
    assert [(check.status, check.dtype) for check in checks] == [("PASS", "float64")] * 5
    with pytest.raises(ValueError, match="leave `dtypes` out"):
        crosslayer.verify(build(config_of(None)), kv_bits=bits, dtypes=["float32"])


def test_verify_finds_a_cache_that_rounds_what_should_be_exact(monkeypatch):
    monkeypatch.setattr(quantized, "keeps_recent", lambda kind: False)
    failed = {check.name for check in crosslayer.verify(build(config_of(None)), kv_bits="4").failed}
    assert {"cache, token by token", "left-padded batch", "cache bytes"} <= failed


def test_a_cache_by_itself_generates():
    model, ids = build(config_of("cla")), tokens(1, 30)
    new = model.generate(ids, **{CACHE: quantized_cache(model, 8)}, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert new.shape == (1, 34)
    cache = quantized_cache(model, "8@0-1,fp8@2-3")
    model(ids, **{CACHE: cache})
    assert [type(layer) for layer in cache.layers[::2]] == [ColumnLayer, ColumnLayer, DynamicLayer]
    assert {type(layer) for layer in cache.layers[1::2]} == {EMPTY_LAYER}
    assert cache.get_seq_length() == 30
    cache.reset()
    assert held_bytes(cache).allocated == 0


def test_a_change_of_a_call_that_is_divided_already_is_refused():
    model, ids = tiny("llama"), tokens(1, 24)
    with smaller_cache(model, bits=bits_of("int4")):
        with intercepted(model, lambda call: call):
            model(ids, use_cache=False)
        with intercepted(model, replace), pytest.raises(ValueError, match="divided"):
            model(ids, use_cache=False)


@pytest.mark.parametrize("size", [8, 16, 24, 64])  # bytes that can be viewed as integers of 8, 16, 32 and 64 bits
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_packed_codes_fill_whole_bytes_and_come_back(bits, size):
    codes = torch.randint(0, 2**bits, (2, 3, 5, size), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[-1] == size * bits // 8 and torch.equal(unpack(packed, bits), codes)
    assert torch.equal(unpack(packed[1:, :, 1:], bits), codes[1:, :, 1:])  # a view, as a cache reads it


@pytest.mark.parametrize("size", [3, 8, 64, 80, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_rounded_by_itself_within_half_a_step(size, kind):
    states = torch.randn(2, 2, 4, size, dtype=torch.float64) * 10
    matrix = rotation(size, torch.float64, torch.device("cpu"))
    assert (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-12
    codec = quantizer_of(kind)
    stored = codec.encode(states)
    assert sum(one[0, 0, 0].nbytes for one in stored) == token_bytes(kind, size)
    back, alone = codec.rounded(states), codec.rounded(states[1:, :, 2:3])
    assert (alone - back[1:, :, 2:3]).abs().max() < 1e-12
    if kind == "fp8":  # half of the last of three bits of a mantissa, or of the smallest number
        assert ((back - states).abs() <= states.abs() / 16 + 2.0**-10).all()
        return
    covered = RANGE[int(kind[3:])]
    grouped = states.unflatten(-1, (groups(size), -1))
    width = grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)
    most = (covered / (2 ** int(kind[3:]) - 1) + 1 - covered) / 2 * width  # half a step, and what is clipped
    gap = (back - states).unflatten(-1, (groups(size), -1))
    assert (gap.abs() <= most * 1.01).all()  # scales are rounded to float16


@pytest.mark.parametrize("kind", ["int8", "int4", "int3", "int2"])
def test_scales_hold_keys_beyond_the_range_of_float16(kind):
    """Each group by itself, at no more bytes; the others are stored as without such keys."""
    states = torch.randn(1, 1, 6, 64, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1.0, 1e3, 1e5, 1e6, 1e8, 1.0])[:, None]
    codec = quantizer_of(kind)
    stored, plain = codec.encode(states * sizes), codec.encode(states)
    assert sum(one[0, 0, 0].nbytes for one in stored) == token_bytes(kind, 64)
    assert all(
        torch.equal(one[..., [0, 5], :], other[..., [0, 5], :]) for one, other in zip(stored, plain, strict=True)
    )
    error, own = ((codec.rounded(states * by) / by - states).norm(dim=-1) for by in (sizes, 1.0))
    assert (error < 1.05 * own).all()  # the 11 bits of a scale fall on other numbers


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ("5", "'5' is not one of 8, 4, 3, 2, fp8"),
        ("", "cannot be parsed"),
        ("4,8", "needs layers"),
        ("4@2-1", "2-1 is not a range"),
        ("4@0-2,8@2", "names layer 2 twice"),
        ("4@9", "layer 9 does not exist"),
        ("4@1", "none of these layers stores"),
    ],
)
def test_bad_bits_are_refused_with_a_reason(bits, message):
    with pytest.raises(ValueError, match=message):
        quantized_cache(build(config_of("cla")), bits)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "has no KV cache"),
        ("falcon_h1", "layer 0 has full"),
        ("mistral", "no layer of the model stores"),
        ("deepseek_v3", "caches latents; .* needs the keys and values of each head"),
    ],
)
def test_models_without_keys_and_values_of_all_tokens_are_refused(family, message):
    with pytest.raises(ValueError, match=message):
        quantized_cache(tiny(family), 4)


def test_plan_refuses_what_the_cache_refuses():
    with pytest.raises(ValueError, match="not support"):
        crosslayer.plan(build(config_of("fusedkv")), kv_dtype="int4")
    for family in ("deepseek_v3", "falcon_h1"):
        with pytest.raises(ValueError, match="layer 0"):
            crosslayer.plan(AutoConfig.for_model(family), kv_dtype="int4")


def test_layers_that_cache_images_are_not_quantized():
    """Mllama's image layers have caches of the same class as the others, which must not be rotated."""
    plan = model_plan(AutoConfig.for_model("mllama"))
    images = [layer for layer, states in enumerate(plan.layers) if states.mask == "images"]
    kinds = stored_kinds(plan, parse_kv_bits("4"))
    assert images and all(kinds[layer] is None for layer in images) and "int4" in kinds


def test_another_cache_is_refused():
    model = build(config_of(None))
    with smaller_cache(model, bits=4), pytest.raises(ValueError, match="DynamicCache"):
        model(tokens(1, 8), **{CACHE: DynamicCache(config=model.config)})
    model.config._attn_implementation = "flash_attention_2"  # as if it were installed
    with pytest.raises(ValueError, match="or eager"), smaller_cache(model, bits=4):
        pass
