"""How text chooses layers: by similarity."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.verbs.retrofit import strategy as strategy_module
from tests.helpers.tiny import VOCABULARY, tiny

LAYERS = 6


@pytest.fixture(scope="module")
def source():
    return tiny("llama", num_hidden_layers=LAYERS)


def text(sequences=8, length=12):
    return torch.randint(3, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(1))


def retrofitted(source, **options):
    ids = {"a": text(90), "b": text(90).flip(0)}
    sizes = {"windows": 32, "length": 12} | ({} if isinstance(options["method"], dict) else {"layers": "auto,count=2"})
    return crosslayer.retrofit(source, ids, **{**sizes, **options})


def test_llm_drop_takes_the_most_similar_attentions_of_the_top_half(source, monkeypatch):
    similarity = np.array([0.9, 0.8, 0.7, 0.1, 0.3, 0.2])
    monkeypatch.setattr(
        strategy_module, "diagnose", lambda *_, **__: SimpleNamespace(attention_io_similarity=similarity)
    )
    options = {"method": "drop", "compensation": "none"}
    assert retrofitted(source, layers="auto,count=2", **options).methods[0]["attention"] == (0, 1)
    way = "auto:top-half-similarity"
    assert retrofitted(source, layers=f"{way},count=2", **options).methods[0]["attention"] == (4, 5)
    with pytest.raises(ValueError, match="`layers`:.*3,.*4"):
        retrofitted(source, layers=f"{way},count=4", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "cla", "layers": "auto:top-half-similarity"}, "auto must be one of 'similarity', got"),
        (
            {"method": "drop", "layers": "auto:nearest"},
            "`layers` must be one of .*auto:similarity, .*got 'auto:nearest'",
        ),
        (
            {"method": "drop", "layers": "auto,threshold=0.8"},
            "`layers`: auto takes count=…, each once, got 'threshold=0.8'",
        ),
        ({"method": "cla", "layers": "top-half,threshold=0.5"}, "top-half takes size=…, count=…"),
        ({"method": "cla", "compensation": "none,groups=2"}, "none takes no settings, got 'groups=2'"),
        ({"method": "cla", "compensation": "mean,groups"}, "mean takes target=…, groups=…, each once, got 'groups'"),
    ],
    ids=str,
)
def test_choices_that_cannot_be(source, options, message):
    with pytest.raises(ValueError, match=message):
        retrofitted(source, **options)
