"""An error in the options of a verb names every option that is wrong."""

import pytest

import crosslayer
from crosslayer.cli.errors import explain
from crosslayer.verbs.bench.result import BenchSettings
from crosslayer.verbs.needles.result import NeedlesSettings
from crosslayer.verbs.retrofit.run import options_of

NEEDLES = {"lengths": (256,), "depths": (0,), "keys": 1, "samples": 1, "new_tokens": 8, "batch": 1, "seed": 0}


@pytest.mark.parametrize(
    ("settings", "options", "wrong"),
    [
        (BenchSettings, {"contexts": (0,), "new_tokens": 0, "repeats": -1}, ("contexts", "new_tokens", "repeats")),
        (NeedlesSettings, NEEDLES | {"samples": 0, "new_tokens": 0}, ("samples", "new_tokens")),
        (NeedlesSettings, NEEDLES | {"lengths": (20,), "keys": 0, "depths": (101,)}, ("lengths", "keys", "depths")),
        (
            options_of,
            {"method": "cla", "size": 1, "length": 1, "calibration": 0},
            ("size", "length", "calibration"),
        ),
    ],
)
def test_every_wrong_option_is_named_once(settings, options, wrong):
    with pytest.raises(ValueError) as error:
        settings(**options)
    parts = str(error.value).split("; ")
    assert len(parts) == len(wrong) and all(part.count(", got ") == 1 for part in parts)
    _, line = explain(error.value, options)
    assert [name for name in wrong if f"--{name.replace('_', '-')}" not in line] == []


def test_sequences_and_length_of_a_text_are_named_together():
    with pytest.raises(ValueError, match="`sequences` .*`length` ") as error:
        crosslayer.diagnose("smollm2", "some words", sequences=0, length=1)
    assert "\n" not in str(error.value)
