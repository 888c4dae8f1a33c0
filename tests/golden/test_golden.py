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
    "retrofit-choice": r"choice\.search\.passes",  # the dynamic programming ran more configurations
    "compare": r"runs\.\d+\.length",  # only trends over lengths used it
}
# paths that a schema has moved, old to new, and those that it has added, by record
MOVED = {"heal": [(r"(.*)\.ci95\.0", r"\1.low"), (r"(.*)\.ci95\.1", r"\1.high")]}
NEW = {"heal": r".*\.(n|none)"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("name", RECORDS)
def test_numbers_are_what_they_were(name):
    def without(numbers, pattern):
        return {path: value for path, value in numbers.items() if not re.fullmatch(pattern, path)}

    def moved(path):
        for old, new in MOVED.get(name, []):
            path = re.sub(f"^{old}$", new, path)
        return path

    golden = {moved(path): value for path, value in without(GOLDEN[name], LEFT.get(name, "-")).items()}
    assert golden == without(golden, NEW.get(name, "-"))
    found = without(without(measure(name), LEFT.get(name, "-")), NEW.get(name, "-"))
    assert sorted(found) == sorted(golden)
    wrong = {
        path: (value, found[path]) for path, value in golden.items() if found[path] != pytest.approx(value, **TOLERANCE)
    }
    assert wrong == {}
