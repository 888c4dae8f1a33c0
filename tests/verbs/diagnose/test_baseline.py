"""Two models beside each other: the table of both, the baseline in every figure, and what is refused."""

import json

import pytest
import torch

import crosslayer
from crosslayer.verbs.diagnose.curves import beside
from tests.helpers.text import WORDS, tokenizer, words
from tests.helpers.tiny import tiny, tokens


@pytest.fixture(scope="module")
def both():
    """A model without the attention of layer 1, beside the model that it comes from."""
    model = tiny("llama", dtype=torch.float32)
    small = crosslayer.convert(model, {"name": "drop", "attention": [1]}).model
    return crosslayer.diagnose(small, tokens(), baseline=model), crosslayer.diagnose(model, tokens())


def test_both_are_measured_as_each_alone(both):
    diagnosis, alone = both
    assert diagnosis.baseline is not None and diagnosis.baseline.measures == alone.measures
    assert torch.tensor(diagnosis.entropy).isnan().tolist() == [False, True, False]
    loaded = crosslayer.Diagnosis.from_record(json.loads(json.dumps(diagnosis.record())))
    assert loaded == diagnosis and loaded.page() == diagnosis.page()


def test_the_table_has_a_column_of_each_model(both):
    diagnosis, alone = both
    title, head, rows = beside(diagnosis, alone)
    assert title == "Compared with the baseline" and head[2].endswith("(baseline)")
    columns = {row[0]: row[1:] for row in rows}
    assert columns["layers, with attention"] == ["3, 2", "3, 3"]
    assert columns["entropy of attention, mean over layers"][1] == f"{alone.entropy.mean():.2f} nats"


def test_every_figure_shows_the_baseline(both):
    diagnosis, alone = both
    panels = {panel.key: panel for panel in diagnosis.layout().panels}
    for own in alone.layout().panels:
        if own.heat is not None:
            assert panels[f"{own.key}_baseline"].heat == own.heat
        else:
            lines = panels[own.key].lines
            assert len(lines) == 2 * len(own.lines) and all(line.name for line in lines), own.key
            assert [line.dashed for line in lines[len(own.lines) :]] == [True] * len(own.lines)


def test_a_wrong_baseline_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("crosslayer.verbs.diagnose.run.measure_sequence", None)
    with pytest.raises(ValueError, match="not exist"):
        crosslayer.diagnose(tiny("llama"), tokens(), baseline="./nothing")


def test_the_length_is_as_many_tokens_as_both_models_have_positions(tmp_path):
    short, long = (tiny("llama", max_position_embeddings=size, vocab_size=len(WORDS)) for size in (40, 64))
    documents = [words(start, start + 160) for start in (0, 160, 320)]
    result = crosslayer.diagnose(long, documents, tokenizer(), baseline=short, sequences=2)
    assert result.settings.length == result.baseline.settings.length == 40
    assert crosslayer.diagnose(long, documents, tokenizer(), sequences=2).settings.length == 64
    with pytest.raises(ValueError, match="80.*64"):
        crosslayer.diagnose(long, documents, tokenizer(), sequences=2, length=80)
    effect = crosslayer.intervene(long, documents, tokenizer(), interventions=[crosslayer.waiver(20)], sequences=2)
    assert effect.settings.length == 64
