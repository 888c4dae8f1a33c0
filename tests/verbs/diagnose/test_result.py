"""The result of a diagnosis: arrays, a round trip through its folder, and the one call from a name or a model."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import crosslayer
from crosslayer.corpus.documents import TextSource
from crosslayer.verbs.diagnose.depth_panels import growth
from crosslayer.verbs.diagnose.result import Measures
from tests.helpers.daily import daily
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny, tokens

LAYERS = 3
SHAPES = {
    "first_token_by_head": (LAYERS, 4),
    "top_importance": (LAYERS, 10),
    "value_spectrum": (LAYERS, 16),  # 2 key-value heads of 8
    "map_similarity": (LAYERS, LAYERS),
    "map_similarity_without_first": (LAYERS, LAYERS),
    "map_similarity_per_head": (LAYERS, LAYERS),
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "qwen3_next"])  # with a position table, without a cache
@pytest.mark.parametrize("sequences", daily([1, 2], 2))
def test_a_record_loads_equal(family, sequences):
    diagnosis = crosslayer.diagnose(tiny(family, dtype=torch.float32), tokens(batch=sequences))
    loaded = crosslayer.Diagnosis.from_record(json.loads(json.dumps(diagnosis.record())))
    assert loaded == diagnosis and loaded.page() == diagnosis.page() and loaded.headline() == diagnosis.headline()


def test_a_folder_loads_equal(tmp_path):
    """With every figure of a model that has a position table."""
    diagnosis = crosslayer.diagnose(tiny("gpt2", dtype=torch.float32), tokens(), cross_layer=True)
    page = diagnosis.save(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record == diagnosis.record() and page.read_text() == diagnosis.page()
    assert crosslayer.load_result(tmp_path / "out") == diagnosis
    drawn = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"position_table", "cross_layer", "importance_by_position", "map_similarity", "entropy"} <= drawn


def test_outputs_load_equal_and_their_growth_is_that_of_their_slope(tmp_path):
    diagnosis = crosslayer.diagnose(tiny("llama", dtype=torch.float32), tokens(), outputs=True)
    diagnosis.save(tmp_path / "out")
    assert crosslayer.load_result(tmp_path / "out") == diagnosis
    assert {"output_norm", "gradient_norm"} <= {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    slopes = diagnosis.outputs.slopes
    assert set(slopes) == {"attention_output", "mlp_output", "attention_gradient", "mlp_gradient"}
    layers, sentence = diagnosis.model.layers, growth(diagnosis.outputs, "gradient")
    assert f"× {math.exp(slopes['mlp_gradient'].mean * (layers - 1)):.3g} in MLPs" in sentence


def test_arrays_have_the_shapes_that_they_say_and_intervals_beside_them():
    diagnosis = crosslayer.diagnose(tiny("llama"), tokens(batch=2))
    for name in Measures.model_fields:
        array, measured = getattr(diagnosis, name), getattr(diagnosis.measures, name)
        assert array.shape == SHAPES.get(name, (LAYERS,)) and array.dtype == np.float64, name
        interval, known = measured.interval(), np.isfinite(array)
        assert interval.shape == (*array.shape, 2) and measured.n == 2, name
        assert (interval[known, 0] <= array[known]).all() and (array <= interval[..., 1])[known].all()
        assert "(L," in Measures.model_fields[name].description and name in dir(diagnosis)
    assert crosslayer.diagnose(tiny("llama"), tokens(batch=1)).measures.entropy.interval() is None


def test_a_layer_without_attention_has_no_number():
    diagnosis = crosslayer.diagnose(tiny("qwen3_next", dtype=torch.float32), tokens())
    assert np.isnan(diagnosis.entropy).tolist() == [True, True, False]  # linear, linear, full attention
    assert np.isfinite(diagnosis.stream_norm).all()


def test_an_old_record_is_refused_by_its_version():
    record = crosslayer.diagnose(tiny("llama"), tokens()).record()
    with pytest.raises(
        ValueError,
        match="'crosslayer/diagnosis/2';.*crosslayer/diagnose/10$",
    ):
        crosslayer.Diagnosis.from_record({**record, "schema": "crosslayer/diagnosis/2"})
    with pytest.raises(ValueError, match="Extra inputs"):
        crosslayer.Diagnosis.from_record({**record, "surprise": 1})


@pytest.mark.parametrize(
    ("key", "mean", "said"),
    [
        ("entropy", [1.0, 2.0], r"entropy must have the shape \(3,\) for this model, got \(2,\)"),
        ("map_similarity", [1.0, 2.0, 3.0], r"map_similarity must have .*got \(3,\)"),
        ("entropy", [[1.0], [1.0], [1.0]], r"entropy: its interval must have the shape \(3, 1, 2\), got \(3, 2\)"),
        ("entropy", [1.0, "<b>", None], "only numbers and null"),
        ("entropy", [1.0, True, None], "only numbers and null"),
    ],
)
def test_measures_of_other_layers_are_refused(key, mean, said):
    record = crosslayer.diagnose(tiny("llama"), tokens()).record()
    record["measures"][key]["mean"] = mean
    with pytest.raises(ValueError, match=said):
        crosslayer.Diagnosis.from_record(record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    tiny("llama", dtype=torch.float32, vocab_size=len(WORDS)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder.parent / "text.txt").write_text(" ".join(f"w{i % 50}" for i in range(400)))
    return folder


def test_a_name_and_a_loaded_model_give_the_same(folder):
    text, options = TextSource(str(folder.parent / "text.txt")), {"sequences": 2, "length": 16}
    named = crosslayer.diagnose(str(folder), text, dtype="float64", device="cpu", **options)
    model, loaded_tokenizer = crosslayer.load_model(str(folder), dtype="float64", device="cpu")
    loaded = crosslayer.diagnose(model, text, loaded_tokenizer, **options)
    assert (
        named.measures == loaded.measures
        and named.settings == loaded.settings
        and named.sentences() == loaded.sentences()
    )
    assert named.model.name == "model" and named.settings.text == "text.txt" and named.settings.seed == 0
    assert named.model.dtype == "float64" and named.headline()["model"] == "model"
    assert str(folder.parent) not in json.dumps(named.record())  # no folder of the machine


def test_texts_and_ids_are_taken_too(folder):
    model, loaded_tokenizer = crosslayer.load_model(str(folder), device="cpu")
    text = " ".join(f"w{i % 50}" for i in range(200))
    diagnosis = crosslayer.diagnose(model, [text], loaded_tokenizer, sequences=2, length=16)
    assert diagnosis.settings.text == "own texts" and diagnosis.settings.documents == [0, 0]
    ids = loaded_tokenizer(text, return_tensors="pt")["input_ids"][:, :16]
    settings = crosslayer.diagnose(model, ids).settings
    assert (settings.text, settings.seed, settings.bos, settings.documents) == (None, None, None, [])
    assert (settings.sequences, settings.length) == (1, 16)
    with pytest.raises(ValueError, match="pass tokenizer=…"):
        crosslayer.diagnose(model, text, sequences=2, length=16)
    with pytest.raises(ValueError, match="and device"):
        crosslayer.diagnose(model, ids, dtype="float32")


def test_bad_text_is_refused_before_the_model_is_loaded(folder):
    for text in (TextSource(str(folder.parent / "missing.txt")), "w1 w2"):
        with pytest.raises(ValueError, match="exist|the.*5 bytes"):
            crosslayer.diagnose(str(folder.parent / "no such model"), text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (tokens().tolist(), r"^text holds a list; give texts, or token ids as a tensor \(N, T\)$"),
        ("notes.txt", r"^text is 'notes.txt', which looks like a file; TextSource\('notes.txt'\) reads it$"),
        ({"web": "w1 w2"}, "^text is a dict; give token ids as a tensor, a TextSource, or texts$"),
        (5, "^text is a int; give token ids"),
    ],
    ids=str,
)
def test_what_is_no_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        crosslayer.diagnose(tiny("llama"), text)


def test_a_result_shows_its_headline():
    diagnosis = crosslayer.diagnose(tiny("llama"), tokens())
    assert repr(diagnosis).startswith("Diagnosis(model=") and len(repr(diagnosis)) < 1000
    assert str(diagnosis) == repr(diagnosis) and "kv_share=" in repr(diagnosis)


def test_a_measure_that_an_older_record_lacks_is_named():
    diagnosis = crosslayer.load_result(Path(__file__).parents[3] / "docs" / "evidence" / "redundancy")
    measures = diagnosis.measures.model_copy(update={"stream_norm": None})
    with pytest.raises(AttributeError, match="'stream_norm'"):
        _ = diagnosis.model_copy(update={"measures": measures}).stream_norm
