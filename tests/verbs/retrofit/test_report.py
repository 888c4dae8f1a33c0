"""A retrofit in one call from Python: options, forms of text, the report's arrays, its folder and its record."""

import inspect
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import crosslayer
from crosslayer.core.method import Method
from crosslayer.core.methods import load_method
from crosslayer.core.methods.cla import CLA
from crosslayer.core.plan import DepthPlan
from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import Texts
from crosslayer.judge.report import Against
from crosslayer.judge.retrieval import askable_samples, found_in, responses
from crosslayer.judge.rows import retrieval_rows
from crosslayer.models.load import ready_model
from crosslayer.output.manifest import check_files
from crosslayer.verbs.retrofit import run as job
from crosslayer.verbs.retrofit.page import title
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.retrofit.run import options_of, strategy_of
from tests.helpers.text import WORDS, tokenizer, words
from tests.helpers.tiny import VOCABULARY, tiny
from tests.verbs.needles.oracle import TOKENIZER, random_model

LENGTH = 16


def ids(count, seed, length=LENGTH):
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def source():
    return tiny("llama", dtype=torch.float32, num_hidden_layers=8)


@pytest.fixture(scope="module")
def report(source):
    return crosslayer.retrofit(
        source,
        {"web": ids(120, 0), "code": ids(120, 1)},
        method="cla",
        layers="2-3,5-7",
        calibration_text={"docs": ids(64, 3)},
        calibration=64,
        windows=40,
        length=LENGTH,
    )


def test_the_call_gives_numbers_and_the_model(source, report):
    assert report.kv_share == pytest.approx(5 / 8) and report.plan.keys == (0, 1, 2, 2, 4, 5, 5, 5)
    assert set(report.domains) == {"web", "code"} and not set(report.domains) & set(report.fitted)
    kl = [report.of("KL", domain) for domain in report.domains]
    assert all(one.low < one.value < one.high for one in kl) and kl[0].value > kl[1].value
    frame = report.frame()
    assert {len(column) for column in frame.values()} == {len(report.rows)}
    assert frame["change_low"][0] == report.of("KL").low and set(frame["candidate"]) == {"retrofit", "without the fit"}
    for domain in report.domains:  # what the fit brings is the paired difference of two rows
        gain = report.row("retrofit", "KL", domain, Against.UNFITTED)
        without = report.row("without the fit", "KL", domain)
        assert (gain.original, gain.value) == (without.value, report.of("KL", domain).value)
        assert gain.change.value == pytest.approx(gain.value - gain.original)
    assert report.windows == {"evaluation": {"web": (0, 20), "code": (0, 20)}, "calibration": {"docs": (0, 64)}}
    assert all(fit.token_after < fit.token_before for fit in report.calibration.layers)
    assert [fit.layer for fit in report.calibration.layers if fit.left_out < 1] == [3, 6, 7]
    assert report.calibration.windows == {"docs": 64} and report.fitted == ["docs"]
    assert report.model.config.plan == report.plan and report.tokenizer is None
    assert report.title == "cla (groups 2-3, 5-7, compensation attention)"
    kept = dict(report.model.named_parameters())
    assert all(kept[name].data_ptr() != weight.data_ptr() for name, weight in source.named_parameters() if name in kept)


@pytest.mark.parametrize(
    ("fit", "fitted"),
    [("layerwise", "W_c"), ("refit", "W_c and W_o"), ("refit-o", "W_o"), ("none", "nothing")],
)
def test_the_page_names_what_was_fitted(report, fit, fitted):
    record = report.record()
    record["calibration"]["fit"] = fit
    page = RetrofitReport.from_record(record).layout()
    assert [card[1] for card in page.cards if card[0] == "Fitted"] == [fitted]


