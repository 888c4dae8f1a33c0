"""`diagnose --choices`: its matrices against loops over the model's maps, its figures, and what is refused."""

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.probe.intercept import visited
from crosslayer.verbs.diagnose.choices import SHARES, choice_sentence
from crosslayer.verbs.diagnose.result import ChosenTokens
from tests.helpers.tiny import tiny, tokens

LENGTH = 100  # a quarter is more than the tokens that are always chosen


def recovered_by_loops(calls, share):
    """Return (L, L), chooser first, and the same without the first token: rows in which not all tokens are chosen."""
    whole, first, rows = np.zeros((3, 3)), np.zeros(3), 0
    for row in range(LENGTH):
        count = max(-int(-(share * (row + 1) - 1e-9) // 1), 20)
        if count >= row + 1:
            continue
        rows += 1
        for head in range(2):
            masses, kept = [], []
            for call in calls:
                keys = call.key[0, head, : row + 1]
                maps = [(call.query[0, 2 * head + i, row] @ keys.T * call.scaling).softmax(-1) for i in range(2)]
                mass = (maps[0] + maps[1]) / 2
                always = {*range(4), *range(row - 15, row + 1)}
                others = sorted((j for j in range(row + 1) if j not in always), key=lambda j: -float(mass[j]))
                masses.append(mass)
                kept.append(sorted(always | set(others[: count - 20])))
            for chooser in range(3):
                for reader in range(3):
                    whole[chooser, reader] += float(masses[reader][kept[chooser]].sum()) / 2
            first += np.array([float(mass[0]) for mass in masses]) / 2
    return whole / rows, (whole - first) / (rows - first)


def test_matrices():
    model, ids, calls = tiny("llama", max_position_embeddings=128).double(), tokens(batch=1, length=LENGTH), []
    with torch.no_grad(), visited(model, calls.append):
        model(ids)
    diagnosis = crosslayer.diagnose(model, ids, choices=True)
    assert [one.share for one in diagnosis.choices] == list(SHARES)
    quarter = diagnosis.choices[-1]
    whole, rest = recovered_by_loops(calls, 0.25)
    np.testing.assert_allclose(quarter.recovered.array(), whole, atol=1e-9)
    np.testing.assert_allclose(quarter.without_first.array(), rest, atol=1e-9)
    assert (quarter.best_heads.array() >= quarter.recovered.array() - 1e-12).all()
    assert np.isnan(quarter.common.array()[0]) and 0.8 < quarter.common.array()[1] <= 1
    assert "its attention" in diagnosis.sentences()[-1]


def test_the_page_shows_it(tmp_path):
    diagnosis = crosslayer.diagnose(tiny("gemma2", "eager"), tokens(length=24), choices=False)
    assert diagnosis.choices is None
    diagnosis = crosslayer.diagnose(tiny("llama", max_position_embeddings=128), tokens(length=LENGTH), choices=True)
    diagnosis.save(tmp_path / "out")
    assert {"chosen_tokens", "chosen_by_distance"} <= {file.stem for file in (tmp_path / "out").rglob("*.svg")}
    assert crosslayer.load_result(tmp_path / "out").choices[0].share == SHARES[0]


def test_layers_that_cannot_choose_are_left_out_of_the_sentence():
    """Layers 1 and 3 of four attend to all tokens; the nearest below layer 3 that can choose is layer 1."""
    recovered = np.full((4, 4), np.nan)
    recovered[1, 1], recovered[3, 3], recovered[1, 3], recovered[3, 1] = 0.9, 0.7, 0.5, 0.1
    common = [None, None, None, 0.6]
    square = [[None if np.isnan(value) else value for value in row] for row in recovered.tolist()]
    fields = {name: {"mean": square, "ci95": None, "n": 1} for name in ("recovered", "best_heads", "without_first")}
    chosen = ChosenTokens(share=1 / 8, **fields, common={"mean": common, "ci95": None, "n": 1})
    sentence = choice_sentence([chosen], np.ones((4, 4)))
    assert "recovers 80%" in sentence and "50%" in sentence
    assert "have 60%" in sentence


def test_refusals():
    with pytest.raises(ValueError, match="`choices`"):
        crosslayer.diagnose(tiny("mistral"), tokens(length=24), choices=True)
    with pytest.raises(ValueError, match="`choices`.*12"):
        crosslayer.diagnose(tiny("llama"), tokens(length=12), choices=True)
