"""What a method must become at its edges: the base, another method, or a closed form."""

from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from crosslayer.core.decoder.convert import from_model, to_config, to_model
from crosslayer.core.decoder.families import model_types
from crosslayer.core.depth_attention import depth_attention, plain
from crosslayer.core.method import Mixing
from crosslayer.testing.tiny import build, close, config_of
from tests.helpers.tiny import tiny, tokens


def same_weights(config, model):
    """Build a model of `config` with the weights of another, as far as they exist in both."""
    other = build(config)
    found = other.state_dict() | {k: v for k, v in model.state_dict().items() if k in other.state_dict()}
    other.load_state_dict(found)
    return other


@pytest.fixture(scope="module")
def base():
    return build(config_of([]))


def logits(model):
    with torch.no_grad():
        return model(tokens(length=10), use_cache=False).logits


@pytest.mark.parametrize(
    "methods",
    [[{"name": "cla", "group": 1}], [{"name": "uniattn", "superblocks": ((2,), (3,))}], [{"name": "drop"}], []],
    ids=str,
)
def test_trivial_options_are_the_base_bit_for_bit(base, methods):
    assert torch.equal(logits(same_weights(config_of(methods), base)), logits(base))


def test_resformer_between_base_and_svformer(base):
    mixed = same_weights(config_of(["resformer"]), base)
    for weights, expected in (((0.0, 1.0), base), ((1.0, 0.0), same_weights(config_of(["svformer"]), base))):
        with torch.no_grad():
            for layer in list(mixed.model.layers)[1:]:
                layer.self_attn.mixers[0].weights.copy_(torch.tensor(weights))
        assert torch.equal(logits(mixed), logits(expected))


def test_svformer_has_one_value_projection():
    names = [name for name in build(config_of(["svformer"])).state_dict() if "v_proj" in name]
    assert names == ["model.layers.0.self_attn.v_proj.weight"]


