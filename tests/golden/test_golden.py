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
    **dict.fromkeys(("retrofit", "retrofit-search"), r"settings\.(size|threshold|groups)"),
    "retrofit-latents": r".*",  # the method kv_latents was removed: docs/LOG.md
    "retrofit-choice": r"settings\.(size|threshold|groups)|choice\.search\.passes",
    # it follows from the pairs; a configuration is a scope, in words; `measure` judges quantized caches
    "bench": r"interval_coverage|rows\.0\.(context|batch)|rows\.0\.quantised\..*",
    "compare": r"runs\.\d+\.length",  # only trends over lengths used it
    "heal": r"recipe\.objective\.hidden",  # a recipe is written without it where it is 0
}
MODELS = [
    (r"(?:models\.)?candidate\.(layers|parameters)", r"candidates.0.model.\1"),
    (r"(?:models\.)?baseline\.(layers|parameters)", r"original.model.\1"),
    (r"models\.candidate\.(bytes|requests|shortened)", r"candidates.0.details.\1"),
    (r"models\.baseline\.(bytes|requests|shortened)", r"original.details.\1"),
]
ENDS = [(r"(.*)\.interval\.0", r"\1.low"), (r"(.*)\.interval\.1", r"\1.high")]
RETROFITS = [name for name in RECORDS if name.startswith("retrofit")]
DAMAGE = [  # KL and ratio, but for the KL of heal's ranking; the number of windows is that of the KL
    (r"(?!order\.)(.*\.(?:kl|ratio))", r"\1.value"),
    (r"((?:.*\.)?damage(?:\..*)?)\.windows", r"\1.kl.n"),
    (r"(.*)\.(?:minus_retrofit|search_minus_baseline)(_ci95.*)?", r"\1.change\2"),
    (r"(.*\.change)", r"\1.value"),
    (r"(.*?)[._]ci95\.0", r"\1.low"),
    (r"(.*?)[._]ci95\.1", r"\1.high"),
]
# where a schema has moved numbers to, by record: old path, new path, one after the other
MOVED = {
    "compare": [
        (r"(outcomes\..*\.(?:final|domains\.\w+))\.mean", r"\1.change.value"),
        (r"(outcomes\..*)\.(interval\..|p)", r"\1.change.\2"),
        *ENDS,
    ],
    "bench": [
        *MODELS,
        (r"rows\.0\.cache\.dynamic\.(.*)", r"rows.0.\1"),
        (r"rows\.0\.cache\.static\.(.*)", r"rows.1.\1"),
        (r"rows\.0\.reads\.(.*)", r"rows.2.\1"),
        (r"(rows\..)\.candidate", r"\1.details.stored"),
        (r"(rows\..)\.baseline", r"\1.details.original_stored"),
        (r"(rows\..)\.ratio", r"\1.change.value"),
    ],
    "needles": MODELS,
    "evaluate": [
        *MODELS,
        (r"(rows\..)\.candidate\.value", r"\1.value"),
        (r"(rows\..)\.baseline\.value", r"\1.original"),
        (r"(rows\..)\.candidate\.stderr", r"\1.details.stderr"),
        (r"(rows\..)\.baseline\.stderr", r"\1.details.original_stderr"),
        (r"(rows\..)\.(items|shots)", r"\1.details.\2"),
        (r"(rows\..)\.paired\.estimate", r"\1.change.value"),
        (r"(rows\..)\.paired\.(interval\..|p)", r"\1.change.\2"),
        (r"(rows\..)\.paired\.discordant\.candidate", r"\1.details.only_candidate"),
        (r"(rows\..)\.paired\.discordant\.baseline", r"\1.details.only_original"),
        (r"(rows\..)\.paired\.items_for_a_point", r"\1.details.items_for_a_point"),
        *ENDS,
    ],
    **dict.fromkeys(RETROFITS, DAMAGE),
    "heal": [*DAMAGE, (r"recipe\.eval\.(.*)", r"recipe.judge.\1")],
}
# what an `Estimate` says beside them, and which windows were used
NEW = {
    **dict.fromkeys(("compare", "evaluate"), r".*\.change\.(n|none)"),
    **dict.fromkeys(RETROFITS, r"windows\..*|.*\.none|(.*gain|alternatives.*|choice.*)\.kl\.n|.*(?<!\.kl)\.n"),
    "heal": r".*\.none|.*(?<!\.kl)\.n|recipe\.(eval\..*|save_minutes)",  # keys that training has
    # bytes in 16 bits, and rows of times, which were fields of names that say so
    "bench": r"rows\.[0-2]\.(original|value|change\.(n|none|low|high))|rows\.[3-9]\..*",
    "needles": r"rows\..*",
}


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


@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_are_what_they_were(name):
    def without(numbers, paths):
        return {path: value for path, value in numbers.items() if not re.fullmatch(paths.get(name, "-"), path)}

    found = without(without(measure(name) if name in RECORDS else {}, LEFT), NEW)
    golden = {moved(path, name): value for path, value in without(GOLDEN[name], LEFT).items()}
    assert sorted(found) == sorted(golden)
    wrong = {
        path: (value, found[path]) for path, value in golden.items() if found[path] != pytest.approx(value, **TOLERANCE)
    }
    assert wrong == {}
