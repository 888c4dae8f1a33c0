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
    layers = {} if isinstance(options["method"], dict) else {"layers": "auto", "count": 2}
    return crosslayer.retrofit(source, ids, **{"windows": 32, "length": 12, **layers, **options})


def test_llm_drop_takes_the_most_similar_attentions_of_the_top_half(source, monkeypatch):
    similarity = np.array([0.9, 0.8, 0.7, 0.1, 0.3, 0.2])
    monkeypatch.setattr(
        strategy_module, "diagnose", lambda *_, **__: SimpleNamespace(attention_io_similarity=similarity)
    )
    options = {"method": "drop", "compensation": "none", "count": 2}
    assert retrofitted(source, layers="auto", **options).methods[0]["attention"] == (0, 1)
    way = "auto:top-half-similarity"
    assert retrofitted(source, layers=way, **options).methods[0]["attention"] == (4, 5)
    with pytest.raises(ValueError, match="`count`.*3,.*4"):
        retrofitted(source, layers=way, **options | {"count": 4})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "cla", "layers": "auto:top-half-similarity"}, "auto must be one of 'similarity', got"),
        (
            {"method": "drop", "layers": "auto:nearest"},
            "`layers` must be one of .*auto:similarity, .*got 'auto:nearest'",
        ),
        (
            {"method": "drop", "layers": "auto,count=2"},
            "`layers` must be one of .*got 'auto,count=2'",
        ),
        ({"method": "cla", "size": 3}, "`size` 3 has no effect"),
        ({"method": "cla", "compensation": "none", "groups": 2}, "`groups` 2 has no effect"),
        ({"method": "cla", "layers": "0-1", "count": 2}, "`count` 2 has no effect"),
    ],
    ids=str,
)
def test_choices_that_cannot_be(source, options, message):
    with pytest.raises(ValueError, match=message):
        retrofitted(source, **options)