def test_a_dropped_layer_with_zero_output_changes_nothing(base):
    quiet = build(config_of([]))
    quiet.load_state_dict(base.state_dict())
    with torch.no_grad():
        quiet.model.layers[3].self_attn.o_proj.weight.zero_()
    dropped = same_weights(config_of([{"name": "drop", "attention": (3,)}]), quiet)
    close(logits(dropped), logits(quiet), "dropped")
    without_first = build(config_of([{"name": "drop", "attention": (0,)}]))
    assert without_first.generate(tokens(batch=1, length=4), max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_attention_residuals_with_uniform_attention_are_the_prenorm_transformer(base):
    """With w = 0 a sublayer reads the stream over the number of its sources; a norm without eps undoes that."""
    config = config_of(["attnres"], rms_norm_eps=0.0)
    uniform, plain = same_weights(config, base), same_weights(config_of([], rms_norm_eps=0.0), base)
    with torch.no_grad():
        for name, parameter in uniform.named_parameters():
            if name.endswith("residual.query"):
                parameter.zero_()
    # 1e-6: the norms compute in float32 and see other magnitudes
    assert (logits(uniform) - logits(plain)).abs().max() < 1e-5
    full, blocks_of_one = config_of(["attnres"]), config_of([{"name": "attnres", "block": 1}])
    assert torch.equal(logits(build(full)), logits(build(blocks_of_one)))


def test_depth_attention_ignores_scale_and_survives_large_logits():
    generator = torch.Generator().manual_seed(0)
    sources = tuple(torch.randn(1, 3, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    query, gain = torch.randn(8, dtype=torch.float64, generator=generator), torch.ones(8, dtype=torch.float64)
    scaled = (sources[0], sources[1] * 1e3, *sources[2:])
    one, two = (depth_attention(each, query * gain, 0.0) for each in (sources, scaled))
    # the weights are the same, so only the scaled source's part grows: solve for its weight in both
    normed = [s / s.square().mean(-1, keepdim=True).sqrt() for s in sources]
    shares = torch.stack([s @ query for s in normed]).softmax(0)
    assert torch.allclose(two - one, shares[1].unsqueeze(-1) * sources[1] * 999, atol=1e-9)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reach", [1.0, 1e4])
def test_closed_blocks_and_the_open_one_are_one_softmax(dtype, reach, gradients):
    """Closed blocks are one operand, the open block's sum is another: the naive softmax over all of them."""
    generator = torch.Generator().manual_seed(0)
    config = config_of([{"name": "attnres", "block": 2}], hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    sites = [(0, "attn"), (1, "attn"), (2, "attn"), (3, "attn"), (4, "attn"), (4, "mlp")]
    *opening, inner = (config.methods[0].residual(config, config.wiring, *site).to(dtype) for site in sites)
    with torch.no_grad():
        torch.nn.init.normal_(inner.query, generator=generator).mul_(reach)
    sources = torch.randn(6, 2, 5, 8, dtype=dtype, generator=generator).requires_grad_(gradients).unbind()
    carry = {}
    for residual, source in zip(opening, sources[:5], strict=True):
        _, carry = residual.read(source, carry)
    many = mock.patch.object(plain, "STACKED", 0)  # sources are not stacked
    with many, mock.patch.object(plain, "_weighted", wraps=plain._weighted) as weighted:
        result, _ = inner.read(sources[5], carry)
    if gradients:
        assert [len(operand) for operand in weighted.call_args.args[0]] == [5, 1]
    normed = [v / (v.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() for v in sources]
    scores = torch.stack([v @ inner.query for v in normed])
    assert scores.abs().max() > reach
    expected = sum(a.unsqueeze(-1) * v for a, v in zip(scores.softmax(0), sources, strict=True))
    # float32: 1e-6 of a logit is the weight's relative error, and a logit of 1e4 has one of 1e-3
    assert (result - expected).abs().max() < {torch.float32: 1e-6, torch.float64: 1e-12}[dtype] * max(1.0, reach)


@pytest.mark.parametrize(("layers", "block", "expected"), [(27, 6, 10), (6, 5, 4), (3, None, 7)])
def test_attention_residuals_read_as_many_sources_as_they_should(layers, block, expected):
    config = config_of([{"name": "attnres", "block": block}], num_hidden_layers=layers)
    model, counts = build(config), []
    final = model.model.final_residual
    read = final.read

    def counting(stream, carry):
        counts.append(len(carry["attnres.sources"]) + 1)
        return read(stream, carry)

    final.read = counting
    logits(model)
    assert counts == [expected]


def test_attention_that_reads_nothing_has_nothing_to_choose():
    blind = [{"name": "uniattn", "superblocks": ((2, 3),), "compensation": None}, "svformer"]
    config_of(blind)
    with pytest.raises(ValueError, match="layer 3"):
        config_of([*blind, "attnres"])


def test_zero_inits_survive_construction_and_loading(tmp_path):
    from crosslayer.core.decoder import CrossLayerForCausalLM

    config = config_of([{"name": "uniattn", "superblocks": ((2, 3),)}, "attnres", "resformer"])
    fresh = CrossLayerForCausalLM(config)
    fresh.save_pretrained(tmp_path)
    assert fresh.model.layers[3].compensation.weight.abs().max() == 0
    assert fresh.model.layers[3].attn_residual.query.abs().max() == 0
    assert fresh.model.layers[3].self_attn.mixers[0].weights.tolist() == [0.5, 0.5]
    plain = CrossLayerForCausalLM(config_of([]))
    plain.save_pretrained(tmp_path / "plain")
    grown = CrossLayerForCausalLM.from_pretrained(tmp_path / "plain", config=config)
    assert grown.model.layers[3].compensation.weight.abs().max() == 0
    assert grown.model.layers[5].mlp_residual.gain.min() == grown.model.layers[5].mlp_residual.gain.max() == 1


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ROPES = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32},
    LLAMA3,
]
EAGER = {"experts_implementation": "eager"}  # others lack float64
SOURCES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    *(("llama", {"rope_parameters": rope}) for rope in ROPES),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "head_dim": 16}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("gemma2", {}),
    ("gemma2", {"query_pre_attn_scalar": 7, "final_logit_softcapping": 3.0, "attention_bias": True}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_key_value_heads": 4}),
    ("gemma3_text", {}),
    ("gemma3_text", {"num_key_value_heads": 1, "query_pre_attn_scalar": 7, "final_logit_softcapping": 3.0}),
    *(("gemma3_text", {"rope_parameters": {"full_attention": rope}, "attention_bias": True}) for rope in ROPES),
    ("mixtral", EAGER),
    ("mixtral", {**EAGER, "sliding_window": 8, "num_local_experts": 3, "router_aux_loss_coef": 0.1}),
]


@pytest.mark.parametrize(("family", "changes"), SOURCES, ids=str)
def test_families_convert_exactly_and_back(family, changes):
    source = tiny(family, **changes)
    ours = to_model(source)
    assert set(ours.state_dict()) == set(source.state_dict())
    ids = tokens()
    with torch.no_grad():
        close(source(ids).logits, ours(ids).logits, "logits")
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(source.generate(ids, **options), ours.generate(ids, **options))
    back = from_model(ours, family)
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in source.state_dict().items())
    one, two = source.config.to_dict(), back.config.to_dict()
    assert {k for k in one if one[k] != two.get(k)} <= {"max_window_layers", "head_dim"}  # written out


@pytest.mark.parametrize("family", sorted(model_types()))
def test_families_convert_to_the_bit_in_bfloat16(family):
    source, ids = tiny(family, dtype=torch.bfloat16), tokens()
    ours = to_model(source)
    with torch.no_grad():
        assert torch.equal(source(ids).logits, ours(ids).logits)
    back = from_model(ours, family).state_dict()
    assert all(torch.equal(value, back[name]) for name, value in source.state_dict().items())


def test_smollm2_converts_exactly():
    import crosslayer

    source, tokenizer = crosslayer.load_model("smollm2", device="cpu")
    ours, ids = to_model(source), tokenizer("The whale, said Ahab,", return_tensors="pt").input_ids
    with torch.no_grad():
        assert (source(ids).logits - ours(ids).logits).abs().max() < 1e-4


def test_unknown_families_and_attributes_are_refused():
    with pytest.raises(ValueError, match="'gpt2'.*gemma2,.*qwen2, qwen3"):
        to_config(tiny("gpt2").config)
    for family, change in (
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}),  # which transformers' class ignores
        ("mixtral", {"router_jitter_noise": 0.1}),
    ):
        with pytest.raises(ValueError, match=f"{family}: config attribute {next(iter(change))} = .* is unknown"):
            to_config(AutoConfig.for_model(family, **change))
    published = {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}  # beside hidden_activation
    assert to_config(AutoConfig.for_model("gemma2", **published)).family == "gemma2"
    strange = AutoConfig.for_model("llama", logit_cap=30.0)
    with pytest.raises(ValueError, match="logit_cap.*30.0"):
        to_config(strange)
    with pytest.raises(ValueError, match="qk_norm"):
        from_model(to_model(tiny("qwen3")), "llama")
    with pytest.raises(ValueError, match="cannot express"):
        from_model(build(config_of(["cla"])), "llama")
    with pytest.raises(ValueError, match="'gemma2'"):
        from_model(to_model(tiny("gemma2", sliding_window=None, layer_types=["full_attention"] * 3)), "llama")
    assert set(model_types()) == {"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text"}


