"""Tables follow the vocabulary when it is resized."""

import pytest
import torch

from crosslayer.core.decoder import CrossLayerForCausalLM, CrossLayerModel
from crosslayer.testing.tiny import VOCABULARY, build, close, config_of, tokens


def tables(model):
    return [layer.self_attn.mixers[0].table for layer in model.get_decoder().layers if len(layer.self_attn.mixers)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [VOCABULARY + 6, VOCABULARY - 6])
def test_a_resized_model_goes_on_and_is_saved(size, tied, tmp_path):
    model, ids = build(config_of("value_embeddings", tie_word_embeddings=tied)), tokens() % (VOCABULARY - 6)
    kept, old = min(size, VOCABULARY), [table.clone() for table in tables(model)]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        model.resize_token_embeddings(size, mean_resizing=False)
        close(model(ids, use_cache=False).logits[..., :kept], before[..., :kept], "after resizing")
    for table, earlier in zip(tables(model), old, strict=True):
        assert len(table) == size and table.requires_grad and torch.equal(table[:kept], earlier[:kept])
        assert table.shape[0] == kept or 0.01 < table[kept:].std() < 0.03  # they begin as embeddings do
    ids = torch.arange(size).unsqueeze(0)
    model(ids, labels=ids).loss.backward()
    assert all(table.grad[:-1].any(dim=1).all() for table in tables(model))  # the last token predicts nothing
    model.save_pretrained(tmp_path)
    again = CrossLayerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config.vocab_size == size
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_frozen_tables_of_a_body_stay_frozen_and_are_padded():
    body = CrossLayerModel(config_of("value_embeddings")).requires_grad_(False).bfloat16()
    body.resize_token_embeddings(pad_to_multiple_of=10)
    for table in tables(body):
        assert table.shape[0] == 70 and not table.requires_grad and table.dtype == torch.bfloat16
