"""Text comes as a stream, and its figures are those of the run."""

import json

import pytest
import torch

from crosslayer import load_model
from crosslayer.verbs.generate.run import Continuation, generate
from tests.cli.test_cli import run
from tests.helpers.saved import ours, save


@pytest.fixture
def saved(tmp_path):
    return save(ours("svformer"), tmp_path / "model")


def test_generate_streams_and_ends_with_its_figures(monkeypatch, saved, capsys):
    assert run(monkeypatch, "generate", saved, "the whale w9", "--max-new-tokens", 5) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    headline = json.loads(lines[-1])
    assert set(headline) == {
        "model",
        "new_tokens",
        "seconds",
        "tokens_per_second",
        "cache_bytes",
        "kv_share",
        "kv_bits",
        "cached_tokens",
        "quantized_tokens",
    }
    model, words = load_model(str(saved))
    ids = words("the whale w9", return_tensors="pt")["input_ids"]
    again = model.generate(ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids))
    assert lines[0] == words.decode(again[0, 3:], skip_special_tokens=True) and headline["new_tokens"] == 5
    states = sum(len(model.config.plan.stored(layer)) for layer in range(6))
    assert headline["cache_bytes"] == states * 7 * 2 * 8 * 4  # the last token is never fed


def test_the_call_returns_what_the_command_prints(monkeypatch, saved, capsys):
    model, words = load_model(str(saved))
    pieces, before = [], torch.get_rng_state()
    continuation = generate(
        model, "the whale w9", words, max_new_tokens=5, temperature=2.0, seed=1, write=pieces.append
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert "".join(pieces) == continuation.text and continuation.prompt == "the whale w9"
    again = generate(saved, "the whale w9", max_new_tokens=5, temperature=2.0, seed=1)
    assert (again.text, again.cache_bytes, again.model) == (continuation.text, continuation.cache_bytes, "model")
    options = ["--max-new-tokens", 5, "--temperature", 2, "--seed", 1]
    assert run(monkeypatch, "generate", saved, "the whale w9", *options) == 0
    assert capsys.readouterr().out.splitlines()[0] == continuation.text
    assert Continuation.model_validate(continuation.model_dump()) == continuation


@pytest.mark.parametrize("bits", ["8", "4", "2", "fp8"])
def test_a_short_text_takes_no_more_bytes_with_fewer_bits(saved, bits):
    plain = generate(saved, "the whale w9", max_new_tokens=5)
    fewer = generate(saved, "the whale w9", max_new_tokens=5, kv_bits=bits)
    assert fewer.cache_bytes <= plain.cache_bytes
    assert ("latest 64" in fewer.sentences()[-1]) == (bits in "42")  # what stays exact
    assert fewer.quantized_tokens == (0 if bits in "42" else 7) and fewer.cached_tokens == 7
    assert plain.sentences() == [""] and plain.quantized_tokens == 0


@pytest.mark.parametrize("bits", ["4", "8"])
def test_a_longer_text_says_how_many_tokens_are_quantized(saved, bits):
    model, words = load_model(str(saved))
    model.config.max_position_embeddings = 128
    longer = generate(model, " ".join(["the whale w9"] * 30), words, max_new_tokens=5, kv_bits=bits)
    assert longer.cached_tokens == 94
    assert longer.quantized_tokens == (94 if bits == "8" else 94 - 63 - 1)  # the first and the latest are exact
    assert str(longer.quantized_tokens) in longer.sentences()[-1]


def test_the_call_refuses_what_is_wrong_before_it_loads(saved):
    for options, message in (
        ({"max_new_tokens": 0}, "^max_new_tokens .*greater than or equal to 1.* 0$"),
        ({"temperature": 1e-9}, "^`temperature` must be 0 .* got 1e-09$"),
        ({"seed": 2**64}, "^seed .*less than"),
        ({"temperature": float("nan")}, "^`temperature` must be 0 .* got nan$"),
    ):
        with pytest.raises(ValueError, match=message):
            generate("./nowhere", "the whale", **options)
    with pytest.raises(ValueError, match="tokenizer="):
        generate(load_model(str(saved))[0], "the whale")


def test_generate_samples_by_its_seed(monkeypatch, saved, capsys):
    texts = []
    for seed in (1, 1, 2):
        assert (
            run(monkeypatch, "generate", saved, "the whale", "--temperature", 2, "--seed", seed, "--max-new-tokens", 9)
            == 0
        )
        texts.append(capsys.readouterr().out.splitlines()[0])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "values",
    [{"return_dict_in_generate": True}, {"cache_implementation": "static"}, {"num_beams": 3}],
    ids=str,
)
def test_generate_does_not_depend_on_the_folders_generation_config(monkeypatch, saved, capsys, values):
    (saved / "generation_config.json").write_text(json.dumps(values))
    assert run(monkeypatch, "generate", saved, "the whale w9", "--max-new-tokens", 3) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["new_tokens"] <= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["  "], "the prompt is empty"),
        (["the whale", "--chat"], "no chat template"),
        (["the " * 70], "the model's 64 positions"),
        (["the whale", "--temperature", "-1"], "--temperature must be 0 (greedy) or 0.001-1000.0, got -1.0"),
        (["the whale", "--dtype", "int3"], "int3"),
    ],
)
def test_generate_refuses_in_one_line(monkeypatch, saved, capsys, words, message):
    assert run(monkeypatch, "generate", saved, *words) == 2
    captured = capsys.readouterr()
    *_, line = lines = captured.err.splitlines()
    assert line.startswith("crosslayer: error: ") and message in line and not captured.out
    assert sum("error" in word for word in lines) == 1, lines


def test_generate_refuses_an_encoder(monkeypatch, capsys):
    assert run(monkeypatch, "generate", "minilm", "hello") == 2
    assert "generate needs" in capsys.readouterr().err
