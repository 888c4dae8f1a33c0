"""The arguments of `forward`, compared with LlamaForCausalLM: keywords, positions, the loss, autocast."""

import contextlib
import inspect

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerModel, modeling
from crosslayer.core.decoder.convert import to_model
from crosslayer.core.method import Compensation
from crosslayer.core.transformers_versions import CACHE
from crosslayer.testing import tiny as contract
from tests.helpers.cases import CASES, each
from tests.helpers.tiny import tokens

CLA_AND_VALUES = ["cla", {"name": "attnres", "block": 3}]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**contract.SHAPE)).double().eval()


@pytest.fixture
def attention():
    """Register attention functions under names, each without a mask, as FlashAttention-2 has none for packed rows."""
    names = []

    def register(name, function):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
        names.append(name)
        return name

    yield register
    for name in names:
        del AttentionInterface._global_mapping[name]
        del AttentionMaskInterface._global_mapping[name]


def packed_attention(module, query, key, value, attention_mask, position_ids=None, scaling=None, **kwargs):
    """Attend within documents, which begin where positions restart: what FlashAttention-2 makes of `position_ids`."""
    assert attention_mask is None
    document = (position_ids == 0).cumsum(-1)  # (1, T)
    mask = (document.unsqueeze(-1) == document.unsqueeze(-2)).tril()  # (1, T, T)
    groups = query.shape[1] // key.shape[1]
    key, value = (state.repeat_interleave(groups, 1) for state in (key, value))
    out = functional.scaled_dot_product_attention(query, key, value, mask.unsqueeze(1), scale=scaling)
    return out.transpose(1, 2), None


def test_the_attention_function_is_handed_what_llama_hands_on(attention):
    seen: dict[str, list] = {}

    def see(module, query, key, value, attention_mask, **kwargs):
        seen.setdefault(type(module).__name__, []).append(kwargs)
        return query.transpose(1, 2), None

    name, ids = attention("see", see), tokens(length=6)
    extra = {"cu_seq_lens_q": torch.tensor([0, 6]), "max_length_q": 6, "seq_idx": ids}
    stock = llama()
    for model in (stock, to_model(stock)):
        model.set_attn_implementation(name)
        model(ids, position_ids=torch.arange(3, 9)[None], use_cache=False, **extra)
    theirs, ours = seen["LlamaAttention"], seen["CrossLayerAttention"]
    assert len(theirs) == len(ours) == 6
    for one, other in zip(theirs, ours, strict=True):
        assert set(other) - set(one) == {"sliding_window"} and set(one) <= set(other)
        for key, value in one.items():
            same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
            assert same, key


def test_hooks_see_the_keywords_that_llamas_see():
    stock, seen = llama(), []
    for model in (stock, to_model(stock)):
        layer = model.model.layers[2]
        for module in (layer, layer.self_attn):
            module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(set(kwargs)), with_kwargs=True)
        with torch.no_grad():
            model(tokens(length=6))
    assert seen[0] == seen[2] and seen[3] >= seen[1] >= {"hidden_states", "position_ids", CACHE}


@pytest.mark.parametrize("case", ["llama", "cla", "uniattn", "svformer", "resformer", "attnres blocks"])
def test_packed_documents_equal_separate_ones(case, attention):
    methods, changes = CASES[case]
    model, ids = contract.build(contract.config_of(methods, **changes)), tokens(batch=1, length=12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        apart = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])], 1)
        contract.close(apart, model(ids, position_ids=positions, use_cache=False).logits, "packed under SDPA")
        model.set_attn_implementation(attention("packed", packed_attention))
        contract.close(apart, model(ids, position_ids=positions, use_cache=False).logits, "packed by position_ids")


def test_tensors_among_the_keywords_under_checkpointing():
    ids, positions, gradients = tokens(batch=1, length=8), torch.cat([torch.arange(4)] * 2)[None], []
    for checkpointing in (False, True):
        model = contract.build(contract.config_of(CLA_AND_VALUES)).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids, position_ids=positions, use_cache=False, seq_idx=positions).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        contract.close(one, other, "gradient")


