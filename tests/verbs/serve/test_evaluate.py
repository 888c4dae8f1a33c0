"""lm-eval scores a model in vLLM as with transformers."""

import importlib.util

import pytest

import crosslayer
from crosslayer.testing.tiny import build, config_of
from tests.helpers import evaluations
from tests.helpers.text import WORDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see make test-serving"),
]


@pytest.mark.filterwarnings("ignore")  # what vLLM's imports raise
def test_scores_are_those_of_transformers(tmp_path, monkeypatch):
    """Log likelihoods agree to rounding in float32: some 1e-5 of a sum over tokens."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    model = build(config_of(["cla"], head_dim=32, vocab_size=len(WORDS))).float()
    model.save_pretrained(tmp_path / "model")
    evaluations.own_tokenizer().save_pretrained(tmp_path / "model")
    names = ("arc_easy_local", "piqa_local", "lambada_openai_local")
    options = {
        "tasks": names,
        "include_path": evaluations.local_tasks(tmp_path),
        "allow_code": True,
        "dtype": "float32",
    }
    expected = crosslayer.evaluate(tmp_path / "model", device="cpu", **options)
    found = crosslayer.evaluate(tmp_path / "model", engine="vllm", **options)
    assert "Scored with vLLM." in found.sentences() and found.settings.engine == "vllm"
    served, ours = found.candidates[0], expected.candidates[0]
    assert served.model.device == "cpu" and served.model.parameters == ours.model.parameters
    assert served.details["requests"] == ours.details["requests"]
    assert [(row.scope, row.quantity) for row in found.rows] == [(row.scope, row.quantity) for row in expected.rows]
    scores = [[row.value for row in one.rows] for one in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    for task in names:
        samples = (one.lm_eval_results["candidate"]["samples"][task] for one in (found, expected))
        for theirs, ours in zip(*samples, strict=True):
            scores = [[float(answer[0][0]) for answer in sample["resps"]] for sample in (theirs, ours)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)
