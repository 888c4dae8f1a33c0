"""A plain model of ours, as `train` writes one without a method, is retrofitted and healed as it is."""

import pytest
import torch
from safetensors.torch import load_file

import crosslayer
from crosslayer.decoder.weights import to_model
from tests.helpers.recovery import original_in, recipe_in, retrofit_in


def test_all_is_as_with_the_same_weights_in_transformers_llama(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "cache"))
    stock, tokenizer = crosslayer.load_model(str(original_in(tmp_path)))
    to_model(stock).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    settings, ends, weights = ["stages.1.schedule.steps=2", "baseline=false"], [], []
    for name in ("original", "ours"):
        folder = tmp_path / f"{name} rewired"
        folder.mkdir()
        rewired, out = retrofit_in(folder, tmp_path / name, "fitted"), tmp_path / f"{name} healed"
        weights.append(load_file(rewired / "model.safetensors"))
        recipe = recipe_in(folder)
        recovery = crosslayer.heal([rewired], recipe, out, original=str(tmp_path / name), settings=settings)
        ends.append([domain.damage.kl for domain in recovery.arms[0].states[-1].domains])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