def test_positions_do_not_compile_anew():
    torch._dynamo.reset()
    model, ids = contract.build(contract.config_of(["cla"])), tokens(batch=1, length=8)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for first in (0, 3, 7):
            positions = torch.arange(first, first + 8)[None]
            result = compiled(ids, position_ids=positions, use_cache=False).logits
            contract.close(model(ids, position_ids=positions, use_cache=False).logits, result, "compiled")
    assert len(graphs) == 1


def test_the_cache_has_two_names():
    """From transformers 5.24 on the old name gives a warning, as it does in Llama."""
    model, ids = contract.build(contract.config_of(["cla"])), tokens(length=8)
    logits = []
    with torch.no_grad():
        for name in ("cache", "past_key_values"):
            cache, is_old = DynamicCache(config=model.config), name != CACHE == "cache"
            for part in (ids[:, :5], ids[:, 5:]):
                with pytest.warns(FutureWarning, match=name) if is_old else contextlib.nullcontext():
                    output = model(part, **{name: cache})
            assert getattr(output, CACHE) is cache and cache.get_seq_length() == 8
            logits.append(output.logits)
    assert torch.equal(*logits)


def test_the_signature_is_llamas():
    model = contract.build(contract.config_of([]))
    assert (
        list(inspect.signature(model.forward).parameters)
        == list(inspect.signature(LlamaForCausalLM.forward).parameters)[1:]
    )
    ids, mask = tokens(length=8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():  # positional, as it is written for Llama
        contract.close(model(ids, attention_mask=mask).logits, model(ids, mask).logits, "positional mask")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("attention_maks", "'attention_mask'"), ("label", "'labels'"), ("shift_label", "'shift_labels'"),
     ("cu_seq_len_q", "'cu_seq_lens_q'"), ("zzz", "it takes input_ids, attention_mask")],
)  # fmt: skip
def test_a_misspelt_keyword_is_an_error(name, hint):
    model, ids = contract.build(contract.config_of(["cla"])), tokens(length=4)
    with pytest.raises(TypeError, match=rf"CrossLayerForCausalLM.forward\(\) has no argument '{name}'; .*{hint}"):
        model(ids, **{name: ids})
    with pytest.raises(TypeError, match=rf"CrossLayerModel.forward\(\) has no argument '{name}'"):
        model.model(ids, **{name: ids})


def test_what_libraries_hand_over_is_taken():
    model, ids = contract.build(contract.config_of(["cla"])), tokens(length=4)
    for name in ("output_attentions", "output_hidden_states", "return_dict", "labels", "inputs_embeds"):  # peft
        assert model(ids, **{name: None}).logits is not None
    assert isinstance(model(ids, return_dict=False), tuple)
    assert isinstance(model.model, CrossLayerModel)
    lengths = {"cu_seq_lens_q": None, "cu_seq_lens_k": None, "max_length_q": 4, "max_length_k": 4}
    model(ids, **lengths, is_causal=True, attention_instances=None, output_router_logits=False)
    model.model(ids, num_items_in_batch=torch.tensor(3))


LABELS = tokens(length=8).masked_fill(torch.arange(8) < 2, -100)
LOSSES = {
    "labels": {"labels": LABELS},
    "num_items_in_batch": {"labels": LABELS, "num_items_in_batch": torch.tensor(5)},
    "ignore_index": {"labels": LABELS.clamp_min(0), "ignore_index": 0},
    "shift_labels": {"labels": LABELS, "shift_labels": tokens(length=8, seed=3)},
    "shift_labels alone": {"shift_labels": LABELS},
    "both": {"labels": LABELS, "shift_labels": tokens(length=8, seed=3), "num_items_in_batch": 7},
}