def test_a_report_is_its_record(report):
    again = RetrofitReport.from_record(json.loads(json.dumps(report.record(), allow_nan=False)))
    assert again == report and again.page() == report.page() and again.sentences() == report.sentences()
    assert again.plan == report.plan and isinstance(again.plan, DepthPlan)
    other = json.loads(json.dumps(report.record()))
    other["seconds"]["choose"] += 1
    assert RetrofitReport.from_record(other) != report
    with pytest.raises(ValueError, match=r"no model; .*crosslayer.load_model\(FOLDER\)"):
        _ = again.model
    for wrong in ({"schema": "crosslayer/retrofit/2"}, {"paper": {}}):
        with pytest.raises(ValueError, match="crosslayer/retrofit/19|paper"):
            RetrofitReport.from_record(report.record() | wrong)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("rows",), [], "rows: there are none"),
        (("rows", 0, "scope"), "books", "rows: KL of 'all' is missing"),
        (("methods",), [{}], "a method has no name"),
        (("calibration", "layers", 0, "layer"), 10**6, "layer 1000000, the original has 8 layers"),
        (("calibration", "layers", 0, "layer"), -1, "layer -1, the original"),
        (("architecture", "layers"), 10**13, "the plan has 8 layers, the original has 10000000000000"),
        (("architecture", "layers"), -1, "architecture.layers\n  Input should be greater"),
    ],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_refused(report, place, value, message):
    record = json.loads(json.dumps(report.record()))
    part = record
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        RetrofitReport.from_record(record)


def test_it_saves_a_whole_model_folder(report, tmp_path):
    out = tmp_path / "out"
    assert report.save(out) == out / "report.html"
    assert check_files(out) == []
    assert RetrofitReport.from_record(json.loads((out / "record.json").read_text())) == report
    card = (out / "README.md").read_text()
    assert (
        "```python\nimport crosslayer  # first: it registers the model's class" in card
        and "crosslayer.retrofit(model, text, tokenizer, method='cla'" in card
    )
    assert "calibration_text=calibration_text)\n```" in card
    assert "# model: 'LlamaForCausalLM'; text: 'web', 'code'; calibration_text: 'docs'\n" in card
    assert "layers='2-3,5-7'" in card and "windows=40" in card and "seed=" not in card
    loaded = AutoModelForCausalLM.from_pretrained(out)
    prompt = ids(2, 5)
    with torch.no_grad():
        assert torch.equal(loaded(prompt).logits, report.model(prompt).logits)
    with pytest.raises(ValueError, match="give another"):
        report.save(out)


OPTIONS = {"method": "cla", "layers": "2-3,5-7", "compensation": "none", "windows": 40, "length": LENGTH}


