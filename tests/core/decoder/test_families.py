"""Families beyond Llama: GPT-2 and Mixtral as oracles, first values, what attention can cap, bad input."""

import math
import re
from pathlib import Path

import pytest
import torch

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.core.decoder.convert import from_model, to_model
from crosslayer.core.decoder.families import family_names
from crosslayer.testing import tiny as contract
from tests.helpers.cases import CAPPED, EXPERTS, GEMMA2, GPT2, LINEAR
from tests.helpers.tiny import tiny, tokens

ROOT = Path(__file__).parents[3]


def of_gpt2(source, width):
    """Return GPT-2's weights by our names: its maps are transposed, and queries, keys and values one of them."""
    names = {"wte.weight": "embed_tokens.weight", "wpe.weight": "embed_positions.weight"}
    names |= {f"ln_f.{part}": f"norm.{part}" for part in ("weight", "bias")}
    weights = {"lm_head.weight": source["lm_head.weight"]}
    for name, weight in source.items():
        name = name.removeprefix("transformer.")
        if name in names:
            weights[f"model.{names[name]}"] = weight
        elif name.startswith("h."):
            _, layer, name_in_layer = name.split(".", 2)
            module, parameter = name_in_layer.rsplit(".", 1)
            prefix = f"model.layers.{layer}"
            weight = weight.T if parameter == "weight" and "ln_" not in module else weight
            if module == "attn.c_attn":
                for state, piece in zip("qkv", weight.split(width), strict=True):
                    weights[f"{prefix}.self_attn.{state}_proj.{parameter}"] = piece
            else:
                ours = {
                    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj",
                    "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
                }  # fmt: skip
                weights[f"{prefix}.{ours[module]}.{parameter}"] = weight
    return weights


