"""A model's folder opens as a classifier, whose body is the language model's."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from crosslayer.testing.tiny import build, close, config_of, tokens


@pytest.mark.parametrize("methods", ["cla", ["resformer", "attnres"]], ids=str)
def test_a_language_model_opens_as_a_classifier(methods, tmp_path):
    model, ids = build(config_of(methods)), tokens(batch=2, length=9)
    model.save_pretrained(tmp_path)
    options = {"num_labels": 3, "dtype": torch.float64, "output_loading_info": True}
    classifier, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, **options)
    assert set(info["missing_keys"]) == {"score.weight"} and classifier.config.plan == model.config.plan
    ids[1, 6:] = model.config.pad_token_id
    mask = (ids != model.config.pad_token_id).long()
    outputs = classifier(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    last = model.model(ids, attention_mask=mask).last_hidden_state[[0, 1], [8, 5]]  # (B, C)
    close(outputs.logits, classifier.score(last), "logits")
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    classifier.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier", dtype=torch.float64)
    assert torch.equal(again(ids, attention_mask=mask).logits, outputs.logits)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}
