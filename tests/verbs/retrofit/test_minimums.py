"""The least text of a retrofit: all that is too little is named at once, and `quick` takes just as much."""

import re

import pytest
import torch

import crosslayer
from crosslayer.verbs.retrofit.result import RetrofitReport
from tests.helpers.daily import daily
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import VOCABULARY, tiny

LENGTH = 16


def ids(count, seed):
    return torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


TEXT = {"web": ids(120, 0), "code": ids(120, 1), "docs": ids(120, 2)}


@pytest.fixture(scope="module")
def source():
    return tiny("llama", dtype=torch.float32, num_hidden_layers=8)


def least(message):
    found = dict(re.findall(r"`(\w+)` must be at least (\d+)", message))
    return {option: int(count) for option, count in found.items()}


OPTIONS = [{"kv_budget": 0.7}, {"method": "uniattn"}, {"method": "drop", "layers": "6"}]


@pytest.mark.parametrize("options", daily(OPTIONS, OPTIONS[0]))
def test_all_that_is_too_little_is_named_at_once_and_that_much_is_enough(source, options):
    with pytest.raises(ValueError, match="`quick`") as error:
        crosslayer.retrofit(source, TEXT, **options, windows=17, calibration=2, length=LENGTH)
    enough = least(str(error.value))
    assert set(enough) == {"windows", "calibration"} and enough["windows"] == 48
    fewer = enough | {"calibration": enough["calibration"] - 1}
    with pytest.raises(ValueError, match="`calibration`") as error:
        crosslayer.retrofit(source, TEXT, **options, **fewer, length=LENGTH)
    assert least(str(error.value)) == {"calibration": enough["calibration"]}
    report = crosslayer.retrofit(source, TEXT, **options, **enough, length=LENGTH)
    quick = crosslayer.retrofit(source, TEXT, **options, quick=True)
    assert vars(quick.settings).items() >= (enough | {"length": LENGTH}).items()
    assert quick.rows == report.rows and quick.methods == report.methods


def test_a_quick_look_is_marked_everywhere(source, tmp_path):
    report = crosslayer.retrofit(source, TEXT, method="cla", layers="6-7", quick=True)
    assert report.headline()["quick"] is True
    assert "--quick" in report.sentences()[0] and "quick" in report.layout().title
    report.save(tmp_path / "small")
    card, page = ((tmp_path / "small" / name).read_text() for name in ("README.md", "report.html"))
    assert "--quick" in card and "--quick" in page and "windows=" not in card and "quick=True" in card
    read = crosslayer.load_result(tmp_path / "small")
    assert isinstance(read, RetrofitReport) and read == report and read.settings.quick
    whole = crosslayer.retrofit(source, TEXT, method="cla", layers="6-7", windows=48, calibration=12, length=LENGTH)
    assert "quick" not in whole.headline() and "quick" not in whole.layout().title
    assert not any("--quick" in line for line in whole.sentences())


def test_the_windows_of_a_quick_look_at_documents_are_short():
    model = tiny("llama", dtype=torch.float32, vocab_size=len(WORDS), max_position_embeddings=256)
    documents = [" ".join(f"w{(7 * start + n * n) % 500}" for n in range(900)) for start in range(6)]
    options = {"method": "cla", "layers": "1-2", "compensation": "none"}
    report = crosslayer.retrofit(model, documents, tokenizer(), **options, quick=True)
    assert (report.settings.windows, report.settings.length) == (16, 128)


@pytest.mark.parametrize("option", ["windows", "calibration", "length"])
def test_what_quick_decides_is_not_given_beside_it(source, option):
    with pytest.raises(ValueError, match=f"`{option}` has no effect with `quick`"):
        crosslayer.retrofit(source, TEXT, method="cla", quick=True, **{option: 64})
    with pytest.raises(ValueError, match="`quick` and `full`"):
        crosslayer.retrofit(source, TEXT, method="cla", quick=True, full=True)
