"""What a verification gives from Python: rows, counts, a record, a folder, a page."""

import json

import pytest

from crosslayer import load_model, verify
from crosslayer.core.decoder.convert import to_model
from crosslayer.output.progress import metered_by
from crosslayer.verbs.verify.result import Verification
from tests.helpers.meters import Recorder
from tests.helpers.saved import ours, save, tokenizer
from tests.helpers.tiny import tiny
from tests.helpers.verifications import only, statuses


@pytest.fixture
def saved(tmp_path):
    return save(ours("svformer"), tmp_path / "model")


def test_a_folder_and_its_loaded_model_give_the_same_rows(monkeypatch, saved):
    only(monkeypatch, "cache, uneven chunks", "cache bytes")
    meter = Recorder()
    with metered_by(meter):
        by_name = verify(str(saved))
    model, words = load_model(str(saved))
    loaded = verify(model, words, folder=str(saved))
    assert by_name.checks == loaded.checks and by_name.passed and by_name.model == loaded.model == "model"
    assert statuses(by_name)[:3] == [(f"manifest: {name}", "PASS") for name in ("files", "plan", "fingerprint")]
    assert [what for what, _ in meter.works] == [f"checking and loading {saved}", "verifying"]
    assert verify(model, words).checks[1:] == loaded.checks[3:]


def test_a_saved_verification_is_loaded_again_equal(monkeypatch, tmp_path):
    only(monkeypatch, "cache bytes", "eager and SDPA")
    verification = verify(to_model(tiny("gemma2")), dtypes=("float32",))
    page = verification.save(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record == verification.record() and record["schema"] == "crosslayer/verify/3"
    assert Verification.from_record(record) == verification and page.read_text() == verification.page()
    assert "<iframe" in verification._repr_html_() and "Verification of CrossLayerForCausalLM" in page.read_text()
    assert [check.name for check in verification.skipped] == ["manifest", "eager and SDPA"] and verification.passed
    assert verification.headline()["not_applicable"] == 2 and verification.headline()["passed"] == 1
    with pytest.raises(ValueError, match="crosslayer/verify/3"):
        Verification.from_record({**record, "schema": "crosslayer/verify/1"})


def test_options_that_do_nothing_are_refused(saved):
    with pytest.raises(ValueError, match="device applies"):
        verify(tiny("llama"), device="cpu")
    for options in ({"folder": saved}, {"tokenizer": tokenizer()}):
        with pytest.raises(ValueError, match="folder apply"):
            verify(saved, **options)