@pytest.mark.parametrize(
    "method", [{"name": "neutreno", "weight": 0.0}, {"name": "denseformer", "dilation": 2}], ids=str
)
def test_no_weight_and_first_weights_are_the_base(base, method):
    model = same_weights(config_of([method]), base)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Mixing):
                module.reset()
    close(logits(model), logits(base), "without weight")


def test_yoco_with_a_window_that_holds_all_is_cla(base):
    wide, narrow = (same_weights(config_of([{"name": "yoco", "window": window}]), base) for window in (10, 9))
    cla = same_weights(config_of([{"name": "cla", "groups": ((3, 4, 5),)}]), base)
    close(logits(wide), logits(cla), "yoco")
    assert (logits(narrow) - logits(cla))[:, 9].abs().max() > 1e-3


def test_fusedkv_begins_as_its_lite_form(base):
    full, lite = (same_weights(config_of([{"name": "fusedkv", "lite": lite}]), base) for lite in (False, True))
    assert (logits(full) - logits(lite)).abs().max() > 1e-2
    with torch.no_grad():
        for layer in full.model.layers[3:]:
            layer.self_attn.reader.reset()
    close(logits(full), logits(lite), "fusedkv as it begins")


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_neutreno_with_maps_that_are_the_identity(key_value_heads):
    """A = I makes it λ V_1 + (1 − λ) V_n: with a window of a single token, every map is the identity."""
    shape = {"num_key_value_heads": key_value_heads, "sliding_window": 1}
    model = build(config_of([{"name": "neutreno", "weight": 0.3}], **shape))
    values, reads = [], []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, out: values.append(out))
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: reads.append(args[0]))
    logits(model)
    for own, read in zip(values, reads, strict=True):
        mixed = (0.3 * values[0] + 0.7 * own).unflatten(-1, (key_value_heads, -1))  # (B, T, H_kv, D)
        close(read, mixed.repeat_interleave(4 // key_value_heads, dim=2).flatten(2), "attention's output")


def test_neutreno_after_resformer_has_half_the_weight(base):
    """V_1 − ½ (V_1 + V_n) = ½ (V_1 − V_n): λ = 0.2 on mixed values is λ = 0.1 on raw ones."""
    identity = {"name": "resformer", "mode": "identity"}
    after = same_weights(config_of([identity, {"name": "neutreno", "weight": 0.2}]), base)
    before = same_weights(config_of([{"name": "neutreno", "weight": 0.1}, identity]), base)
    close(logits(after), logits(before), "λ on mixed and on raw values")


def test_denseformer_counts_layers_that_are_there():
    """Dropping a layer whole is DenseFormer of one layer less."""
    short = build(config_of([{"name": "denseformer", "dilation": 2}], num_hidden_layers=5))
    dropped = build(config_of([{"name": "denseformer", "dilation": 2}, {"name": "drop", "layers": (2,)}]))
    short_layers = iter(short.model.layers)
    for number, layer in enumerate(dropped.model.layers):
        if number != 2:
            layer.load_state_dict(next(short_layers).state_dict())
    for part in ("model.embed_tokens", "model.norm", "lm_head"):
        dropped.get_submodule(part).load_state_dict(short.get_submodule(part).state_dict())
    assert torch.equal(logits(dropped), logits(short))


@pytest.mark.parametrize(("dilation", "period", "kept"), [(1, 1, 6), (2, 1, 5), (4, 5, 1), (3, 2, 3)])
def test_denseformer_keeps_what_a_later_layer_sums(dilation, period, kept):
    """At most so many outputs travel from a layer to the next, and none of them beyond its last reader."""
    model, counts = build(config_of([{"name": "denseformer", "dilation": dilation, "period": period}])), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: counts.append(len(out[1]["denseformer.outputs"])))
    logits(model)
    assert max(counts) == kept and counts[-1] == 0


def test_carries_hold_nothing_that_is_over():
    """What mixers see of their own layer does not travel to the next one."""
    model, names = build(config_of(["identity_mapping", "neutreno"])), set()
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: names.update(out[1]))
    logits(model)
    assert names == {"layers_compile_alone", "read", "identity_mapping.sum", "neutreno.first"}
