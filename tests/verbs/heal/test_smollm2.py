"""The smoke recipe on a real model: a retrofit of SmolLM2 recovers a little, and more than by chance."""

from pathlib import Path

import pytest

import crosslayer
from crosslayer.judge.report import Against

SMOKE = Path(__file__).parents[3] / "crosslayer" / "recipes" / "heal-smoke.yaml"


@pytest.mark.slow
def test_a_retrofit_of_smollm2_recovers(tmp_path):
    report = crosslayer.retrofit("smollm2", method="uniattn", compensation="zero", windows=96, length=32)
    report.save(tmp_path / "small")
    recovery = crosslayer.heal([tmp_path / "small"], SMOKE, tmp_path / "out", settings=["train.bf16=true"])
    assert recovery.original == "smollm2" and not recovery.seen
    _, first, second = recovery.variants[0].states
    changes = [recovery.of("small", state, "KL", against=Against.BEFORE) for state in (first, second)]
    assert [change.verdict for change in changes] == ["lower", "lower"]
    assert recovery.variants[0].states[0].held_out["web"] > second.held_out["web"]
    assert first.run.trained == 9 * 576**2
