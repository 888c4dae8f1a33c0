"""The numbers of every comparison stay what they were while its code is rewritten."""

import json

import pytest

from tests.golden.records import NUMBERS, RECORDS, measure

GOLDEN = json.loads(NUMBERS.read_text())
# float32 sums differ by kernel and by machine; what is rounded to a rank or to bits does not
TOLERANCE = {"rel": 2e-3, "abs": 2e-5}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("name", RECORDS)
def test_numbers_are_what_they_were(name):
    found = measure(name)
    assert sorted(found) == sorted(GOLDEN[name])
    wrong = {
        path: (value, found[path])
        for path, value in GOLDEN[name].items()
        if found[path] != pytest.approx(value, **TOLERANCE)
    }
    assert wrong == {}
