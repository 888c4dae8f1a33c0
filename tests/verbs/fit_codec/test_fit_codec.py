"""A codec is fitted, measured, saved and loaded; what it costs is what a plain loop says."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import crosslayer
from crosslayer.codec.fit import tokens_needed
from crosslayer.codec.states import read_shapes
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.codecs import random_ids
from tests.helpers.tiny import tiny

OPTIONS = {"calibration": 8, "length": 60, "windows": 4, "prompt": 40, "continued": 12, "repeats": 1}
TEXTS = {"calibration_text": {"a": random_ids(8, 60)}, "text": {"b": random_ids(4, 52, 1), "c": random_ids(4, 52, 2)}}


@pytest.fixture(scope="module")
def fitted():
    model = tiny("llama").float()
    return model, crosslayer.fit_codec(model, share=0.5, **OPTIONS, **TEXTS)


def test_the_row_of_the_codec_is_what_a_loop_says(fitted):
    model, report = fitted
    costs, sizes = [], []
    for name in ("b", "c"):
        for row in TEXTS["text"][name][:2]:
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(row[None, :40], **{CACHE: cache})
                data = report.codec.encode(cache, row[:40])
                exact = model(row[None]).logits[0, 40:].log_softmax(-1)
                other = model(row[None, 40:], **{CACHE: report.codec.decode(data)}).logits[0].log_softmax(-1)
            costs.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
            sizes.append(len(data) / (40 * report.bytes_per_token))
    kl, sizes_of = report.changes("KL"), report.changes("bytes")
    assert kl["codec"].value == pytest.approx(np.mean(costs), rel=0.01, abs=1e-6)
    assert sizes_of["codec"].value == pytest.approx(np.mean(sizes), rel=1e-6)
    assert report.row("codec", "KL", "b").value == pytest.approx(np.mean(costs[:2]), rel=0.01, abs=1e-6)
    assert sizes_of["fp8"].value > sizes_of["codec × 0.5"].value


def test_break_even_is_where_two_ways_take_equally_long(fitted):
    _, report = fitted
    found, time = report.break_even(), report.row("codec", "decoding")
    wide = 40 * report.bytes_per_token
    own = wide * report.changes("bytes")["codec"].value
    if found.prefill is None:
        assert time.value >= time.original
    else:
        assert own / found.prefill + time.value == pytest.approx(time.original)
    for rate, other in ((found.wide, wide), (found.fp8, wide / 2)):
        if rate is None:
            assert own >= other
        else:
            assert own / rate + time.value == pytest.approx(other / rate)


def test_coarser_steps_of_one_fit_are_measured_too(fitted):
    _, report = fitted
    names = ("codec", "codec × 0.5", "codec × 0.25")
    shares, costs = ([report.changes(quantity)[name].value for name in names] for quantity in ("bytes", "KL"))
    assert shares == sorted(shares, reverse=True) and costs == sorted(costs)


def test_a_prompt_is_no_longer_than_what_all_layers_hold():
    model = tiny("mistral", sliding_window=32).float()
    options = {**OPTIONS, "prompt": 32}
    with pytest.raises(ValueError, match="`prompt` must be at most 31, .*got 32"):
        crosslayer.fit_codec(model, share=0.5, **options, **TEXTS)
    assert crosslayer.fit_codec(model, share=0.5, **{**options, "prompt": None}, **TEXTS).settings.prompt == 31


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"model": "smollm2", "out": "mine"}, "smollm2 --codec mine"),
        ({"model": "a b", "out": "codec"}, "'a b' --codec codec"),
        ({"model": "smollm2"}, None),
        (None, None),
    ],
)
def test_the_next_command_has_the_model_and_the_folder_that_were_typed(fitted, typed, expected):
    report = fitted[1].model_copy(update={"typed": typed})
    expected = expected and f"crosslayer serve {expected} --prompt-store prompts"
    assert report.next_command() == expected
    assert report.next_command("/a b", "c") == "crosslayer serve '/a b' --codec c --prompt-store prompts"


def test_a_report_has_the_codec_in_its_folder(fitted, tmp_path):
    model, report = fitted
    report.save(tmp_path / "codec")
    assert {path.name for path in (tmp_path / "codec").iterdir()} == {
        "codec.safetensors", "figures", "record.json", "report.html"
    }  # fmt: skip
    assert crosslayer.load_codec(tmp_path / "codec", model).id == report.codec.id
    loaded = crosslayer.load_result(tmp_path / "codec")
    assert loaded.record() == report.record() and loaded.headline() == report.headline()
    with pytest.raises(ValueError, match="load_codec"):
        _ = loaded.codec
    report.save(tmp_path / "codec", force=True)


def test_a_damage_may_be_asked_for():
    model = tiny("llama").float()
    costs = []
    for kl in (1e-3, 1e-2):
        report = crosslayer.fit_codec(model, kl=kl, **OPTIONS, **TEXTS)
        costs.append(report.changes("KL")["codec"].value)
    assert costs[0] == pytest.approx(1e-3, rel=1) and costs[1] == pytest.approx(1e-2, rel=1)  # two windows a domain


@pytest.mark.parametrize(
    ("options", "match"),
    [({"share": 1.5}, "share"), ({"kl": 0.0}, "kl"), ({"prompt": 4}, "prompt"), ({"prompt": 60}, "64")],
)
def test_wrong_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        crosslayer.fit_codec(tiny("llama").float(), **{**OPTIONS, **options}, **TEXTS)


def test_too_little_calibration_is_refused_before_it_is_read():
    """A layer that keeps W numbers for a token is predicted from two others, from every fourth token: 8 W tokens."""
    model, calls = tiny("llama", num_key_value_heads=4, head_dim=32).float(), [0]
    shapes = read_shapes(model)
    needed = tokens_needed(shapes)
    assert needed == 8 * shapes[0].width + 4
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    windows = -(-needed // (OPTIONS["length"] - 1))
    with pytest.raises(ValueError, match=f"{windows} windows"):
        crosslayer.fit_codec(model, share=0.5, **OPTIONS, **TEXTS)
    assert calls[0] < 8  # to find how keys turn


def test_an_encoder_is_refused_by_name():
    with pytest.raises(ValueError, match="causal LM, got BertModel"):
        crosslayer.fit_codec(tiny("bert"), **OPTIONS, **TEXTS)
