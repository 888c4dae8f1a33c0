"""What cannot be measured is refused in one line, before anything is loaded where that can be."""

import pytest

from crosslayer.verbs.bench.result import BenchSettings
from crosslayer.verbs.bench.run import bench
from tests.cli.test_cli import run
from tests.helpers.benches import short
from tests.helpers.tiny import tiny


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contexts": (0,)}, r"contexts\.0 must be greater than 0"),
        ({"contexts": ()}, "contexts must have at least one"),
        ({"contexts": 8}, "^contexts must be a list, got 8$"),
        ({"seed": -1}, "seed must be greater than or equal to 0"),
        ({"seed": 2**64}, "seed must be less than"),
        ({"batches": (1, -2)}, r"batches\.1 must be greater than 0"),
        ({"new_tokens": 0}, "new_tokens must be greater than 0"),
        ({"repeats": 0}, "repeats must be greater than 0, got 0"),
        ({"contexts": ("x",)}, r"contexts\.0 must be a valid integer"),
        ({"attention": ("flex",)}, r"attention\.0 must be 'sdpa' or 'eager'"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        bench("./nowhere", "./nowhere", **settings)
    assert "\n" not in str(error.value)  # and nothing was loaded


def test_a_context_that_is_named_twice_is_measured_once():
    settings = BenchSettings(contexts=[16, 8, 16], batches=range(1, 3), new_tokens=1, repeats=1, seed=0)
    assert settings.contexts == (16, 8) and settings.batches == (1, 2)


def test_models_that_are_refused():
    with pytest.raises(ValueError, match="bench needs"):
        short(tiny("llama"), tiny("bert"), 12)
    with pytest.raises(ValueError, match="context 65.*64 positions.*LlamaForCausalLM"):
        short(tiny("llama"), tiny("llama"), 65)


def test_learned_positions_end_and_rotary_positions_go_on():
    short(tiny("llama"), tiny("llama"), 64, new_tokens=2)
    with pytest.raises(ValueError, match="context 63.*2 new.*64 positions.*GPT2LMHeadModel"):
        short(tiny("gpt2"), tiny("llama"), 63, new_tokens=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--contexts", "512,x"], "--contexts must be whole numbers separated by commas"),
        (["--batches", "0"], "--batches must be greater than 0, got 0"),
        (["--contexts", ""], "got ''"),
        (["--new-tokens", "0"], "--new-tokens must be greater than 0, got 0"),
        (["--attention", "sdpa,flash"], "must be 'sdpa' or 'eager'"),
        (["--contexts", "4"], "bench needs a causal LM"),
    ],
)
def test_bad_input_is_one_line_and_status_2(monkeypatch, capsys, words, message):
    assert run(monkeypatch, "bench", "minilm", "--baseline", "minilm", *words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading")]
    assert len(lines) == 1 and lines[0].startswith("crosslayer: error: ") and message in lines[0]
