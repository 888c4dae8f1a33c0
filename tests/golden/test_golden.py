"""The numbers of every comparison stay what they were while its code is rewritten."""

import json
import re

import pytest

from tests.golden.records import NUMBERS, RECORDS, measure

GOLDEN = json.loads(NUMBERS.read_text())
# float32 sums differ by kernel and by machine; what is rounded to a rank or to bits does not
TOLERANCE = {"rel": 2e-3, "abs": 2e-5}
# paths that a schema no longer has, by record, and why
LEFT = {
    # settings of `layers` and `compensation` are in their texts; the dynamic programming ran more configurations
    **dict.fromkeys(("retrofit", "retrofit-search", "retrofit-latents"), r"settings\.(size|threshold|groups)"),
    "retrofit-choice": r"settings\.(size|threshold|groups)|choice\.search\.passes",
    "bench": r"interval_coverage",  # it follows from the pairs, and fewer than five give no interval
    "compare": r"runs\.\d+\.length",  # only trends over lengths used it
}
ENDS = [(r"(.*)\.interval\.0", r"\1.low"), (r"(.*)\.interval\.1", r"\1.high")]
# where a schema has moved numbers to, by record: old path, new path, one after the other
MOVED = {
    "compare": [
        (r"(outcomes\..*\.(?:final|domains\.\w+))\.mean", r"\1.change.value"),
        (r"(outcomes\..*)\.(interval\..|p)", r"\1.change.\2"),
        *ENDS,
    ],
    "evaluate": [
        (r"(.*)\.paired\.estimate", r"\1.paired.change.value"),
        (r"(.*)\.paired\.(interval\..|p)", r"\1.paired.change.\2"),
        *ENDS,
    ],
    "heal": [(r"(.*)\.ci95\.0", r"\1.low"), (r"(.*)\.ci95\.1", r"\1.high")],
}
# what an `Estimate` says beside them
NEW = dict.fromkeys(("compare", "evaluate"), r".*\.change\.(n|none)") | {"heal": r".*\.(n|none)"}


def moved(path, name):
    """Return the path that a number has now."""
    for old, new in MOVED.get(name, ()):
        path = re.sub(rf"^{old}$", new, path)
    return path


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("name", RECORDS)
def test_numbers_are_what_they_were(name):
    def without(numbers, paths):
        return {path: value for path, value in numbers.items() if not re.fullmatch(paths.get(name, "-"), path)}

    found = without(without(measure(name), LEFT), NEW)
    golden = {moved(path, name): value for path, value in without(GOLDEN[name], LEFT).items()}
    assert sorted(found) == sorted(golden)
    wrong = {
        path: (value, found[path]) for path, value in golden.items() if found[path] != pytest.approx(value, **TOLERANCE)
    }
    assert wrong == {}
