"""Eviction: against a loop, however a text is cut into calls, alone or padded in a batch, over layers that share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosslayer.cache.eviction import BLOCK, Amount, Eviction, parse_eviction
from crosslayer.cache.kv_cache import held_bytes
from crosslayer.cache.running import sharing_groups, smaller_cache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing.tiny import TOLERANCE, build, config_of, tokens
from tests.cache.naive import Naive, capacity, share
from tests.helpers.daily import daily
from tests.helpers.smaller_caches import EAGER, PLANS, UNIATTN, attending_with
from tests.helpers.tiny import tiny

LENGTH = 57  # tokens: three evictions, and a block that is not full
EVICTIONS = ["h2o:0.4", "h2o:32", "streaming:0.4", "streaming:32", "sinks:0.5", "sinks:32"]


def held_positions(cache):
    """Return what each group holds: sorted positions by row and head, without empty columns."""
    return [
        [sorted(p for p in head.tolist() if p >= 0) for row in group.positions for head in row]
        for group in cache.groups
    ]


@pytest.mark.parametrize("spec", EVICTIONS)
@pytest.mark.parametrize(("family", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa")])
def test_a_text_is_read_as_a_loop_over_tokens_and_lists_reads_it(family, implementation, spec):
    policy, amount = spec.split(":")
    naive = Naive(policy, share(float(amount)) if "." in amount else capacity(int(amount)))
    model, ids = tiny(family, implementation), tokens(2, LENGTH)
    with smaller_cache(model, spec) as new_cache:
        cache = new_cache()
        ours = model(ids, **{CACHE: cache}).logits
    with attending_with(model, naive):
        expected = model(ids, use_cache=False).logits
    assert (ours - expected).abs().max() < (EAGER if implementation == "eager" else TOLERANCE)
    assert held_positions(cache) == [naive.kept[layer] for layer in sorted(naive.kept)]


@pytest.mark.parametrize("plan", daily(PLANS, PLANS[-1]), ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_cuts_padding_and_caches_change_nothing(plan, data):
    model = build(config_of(plan))
    tolerance = TOLERANCE
    if data.draw(st.booleans()):  # in float64, transformers' own eager attention makes NaN of padding
        model.float().set_attn_implementation("eager")
        tolerance = 1e-4  # logits of about 2, rounding of three layers in float32
    spec = data.draw(st.sampled_from(EVICTIONS))
    ids = tokens(3, LENGTH, seed=data.draw(st.integers(0, 99)))
    with smaller_cache(model, spec) as new_cache:
        whole = model(ids, use_cache=False).logits
        cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=6)))
        sizes = [end - start for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
        cache = new_cache()
        pieces = [model(part, **{CACHE: cache}).logits for part in ids.split(sizes, dim=1)]
        assert (torch.cat(pieces, 1) - whole).abs().max() < tolerance
        pads = [0, *(data.draw(st.integers(0, 20)) for _ in range(2))]
        mask = torch.tensor([[0] * pad + [1] * (LENGTH - pad) for pad in pads])
        alone = [model(ids[row : row + 1, pad:], use_cache=False).logits[0] for row, pad in enumerate(pads)]
        start = data.draw(st.integers(1, LENGTH - 1))
        padded = new_cache()
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits, first = [], 0
        for end in range(start, LENGTH + 1):
            new = {"input_ids": ids[:, first:end], "position_ids": places[:, first:end]}
            logits.append(model(**new, attention_mask=mask[:, :end], **{CACHE: padded}).logits)
            first = end
        together = torch.cat(logits, 1)
        for row, pad in enumerate(pads):
            assert (together[row, pad:] - alone[row]).abs().max() < tolerance


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", ["h2o:128", "streaming:128", "sinks:128", "h2o:0.0"])
def test_capacity_for_the_whole_text_changes_no_bit(spec, implementation):
    model, ids = tiny("llama", implementation, torch.float32), tokens(2, LENGTH)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model(ids).logits
    text = model.generate(ids[:, :40], **options)
    sizes, plain = [40, 1, 1, 15], DynamicCache(config=model.config)
    pieces = [model(part, **{CACHE: plain}).logits for part in ids.split(sizes, dim=1)]
    with smaller_cache(model, spec) as new_cache:
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model.generate(ids[:, :40], **{CACHE: new_cache()}, **options), text)
        cache = new_cache()
        for part, piece in zip(ids.split(sizes, dim=1), pieces, strict=True):
            assert torch.equal(model(part, **{CACHE: cache}).logits, piece)


@pytest.mark.parametrize("spec", EVICTIONS)
def test_a_later_token_changes_nothing_that_was_kept_before_it(spec):
    model = build(config_of(UNIATTN, max_position_embeddings=256))
    before = tokens(1, 30)
    ids = torch.cat([before, tokens(1, 40, seed=1)], dim=1)
    other = ids.clone()
    other[0, -20:] = (other[0, -20:] + 7) % 60 + 3
    held = []
    for text in (ids, other):
        with smaller_cache(model, spec) as new_cache:
            cache, steps = new_cache(), []
            for part in text.split([before.shape[1], *[1] * 40], dim=1):
                model(part, **{CACHE: cache})
                steps.append(held_positions(cache))
            held.append(steps)
    assert held[0][:21] == held[1][:21]
    assert sum(map(len, held[0][20])) < 4 * 2 * (before.shape[1] + 20)  # some are evicted by then
    if spec == "h2o:0.4":
        assert held[0][-1] != held[1][-1]  # which could have shown


def test_keys_and_values_of_a_group_hold_the_first_layers_tokens():
    """The first group that evicts has read what a full cache holds, up to its first eviction at the end of the text."""
    model, ids = build(config_of(UNIATTN)), tokens(2, LENGTH)
    with smaller_cache(model, "h2o:0.4@2-5") as new_cache:
        cache = new_cache()
        model(ids[:, :48], **{CACHE: cache})
    full = DynamicCache(config=model.config)
    model(ids[:, :48], **{CACHE: full})
    groups = sharing_groups(model.config.plan)
    assert groups == [[0], [1], [2, 3], [4, 5]]
    group = cache.groups[2]
    columns = group.positions.long()[..., None].expand(-1, -1, -1, 8)
    held = columns.shape[2]
    keys, values = cache.layers[2].columns[0].read().chunk(2, 1)  # stored together, as heads
    assert held == 29 and torch.equal(keys, full.layers[2].keys.gather(2, columns))
    assert torch.equal(values, full.layers[2].values.gather(2, columns))
    first, second = cache.layers[3].columns
    assert second.read().shape[-1] == 0 and first.used == held  # values alone, in the first place


def test_values_of_reading_layers_are_those_of_the_same_tokens():
    """Tokens are evicted for the first time after the prompt: every layer has read what a full cache holds."""
    model, ids = build(config_of(UNIATTN)), tokens(2, BLOCK)
    full = DynamicCache(config=model.config)
    expected = model(ids, **{CACHE: full}).logits
    with smaller_cache(model, "h2o:0.4") as new_cache:
        cache = new_cache()
        assert torch.equal(model(ids, **{CACHE: cache}).logits, expected)
    for number, layers in enumerate(sharing_groups(model.config.plan)):
        columns = cache.groups[number].positions.long()[..., None].expand(-1, -1, -1, 8)
        assert columns.shape[2] == 10
        for layer in layers:
            states = cache.layers[layer].columns[0].read()[:, :2]  # keys, or the values of a reader
            assert states.shape[2] == 10 and torch.equal(states, full.layers[layer].keys.gather(2, columns))


@pytest.mark.parametrize("plan", [None, "cla", "svformer", UNIATTN], ids=str)
def test_allocated_bytes_are_the_budget(plan):
    model, ids = build(config_of(plan)), tokens(2, 64)
    states = model.config.plan.stored_states()
    token = 2 * states * 2 * 8 * 8  # rows, states, heads, sizes, bytes
    with smaller_cache(model, "h2o:32") as new_cache:
        cache = new_cache()
        for part in ids.split([40, *[1] * 24], dim=1):
            model(part, **{CACHE: cache})
            assert held_bytes(cache).allocated - cache.overhead_bytes() == 32 * token
    with smaller_cache(model, "h2o:0.5") as new_cache:
        cache = new_cache()
        model(ids, **{CACHE: cache})
        assert held_bytes(cache).allocated - cache.overhead_bytes() == (32 + BLOCK) * token
        groups = len(cache.groups)
        assert cache.overhead_bytes() == groups * 2 * 2 * 32 * 8  # rows, heads, tokens, a position and a sum
        assert cache.get_seq_length() == 64


@pytest.mark.parametrize("family", ["opt", "gpt_neox", "phi", "qwen3"])
def test_each_text_is_read_by_itself_whichever_module_calls_the_layers(family):
    model = tiny(family)
    texts = [tokens(1, LENGTH, seed=seed) for seed in (0, 1)] + [tokens(1, LENGTH - 9, seed=2)]
    with smaller_cache(model, "h2o:0.4") as new_cache:
        together = [model(ids, use_cache=False).logits for ids in texts]
        pieces = []
        for ids in texts:
            cache = new_cache()
            pieces.append(torch.cat([model(part, **{CACHE: cache}).logits for part in ids.split(20, dim=1)], 1))
    for ids, logits, cut in zip(texts, together, pieces, strict=True):
        with smaller_cache(model, "h2o:0.4"):
            assert torch.equal(model(ids, use_cache=False).logits, logits)
        assert (cut - logits).abs().max() < TOLERANCE


def test_beams_keep_what_they_have_read():
    model, ids = build(config_of("svformer")), tokens(2, 30)
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3, "length_penalty": 0.0, "pad_token_id": 0}
    with smaller_cache(model, "h2o:0.4") as new_cache:
        out = model.generate(ids, **{CACHE: new_cache()}, return_dict_in_generate=True, output_scores=True, **options)
        logits = model(out.sequences, use_cache=False).logits
    scores = logits.log_softmax(-1)[:, 29:-1].gather(-1, out.sequences[:, 30:, None])[..., 0].sum(-1)
    assert (scores - out.sequences_scores).abs().max() < 1e-5  # generate keeps its scores in float32


def test_layers_may_evict_different_shares():
    model, ids = tiny("llama"), tokens(1, 48)
    with smaller_cache(model, "streaming:0.5@1,0.25@2") as new_cache:
        cache = new_cache()
        model(ids, **{CACHE: cache})
    keys = [layer.columns[0] for layer in cache.layers]
    assert [states.used for states in keys] == [48, 24, 36]
    assert [states.memory[0].shape[2] for states in keys] == [48, 24 + BLOCK, 36 + BLOCK]


def test_sinks_are_kept_wherever_they_are():
    """A key that outweighs all others in the middle of a text is kept; without it, only the latest tokens are."""
    model = tiny("gpt2", n_layer=1, n_head=1)
    ids = tokens(1, 50)
    with torch.no_grad():
        attention = model.transformer.h[0].attn.c_attn
        attention.weight.zero_()
        attention.bias.zero_()
        attention.bias[:32] = 1.0  # queries are all ones, so that the sum of a key decides
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight[:, 31] = -20.0
        model.transformer.wte.weight[int(ids[0, 9]), 31] = 20.0
        attention.weight[31, 32:64] = 1.0  # the sum of a key is the last channel of the token
    ids[0, 10:] = torch.where(ids[0, 10:] == ids[0, 9], ids[0, 0], ids[0, 10:])
    with smaller_cache(model, "sinks:32") as new_cache:
        cache = new_cache()
        model(ids, **{CACHE: cache})
    assert held_positions(cache)[0][0] == [9, *range(33, 50)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h20:0.4", "did you mean 'h2o'?"),
        ("lru:0.4", "known are .*streaming, h2o, sinks"),
        ("h2o", "has no amount"),
        ("h2o:1.0", "at least 0 and below 1"),
        ("h2o:8", "at least 32 tokens, got 8"),
        ("h2o:0.4x", "cannot be parsed at '0.4x'"),
        ("h2o:0.4,0.5", "needs layers"),
        ("h2o:0.4@3-1", "3-1 is not a range"),
        ("h2o:0.4@0-2,0.5@2", "names layer 2 twice"),
    ],
)
def test_bad_evictions_are_refused_with_a_reason(spec, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        parse_eviction(spec)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "has no KV cache"),
        ("mistral", "attends to all tokens"),
        ("qwen3_next", "layer 0 has linear attention"),
        ("deepseek_v3", "caches latents; .* needs the keys and values of each head"),
    ],
)
def test_models_without_full_attention_are_refused(family, message):
    with pytest.raises(ValueError, match=message), smaller_cache(tiny(family), "h2o:0.4"):
        pass


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("spec", ["h2o:0.4", "streaming:32@1"])
def test_layers_with_a_window_keep_it(family, spec):
    model, ids = tiny(family, "eager" if family == "gemma2" else None, dtype=torch.float32), tokens(2, LENGTH)
    plain, padded, mask = model(ids, use_cache=False).logits, ids.clone(), torch.ones_like(ids)
    mask[1, :9] = 0
    padded[1] = padded[1].roll(9)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with smaller_cache(model, spec) as new_cache:
        whole = model(ids, use_cache=False).logits
        assert (whole - plain).abs().max() > 1e-3
        cache, pieces = new_cache(), []
        for piece in ids.split([40, 1, 16], 1):
            pieces.append(model(piece, use_cache=True, **{CACHE: cache}).logits)
        assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-4
        behind = model(padded, attention_mask=mask, position_ids=positions, **{CACHE: new_cache()}).logits
        assert (behind[1, 9:] - whole[1, :-9]).abs().max() < 1e-4
    held = [layer.keys.shape[2] if layer.is_sliding else layer.columns[0].used for layer in cache.layers]
    assert held[0] == held[2] == 7 and held[1] < LENGTH
    with pytest.raises(ValueError, match="layer 0 has a window or no attention; leave it out"):
        smaller_cache(model, "h2o:0.4@0").__enter__()


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="'streaming'"):
        Eviction("from Python", policy="straeming")
    model, ids = tiny("llama"), tokens(1, 20)
    with pytest.raises(ValueError, match="`evict` or `bits`"), smaller_cache(model):
        pass
    with pytest.raises(ValueError, match="layer 5"), smaller_cache(model, "h2o:0.4@5"):
        pass
    with smaller_cache(model, "streaming:0.4") as new_cache:
        other = new_cache()
        other.batch_repeat_interleave(2)  # of nothing
    with smaller_cache(model, "h2o:0.4") as new_cache:
        with pytest.raises(ValueError, match="DynamicCache"):
            model(ids, **{CACHE: DynamicCache(config=model.config)})
        window = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril().triu(-3)
        with pytest.raises(ValueError, match="hides more"):
            model(ids, attention_mask=window, **{CACHE: new_cache()})
        right = torch.tensor([[1] * 12 + [0] * 8])
        with pytest.raises(ValueError, match="hides more"):
            model(ids, attention_mask=right, **{CACHE: new_cache()})
        with pytest.raises(ValueError, match="SmallerKVCache"):
            model(ids, **{CACHE: other})
        with pytest.raises(ValueError, match="DynamicCache"):
            model.model(ids, None, None, DynamicCache(config=model.config))
        with pytest.raises(ValueError, match="use_cache=False"):
            model.generate(ids, **{CACHE: new_cache()}, max_new_tokens=2, use_cache=False, pad_token_id=0)
        with pytest.raises(ValueError, match="be cropped"):
            cache = new_cache()
            model(ids, **{CACHE: cache})
            cache.crop(-3)
    shared = build(config_of("cla"))
    with pytest.raises(ValueError, match="layers 0, 1 share"), smaller_cache(shared, "h2o:0.4@1"):
        pass
    dropped = build(config_of({"name": "drop", "attention": [1]}))
    with pytest.raises(ValueError, match="layer 1"), smaller_cache(dropped, "h2o:0.4@1"):
        pass
    with smaller_cache(tiny("llama", num_hidden_layers=1), "h2o:0.4@0"):
        pass
    row = {"name": "cross_attention"}
    with pytest.raises(ValueError, match="several layers"), smaller_cache(build(config_of(row)), "h2o:0.4"):
        pass


def test_the_model_is_as_before_afterwards():
    model, ids = tiny("llama"), tokens(1, 40)
    model.train()
    before, functions = model(ids).logits, dict(ALL_ATTENTION_FUNCTIONS)
    with smaller_cache(model, "h2o:0.4"):
        assert not model.training
        assert not torch.equal(model(ids).logits, before)
    assert model.training and torch.equal(model(ids).logits, before)
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions
    assert isinstance(getattr(model(ids, use_cache=True), CACHE).layers[0], DynamicLayer)


@pytest.mark.parametrize("spec", [*EVICTIONS, "h2o:0.05", "streaming:0.3@1"])
def test_whether_a_text_loses_tokens_is_known_from_its_length(spec):
    model, eviction = tiny("llama", max_position_embeddings=256), parse_eviction(spec)
    for length in (1, 16, 17, 32, 33, 64, 65, 100, 110):
        with smaller_cache(model, spec) as new_cache:
            cache = new_cache()
            before = max(1, length - 1)
            model(tokens(1, before), **{CACHE: cache})
            lost = any(group.held[0] < before for group in cache.groups)
        assert eviction.evicts_from(length) == lost, length


def test_shares_of_whole_tokens_are_exact():
    assert [Amount(share=0.4).keep(tokens) for tokens in (10, 16, 20, 160)] == [6, 10, 12, 96]


def test_half_precision_sums_what_the_model_reads():
    model, ids = tiny("llama", dtype=torch.float16), tokens(1, 48)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 60  # scores beyond float16 before they are scaled
            layer.self_attn.k_proj.weight *= 60
    with smaller_cache(model, "h2o:0.4") as new_cache:
        cache = new_cache()
        model(ids, **{CACHE: cache})
    assert all(torch.isfinite(group.attention).all() for group in cache.groups)


def test_tokens_ranked_above_all_are_kept_in_order_if_few_are_kept():
    model, ids = tiny("llama"), tokens(1, 48)
    with smaller_cache(model, "streaming:0.95") as new_cache:
        cache = new_cache()
        model(ids, **{CACHE: cache})
    assert held_positions(cache)[0][0] == [0, 46, 47]  # one, two and three of 16, 32 and 48


def test_attention_with_terms_of_its_own_is_refused():
    kinds = ["full_attention"] * 3
    model = tiny("gpt_oss", "eager", layer_types=kinds, sliding_window=64)
    with smaller_cache(model, "h2o:0.4"), pytest.raises(ValueError, match="a learned sink"):
        model(tokens(1, 20))