def trained(model):
    """Take a step that changes every weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=ids(4, 2), labels=ids(4, 2)).loss.backward()
    optimizer.step()


def test_a_loaded_model_is_copied_so_that_training_the_retrofit_leaves_it_alone(source):
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    made = crosslayer.retrofit(source, ids(40, 0), **OPTIONS).model
    start = {name: weight.clone() for name, weight in made.state_dict().items()}
    trained(made)
    assert not any(torch.equal(weight, start[name]) for name, weight in made.named_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in source.state_dict().items())


def test_a_model_that_is_loaded_for_the_call_is_not_held_twice(source, tmp_path, monkeypatch):
    source.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    held = []

    def kept(*words, **options):
        held.append(ready_model(*words, **options))
        return held[-1]

    monkeypatch.setattr(job, "ready_model", kept)
    report = crosslayer.retrofit(tmp_path / "model", ids(40, 0), **OPTIONS)
    report.save(tmp_path / "out")  # the logits of its manifest change nothing
    loaded, made = held[0][0].state_dict(), report.model.state_dict()
    assert len(made) > 60 and all(made[name].data_ptr() == loaded[name].data_ptr() for name in made)
    assert all(torch.equal(weight, source.state_dict()[name]) for name, weight in loaded.items())


def test_whole_layers_that_any_method_drops_give_the_stock_class(source):
    """What is dropped is read off the plan: attention and MLP of layer 2, named apart, are a whole layer."""
    method = {"name": "drop", "attention": [2], "mlp": [2]}
    report = crosslayer.retrofit(source, ids(40, 0), method=method, windows=40, length=LENGTH)
    assert type(report.model) is type(source) and report.model.config.num_hidden_layers == 7
    assert report.calibration.fit == "none" and {row.against for row in report.rows} == {Against.ORIGINAL}


def test_the_options_that_are_checked_are_those_of_the_call():
    call = inspect.signature(crosslayer.retrofit).parameters
    checked = options_of(method="cla")
    assert {name: call[name].default for name in type(checked).model_fields} | {"method": "cla"} == dict(checked)


def test_methods_may_be_objects_mappings_or_json(source):
    cla = load_method({"name": "cla", "groups": [[1, 2]]})
    for method in (cla, {"name": "cla", "groups": [[1, 2]]}, '{"name": "cla", "groups": [[1, 2]]}'):
        report = crosslayer.retrofit(source, ids(16, 0), method=method, windows=16, length=LENGTH)
        assert report.plan == cla.plan(8) and report.choice.how == "as options"


def test_a_method_may_be_its_class_wherever_it_may_be_its_name(source):
    options = {"layers": "2-3", "compensation": "none", "windows": 16, "length": LENGTH}
    plans = [crosslayer.retrofit(source, ids(16, 0), method=method, **options).plan for method in (CLA, "cla")]
    assert plans[0] == plans[1]
    assert crosslayer.convert(source, CLA).model.config.plan == CLA().plan(8)
    assert crosslayer.convert(source, [CLA, {"name": "drop", "mlp": [3]}]).model.config.methods[0] == CLA()
    with crosslayer.what_if(source, CLA), torch.no_grad():
        shared = source(ids(1, 0)).logits
    with crosslayer.what_if(source, "cla"), torch.no_grad():
        assert torch.equal(source(ids(1, 0)).logits, shared)


def test_a_method_of_the_registry_needs_no_other_file(monkeypatch):
    """A strategy reads everything about a method from its class: targets, parts, groups and saved states."""
    from crosslayer.verbs.retrofit import search

    class Halves(Method):
        targets, parts, saves = ("heads",), ("left", "right"), ("values",)

        @classmethod
        def from_groups(cls, groups, layers, part="left"):
            return cls()

    def check(**options):
        options = options_of(method="halves", **options)
        strategy_of(options).check(options.changed(job.DEFAULTS))

    monkeypatch.setattr(job, "method_class", lambda name: Halves)
    monkeypatch.setattr(search, "method_class", lambda name: Halves)
    parsed = strategy_of(options_of(method="halves", compensation="ridge", part="right"))
    assert (parsed.method, parsed.part, parsed.targets) == (Halves, "right", ("heads",))
    assert strategy_of(options_of(method="halves")).part == "left"
    assert set(search.searched_methods()) == {Halves}
    monkeypatch.setattr(Halves, "targets", ())
    assert strategy_of(options_of(method="halves")).fit == "none"
    with pytest.raises(ValueError, match="^`compensation`"):
        check(compensation="ridge")
    monkeypatch.setattr(Halves, "targets", ("heads",))
    for wrong, message in (
        ({"part": "middle"}, "part must be one of 'left', 'right', got 'middle'"),
        ({"target": "heads"}, "`target` heads has no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            check(**wrong)


def test_every_method_that_may_have_a_w_c_gets_one():
    """Where a budget chooses, too; methods that may have no W_c stay as they are."""
    plain, without = (strategy_of(options_of(kv_budget=0.7, compensation=text)) for text in (None, "none"))
    drop, method = {"name": "drop", "attention": (3,)}, load_method("fusedkv")
    assert plain.compensated([load_method(drop)]) == [load_method({**drop, "compensation": "attention"})]
    assert plain.compensated([method])[0] is method
    assert without.compensated([load_method(drop)]) == [load_method(drop)]


def test_a_title_writes_gaps_and_ranges_differently():
    gaps = load_method({"name": "uniattn", "superblocks": ((4, 9), (3, 20)), "compensation": None})
    groups = load_method({"name": "cla", "groups": ((18, 19, 20, 21), (22, 23)), "compensation": "attention"})
    assert title([gaps, groups]) == (
        "uniattn (superblocks 4+9, 3+20) + cla (groups 18-21, 22-23, compensation attention)"
    )


def test_text_comes_in_many_forms(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(words(0, 50))
    file = TextSource(str(path))
    rows = ids(3, 0)
    for text, names in (
        (rows, ("text",)),
        ("a document", ("text",)),
        (["two", "documents"], ("text",)),
        (file, ("a.txt",)),
        ([file, file], ("a.txt",)),
        ({"web": rows, "file": file}, ("web", "file")),
    ):
        texts = Texts.load(text)
        assert texts.evaluation == texts.calibration == names and not texts.is_explicit
    both = Texts.load({"a": rows, "b": rows}, {"b": rows, "c": ["text"]})
    assert (both.evaluation, both.calibration, both.is_explicit) == (("a", "b"), ("b", "c"), True)
    default = Texts.load()
    assert len(default.evaluation) == 6 and default.calibration == ("books", "web", "docs")
    for text, message in (
        (
            [file, "another text"],
            "text must be a list of sources.*with a str",
        ),
        ([rows, rows], "text must be .*with a Tensor"),
        (rows.tolist(), "text must be .*with a list"),
        (str(path), "which looks like a file; TextSource"),
        ({"web": str(path)}, "web is .* which looks like a file"),
    ):
        with pytest.raises(ValueError, match=message):
            Texts.load(text)
    with pytest.raises(ValueError, match="different texts.*'a'"):
        Texts.load({"a": rows}, {"a": ids(3, 1)})
    with pytest.raises(ValueError, match="'web'.*embedded domain"):
        Texts.load(None, {"web": rows})


def test_bad_calls_are_one_line(source):
    cases = [
        ({"length": 8}, r"text: token ids .*length=8.*got \(40, 16\)"),
        ({"windows": 41}, r"there are 40 windows of token ids; 41 are needed \(41 for evaluation\)"),
        ({"text": [words(0, 400)]}, r"texts need tokenizer=…; without one, pass token ids"),
        ({"size": 1}, "size must be greater than or equal to 2"),
        ({"layers": "auto", "count": 0}, "count must be greater than or equal to 1"),
        ({"kl_budget": 1.0}, "give one of `method`, `kv_budget`, `kl_budget`"),
        ({"dtype": "float32"}, "dtype and device apply only to models given by name"),
        ({"calibration_text": ids(9, 1)}, "`calibration_text` has no effect"),
        ({"part": "mlp"}, "`part` mlp has no effect"),
    ]
    for changes, message in cases:
        options = {"text": ids(40, 0), "method": "cla", "compensation": "none", "windows": 32, "length": LENGTH}
        with pytest.raises(ValueError, match=message) as error:
            crosslayer.retrofit(source, **options | changes)
        assert "\n" not in str(error.value)


def test_documents_need_only_a_tokenizer():
    model = tiny("llama", dtype=torch.float32, vocab_size=len(WORDS))
    documents = [words(start, start + 160) for start in (0, 160, 320)]
    options = {"method": "cla", "layers": "1-2", "compensation": "none", "windows": 16, "length": 8}
    report = crosslayer.retrofit(model, documents, tokenizer(), **options)
    assert report.domains == ("text",) and report.tokenizer is not None


def test_both_models_retrieve_hidden_numbers(monkeypatch):
    monkeypatch.setattr("crosslayer.verbs.retrofit.report.LENGTHS", (384,))
    model, text = random_model(torch.float32), {"web": ids(40, 0), "code": ids(40, 1)}
    options = {"method": "drop", "layers": "1", "compensation": "none", "windows": 32, "length": LENGTH}
    report = crosslayer.retrofit(model, text, TOKENIZER, **options)
    samples = askable_samples(model, TOKENIZER, (384,))
    found = [found_in(responses(one, TOKENIZER, samples), samples) for one in (report.model, model)]
    rows, total = report.rows_of("retrieval"), len(samples)
    assert rows == retrieval_rows("retrofit", samples, *found)
    assert [row.scope for row in rows] == ["all", "384 tokens"]
    assert total == 10 and report.headline()["needles"] == 0
    assert any("hidden" in line and f"{total}" in line for line in report.sentences())
    assert ("Hidden numbers", f"0 of {total}") in [card[:2] for card in report.layout().cards]


def test_without_a_tokenizer_there_is_no_retrieval(report):
    assert not report.rows_of("retrieval") and report.headline()["needles"] is None
    assert not any("hidden" in line for line in report.sentences())


@pytest.mark.slow  # measures five caches
def test_quantized_caches_stand_beside_the_retrofit(monkeypatch):
    monkeypatch.setattr("crosslayer.verbs.retrofit.report.LENGTHS", (384,))
    model, text = random_model(torch.float32), {"web": ids(40, 0, 96), "code": ids(40, 1, 96)}
    options = {"method": "drop", "layers": "1", "compensation": "none", "windows": 32, "length": 96}
    report = crosslayer.retrofit(model, text, TOKENIZER, **options, full=True)
    share = {row.candidate: row.change.value for row in report.caches if row.quantity == "bytes"}
    assert list(share) == ["retrofit", "original, fp8", "original, int8", "original, int4", "retrofit, int4"]
    assert share["retrofit"] == report.cache.share == 0.5
    assert share["original, fp8"] == 0.5
    planned = crosslayer.plan(report.model, length=report.cache.context, dtype="bfloat16", kv_dtype="int4").stored_bytes
    whole = crosslayer.plan(model, length=report.cache.context, dtype="bfloat16").stored_bytes
    assert share["retrofit, int4"] == planned / whole
    own = [row for row in report.caches if row.quantity == "KL"]
    kl = {row.candidate: row.value for row in own if row.against == Against.ORIGINAL}
    differences = {row.candidate: row for row in own if row.against == Against.FIRST}
    assert list(differences) == list(share)[1:]
    for name, row in differences.items():
        assert (row.value, row.original) == (kl[name], kl["retrofit"])
    assert kl["original, int8"] < kl["original, fp8"] < kl["retrofit"]
    assert 0 < kl["original, int4"] < kl["retrofit"]
    numbers = [row.candidate for row in report.caches if row.quantity == "retrieval"]
    assert numbers == ["retrofit", "original, int4"] and {row.scope for row in report.caches} == {"all"}
    lines = report.sentences()
    assert [row[0] for row in report.tables()[0][2]] == list(share)
    assert "alternatives" in [panel.key for panel in report.layout().panels]
    assert report.step is not None and report.step.context == report.cache.context
    assert any(line.startswith(f"A decoding step after {report.step.context:,} tokens takes") for line in lines)
    alone = crosslayer.retrofit(model, text, **options)
    assert alone.step is None and alone.caches == () and not any("fewer bits" in line for line in alone.sentences())
    options["length"] = 32  # all tokens stay exact with 4 bits
    short = crosslayer.retrofit(model, {"web": ids(40, 0, 32)}, TOKENIZER, **options, full=True)
    names = list(dict.fromkeys(row.candidate for row in short.caches))
    assert names == ["retrofit", "original, fp8", "original, int8"]


def test_where_quantized_caches_are_not_defined_there_are_none():
    model = tiny("mistral", dtype=torch.float32, sliding_window=4)
    options = {"method": "cla", "layers": "1-2", "compensation": "none", "windows": 16, "length": 8}
    assert crosslayer.retrofit(model, ids(40, 0)[:, :8], **options, full=True).caches == ()