def test_the_gpt2_shape_is_gpt2():
    source, ids = tiny("gpt2"), tokens()
    shape = {"num_hidden_layers": 3, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    ours = CrossLayerForCausalLM(contract.config_of([], **GPT2, **shape)).double().eval()
    ours.load_state_dict(of_gpt2(source.state_dict(), 32), strict=True)
    with torch.no_grad():
        contract.close(ours(ids).logits, source(ids).logits, "logits")
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(ours.generate(ids, **options), source.generate(ids, **options))


def test_learned_positions_end():
    model = contract.build(contract.config_of([], **GPT2))
    model(tokens(length=64))
    with pytest.raises(ValueError, match="65 tokens,.*64 positions"):
        model(tokens(length=65))


@pytest.mark.parametrize("padded", [False, True])
def test_the_routers_loss_is_mixtrals(padded):
    source, ids = (
        tiny("mixtral", experts_implementation="eager", num_local_experts=4, router_aux_loss_coef=0.5),
        tokens(),
    )
    ours = to_model(source)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0 if padded else 1
    inputs = {"labels": ids, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        expected = source(ids, **inputs, output_router_logits=True)
        result = ours(ids, **inputs, output_router_logits=True)
        alone = ours(ids, **inputs)
    contract.close(result.loss, expected.loss, "loss")
    contract.close(result.aux_loss, expected.aux_loss, "auxiliary loss")
    for logits, others in zip(result.router_logits, expected.router_logits, strict=True):
        contract.close(logits, others, "router")
    assert alone.aux_loss is None and alone.router_logits is None
    contract.close(alone.loss + 0.5 * result.aux_loss, result.loss, "loss and auxiliary loss")


def test_a_routers_loss_counts_once_in_accumulated_batches():
    """Trainer passes `num_items_in_batch` and adds the parts up: four parts had four times the loss."""
    ids = tokens(length=8).repeat(4, 1)[:8]
    model = contract.build(
        contract.config_of(["attnres"], **EXPERTS, output_router_logits=True, router_aux_loss_coef=0.5)
    )
    labels, parts = ids.clone(), 4
    labels[:2, :4] = -100  # the first part has fewer tokens
    count = labels[:, 1:].ne(-100).sum()
    options = {"num_items_in_batch": count, "use_cache": False}
    with torch.no_grad():
        found = [
            model(part, labels=own, **options) for part, own in zip(ids.chunk(parts), labels.chunk(parts), strict=True)
        ]
        alone = [
            model(part, labels=own, output_router_logits=False, **options)
            for part, own in zip(ids.chunk(parts), labels.chunk(parts), strict=True)
        ]
    shares = [own[:, 1:].ne(-100).sum() / count for own in labels.chunk(parts)]
    assert sum(shares) == 1
    expected = sum(
        text.loss + 0.5 * share * one.aux_loss for text, share, one in zip(alone, shares, found, strict=True)
    )
    contract.close(sum(one.loss for one in found), expected, "the loss of a step")


def test_the_routers_loss_trains_under_checkpointing():
    ids, gradients = tokens(length=8), []
    for checkpointing in (False, True):
        model = contract.build(contract.config_of(["attnres"], **EXPERTS, output_router_logits=True)).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).aux_loss.backward()
        gradients.append(model.model.layers[5].mlp.gate.weight.grad)
    assert gradients[0].abs().max() > 0
    contract.close(gradients[1], gradients[0], "gradient of the highest router")


def test_first_values_are_the_familys():
    model = CrossLayerForCausalLM(contract.config_of([], **GEMMA2))
    norms = [model.model.norm, model.model.layers[0].post_feedforward_layernorm]
    assert all(norm.weight.abs().max() == 0 for norm in norms)  # a gain of 1
    sparse = CrossLayerForCausalLM(contract.config_of([], **EXPERTS)).model.layers[0].mlp
    for weight in (sparse.gate.weight, sparse.experts.gate_up_proj, sparse.experts.down_proj):
        assert 0.01 < weight.std() < 0.03


def test_embeddings_are_scaled_in_the_dtype_of_the_weights():
    embed = CrossLayerForCausalLM(contract.config_of([], **GEMMA2)).model.embed_tokens
    ids = tokens()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        embed.to(dtype)
        assert torch.equal(embed(ids), embed.weight[ids] * torch.tensor(32**0.5, dtype=dtype))


def test_sdpa_is_refused_where_scores_are_capped():
    model = contract.build(contract.config_of([], **CAPPED))
    assert model.config._attn_implementation == "eager"  # by itself, as in transformers
    with pytest.raises(ValueError, match="SDPA.*attn_logit_softcapping"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="SDPA.*attn_logit_softcapping"):
        CrossLayerForCausalLM._from_config(contract.config_of([], **CAPPED), attn_implementation="sdpa")
    assert contract.build(contract.config_of([], **GEMMA2)).config._attn_implementation == "sdpa"


BAD = [
    ({"family": "gemma"}, "family must be one of 'gemma2', 'gemma3', 'gpt2', 'llama', got 'gemma'"),
    ({**GEMMA2, "attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be above 0 or None, got 0.0"),
    ({**GEMMA2, "query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be above 0 or None, got -1"),
    ({**GPT2, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "leave rope_parameters out"),
    ({**EXPERTS, "num_experts_per_tok": 5}, "num_experts_per_tok must be 1 to num_local_experts = 4, got 5"),
    ({**EXPERTS, **GPT2}, "num_local_experts needs a family with gated MLPs .*, got family = 'gpt2'"),
    ({"output_router_logits": True}, "output_router_logits needs routers; set num_local_experts"),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=str)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        contract.config_of([], **changes)


def test_a_router_that_is_not_there_is_not_asked():
    with pytest.raises(ValueError, match="no router"):
        contract.build(contract.config_of([]))(tokens(), output_router_logits=True)


def test_linear_attention_is_kimis():
    """A layer of ours with its weights gives the update of transformers' block, padded or not."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    model = contract.build(contract.config_of([], **LINEAR))
    ours = model.model.layers[0].linear_attn
    block = KimiLinearDeltaAttention(model.config, 0).double()
    block.load_state_dict(ours.state_dict(), strict=True)
    normed, mask = torch.randn(2, 9, 32, dtype=torch.float64), torch.ones(2, 9)
    mask[0, :4] = 0
    with torch.no_grad():
        assert torch.equal(ours(normed, mask, None), block(normed, attention_mask=mask))


def test_decays_begin_as_kimis():
    gate = CrossLayerForCausalLM(contract.config_of([], **LINEAR)).model.layers[0].linear_attn.forget_gate
    assert gate.A_log.min() >= 0 and gate.A_log.max() <= math.log(16)
    step = torch.nn.functional.softplus(gate.dt_bias)
    assert step.min() > 0.9e-3 and step.max() < 1.1e-1


def test_attention_residuals_read_linear_attention():
    """Sources are the embedding and every sublayer, of whichever attention."""
    config = contract.config_of(["attnres"], **LINEAR)
    assert config.wiring.sublayers == tuple((layer, site) for layer in range(6) for site in ("attn", "mlp"))
    assert config.plan.cached_fraction() == 4 / 6 and config.kv_sharing_modes == [None] * 6


LINEAR_BAD = [
    ({"name": "cla", "groups": ((1, 2),)}, "cla: layer 2 has linear attention, so it cannot share keys"),
    ({"name": "svformer"}, "svformer: layer 0 has linear attention"),
    ({"name": "drop", "attention": (2,)}, "drop: layer 2 has linear attention"),
]


@pytest.mark.parametrize(("method", "words"), LINEAR_BAD, ids=str)
def test_linear_attention_shares_nothing(method, words):
    with pytest.raises(ValueError, match=words):
        contract.config_of([method], **LINEAR)


def test_linear_attention_is_no_other_familys():
    with pytest.raises(ValueError, match=r"express.*attention.*\[0, 2\]"):
        from_model(contract.build(contract.config_of([], **LINEAR)), "llama")


def test_linear_attention_needs_sizes():
    with pytest.raises(ValueError, match="needs linear_num_heads and linear_head_dim"):
        contract.config_of([], layer_types=LINEAR["layer_types"])


def test_no_family_is_named_outside_its_file():
    """The config's default is Llama; GGUF, DeciLM's blocks and the exports are formats of others, `gemma3` a model."""
    word = re.compile("[\"'](" + "|".join(family_names()) + ")[\"']")
    for path in (ROOT / "crosslayer").rglob("*.py"):
        if path.parent.name not in ("families", "export") and path.name not in ("gguf.py", "blocks.py", "embedded.py"):
            found = {name for name in word.findall(path.read_text())}
            assert found <= ({"llama"} if path.name == "configuration.py" else set()), path