@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_is_llamas(case):
    stock, handed = llama(), []
    plain = AttentionInterface()["sdpa"]

    def see(*args, **kwargs):
        handed.append(set(kwargs))
        return plain(*args, **kwargs)

    ours, options = to_model(stock), LOSSES[case]
    AttentionInterface.register("see", see)
    AttentionMaskInterface.register("see", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        ours.set_attn_implementation("see")
        expected, result = (model(tokens(length=8), **options).loss for model in (stock, ours))
    finally:
        del AttentionInterface._global_mapping["see"], AttentionMaskInterface._global_mapping["see"]
    if "labels" not in options:  # stock Llama then gives no loss, and says nothing
        assert expected is None
        expected = stock(tokens(length=8), labels=options["shift_labels"], **options).loss
    assert expected.item() == result.item()
    assert not handed[0] & set(options), "options of the loss reach the layers"


@pytest.mark.parametrize("case", LOSSES)
def test_without_logits_the_loss_and_its_gradients_are_the_same(case, monkeypatch):
    monkeypatch.setattr(modeling, "AT_ONCE", 3)
    models = [contract.build(contract.config_of(["resformer"], final_logit_softcapping=2.0)) for _ in range(2)]
    ids, made = tokens(2, 8), []
    options = {
        name: value.expand(2, -1) if getattr(value, "ndim", 0) else value for name, value in LOSSES[case].items()
    }
    models[1].lm_head.register_forward_hook(lambda _, __, logits: made.append(logits.shape[0]))
    outputs = [model(ids, **options, skip_logits=skip) for model, skip in zip(models, (False, True), strict=True)]
    assert outputs[1].logits is None and max(made) == 3
    assert outputs[1].loss.item() == pytest.approx(outputs[0].loss.item(), rel=1e-6)  # the loss is in float32
    for output in outputs:
        output.loss.backward()
    for ours, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"labels": LABELS, "logits_to_keep": 1}], ids=["no labels", "some logits"])
def test_without_logits_there_must_be_a_loss(options):
    with pytest.raises(ValueError, match="skip_logits.*logits_to_keep"):
        contract.build(contract.config_of([]))(tokens(length=8), skip_logits=True, **options)


def test_generate_may_be_given_a_tokenizer():
    """transformers hands it on to `forward`, whatever for."""
    model, ids = contract.build(contract.config_of([])), tokens(length=8)
    assert model.generate(ids, tokenizer=object(), max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 10)


def test_a_loss_of_ones_own_gets_its_options():
    model, ids = contract.build(contract.config_of([])), tokens(length=8)
    model.loss_function = lambda logits, labels, vocab_size, shift_labels: (shift_labels, vocab_size)
    assert model(ids, labels=ids, shift_labels="mine").loss == ("mine", contract.SHAPE["vocab_size"])


@pytest.mark.parametrize("case", each(CASES))
def test_autocast_trains_every_method(case):
    methods, changes = CASES[case]
    model, ids = contract.build(contract.config_of(methods, **changes)).float().train(), tokens(length=8)
    expected = model(ids, labels=ids, use_cache=False).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.1)  # bfloat16 has 8 bits
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("block", [2, 3, 12])
def test_autocast_and_blocks_of_attention_residuals(block):
    model, ids = contract.build(contract.config_of([{"name": "attnres", "block": block}])).float(), tokens(length=8)
    with torch.autocast("cpu", torch.bfloat16):
        full = model(ids, use_cache=False).logits
        result, _ = contract.steps(model, ids, [5, 1, 2])
    assert (full - result).abs().max() < 0.1 * full.abs().max()


def test_compensation_is_zero_when_built():
    config = contract.config_of([{"name": "uniattn", "superblocks": ((1, 2),)}])
    compensation = Compensation(config, "heads")
    assert isinstance(compensation, torch.nn.Linear) and not compensation.weight.any()
    normed = torch.randn(2, 3, 32)
    torch.nn.init.normal_(compensation.weight)
    contract.close(compensation(normed), normed @ compensation.weight.T, "W_c", 1e-5)
    compensation.reset()
    assert not compensation.weight.any()


def test_parallel_plans_are_the_decoders_own():
    config = CrossLayerConfig(**contract.SHAPE, cross_layer=["cla"])
    assert config.base_model_pp_plan is None
    model = contract.build(config)
    assert not model.supports_pp_plan and model.supports_tp_plan
