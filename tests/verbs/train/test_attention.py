"""Attention of training runs: which implementation a model gets, FlashAttention's arguments, and errors."""

import itertools

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_flash_attn_2_available

from crosslayer.training import attention
from crosslayer.training.arguments import training_arguments
from crosslayer.training.attention import WITHIN_DOCUMENTS, check_attention, readable_masks, set_attention
from tests.helpers.cases import CAPPED, LINEAR
from tests.helpers.tiny import tiny
from tests.helpers.training import course, losses, model_of, trainer_of

TWO = {"num_hidden_layers": 2, "attention_dropout": 0.0}
CAPPED_TWO = {**CAPPED, **TWO, "layer_types": ["sliding_attention", "full_attention"]}


def arguments(folder, **train):
    return training_arguments(folder, 0, course(2), {"use_cpu": True, **train})


def test_by_default_sdpa_computes_one_document_at_a_time_where_it_can(tmp_path):
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    for model, expected in {
        model_of(**TWO): WITHIN_DOCUMENTS,
        llama: WITHIN_DOCUMENTS,
        model_of(["cross_attention"]): "sdpa",
        model_of(**CAPPED_TWO): "eager",
    }.items():
        set_attention(model, None, arguments(tmp_path))
        assert model.config._attn_implementation == expected


@pytest.mark.parametrize(
    ("kind", "methods", "shape", "train", "message"),
    [
        ("flash", [], {}, {}, "model.attention: flash needs a GPU and the package flash-attn"),
        ("sdpa", [], CAPPED_TWO, {}, "model.attention: sdpa cannot cap scores"),
        (None, [], {**LINEAR, **TWO, "layer_types": ["linear_attention", "full_attention"]}, {"torch_compile": True},
         "train.torch_compile: compiled linear attention"),
    ],
)  # fmt: skip
def test_wrong_combinations_are_refused(tmp_path, kind, methods, shape, train, message):
    with pytest.raises(ValueError) as caught:
        set_attention(model_of(methods, **shape), kind, arguments(tmp_path, **train))
    assert str(caught.value).startswith(message)


def test_states_that_would_cross_document_boundaries_are_refused(tmp_path):
    """Those of transformers' own linear layers, which know no document boundaries."""
    hybrid = FalconH1Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4,
    )  # fmt: skip
    for model in (tiny("qwen3_next"), FalconH1ForCausalLM(hybrid)):
        with pytest.raises(ValueError, match="model.start"):
            set_attention(model, None, arguments(tmp_path))


def test_attention_without_a_dense_mask_is_refused_where_a_method_changes_the_mask(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "check_attention", lambda kind, device: None)  # this machine has no GPU
    with pytest.raises(ValueError, match="model.attention: flash cannot apply the mask"):
        set_attention(model_of(["cross_attention"]), "flash", arguments(tmp_path))
    with pytest.raises(ValueError, match="train.bf16"):
        set_attention(model_of(), "flash", arguments(tmp_path))


def test_flash_needs_its_package_also_on_a_gpu():
    assert not is_flash_attn_2_available()
    with pytest.raises(ValueError, match="the package flash-attn"):
        check_attention("flash", torch.device("cuda"))


def varlen(module, query, key, value, attention_mask, scaling, cu_seq_lens_q, max_length_q, **options):
    """Compute what FlashAttention does for documents in sequence, from the document boundaries."""
    assert attention_mask is None
    flat = [states.transpose(0, 1).flatten(1, 2) for states in (query, key, value)]  # (H, B·T, D)
    bounds = cu_seq_lens_q.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    assert max_length_q == max(lengths)
    read = [
        torch.nn.functional.scaled_dot_product_attention(*piece, is_causal=True, scale=scaling, enable_gqa=True)
        for piece in zip(*(states.split(lengths, 1) for states in flat), strict=True)
    ]
    return torch.cat(read, 1).transpose(0, 1).view(query.shape[0], query.shape[2], *query.shape[1::2]), None


def test_flash_attention_receives_the_document_boundaries_of_every_row(tmp_path, monkeypatch):
    runs = []
    for kind in ("sdpa", WITHIN_DOCUMENTS, attention.FLASH):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.FLASH, varlen)
        model = model_of(**TWO)
        model.config._attn_implementation = kind
        trainer = trainer_of(tmp_path / kind, model)
        trainer.train()
        runs.append((losses(trainer), trainer.evaluate()["eval_a_loss"]))
    assert runs[1][0] == pytest.approx(runs[0][0], abs=1e-6) and runs[1][1] == pytest.approx(runs[0][1], abs=1e-6)
    assert runs[2][0] == pytest.approx(runs[0][0], abs=1e-6) and runs[2][1] == pytest.approx(runs[0][1], abs=1e-6)


def test_layers_are_measured_with_explicit_masks(tmp_path):
    model = model_of(**TWO)
    set_attention(model, None, arguments(tmp_path))
    with readable_masks(model):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == WITHIN_DOCUMENTS
