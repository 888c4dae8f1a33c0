"""`plan`: its options and the record that it writes."""

import io
import json

import pytest
from transformers import AutoConfig, AutoModelForImageTextToText

import crosslayer
from crosslayer.output.chart import lanes_of
from crosslayer.output.panel import Wires
from crosslayer.results import load_result
from crosslayer.verbs.plan.result import PlanReport
from tests.cli.test_cli import run
from tests.helpers.tiny import BASE

LLAMA = {"model_type": "llama", **BASE, "num_hidden_layers": 4, "num_key_value_heads": 2, "dtype": "bfloat16"}
TOKEN = 4 * 2 * 2 * 8 * 2  # bytes of a token: layers, keys and values, heads, head size, bfloat16


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "model"


def test_lengths_and_sequences(folder):
    plan = crosslayer.plan(folder, length=[100, 300], batch=3)
    assert plan.stored_at(100) == 3 * 100 * TOKEN and plan.stored_bytes == 3 * 300 * TOKEN
    assert [row[0] for row in plan.tables()[0][2]] == ["100", "300"]
    assert plan.headline()["stored_bytes_by_length"] == {"100": 300 * TOKEN, "300": 900 * TOKEN}


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("float16", 16), ("q8_0", 8.5), ("q5_1", 6), ("q5_0", 5.5), ("q4_1", 5), ("q4_0", 4.5), ("iq4_nl", 4.5)],
)
def test_types_of_llama_cpp(folder, kind, bits):
    plan = crosslayer.plan(folder, length=[512], kv_dtype=kind, engine="llama.cpp")
    assert plan.stored_bytes == 512 * TOKEN * bits / 16 and plan.stored_at(257) == plan.stored_bytes


def test_windows_of_llama_cpp(tmp_path):
    config = {"model_type": "gemma2", **BASE, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 100, "dtype": "float16"}))
    cell = 2 * 2 * 8 * 2
    plan = crosslayer.plan(tmp_path, length=10_000, engine="llama.cpp")
    assert plan.stored_bytes == cell * (10_240 + 768)  # 100 + 512 and 10,000 to the next multiple of 256


def test_blocks_of_vllm(tmp_path):
    """The example that other calculators have wrong: gpt-oss-20b at 8,192 tokens of 32 requests takes 12 GiB."""
    config = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "hidden_size": 2880}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 8, "head_dim": 64}))
    vllm = crosslayer.plan(tmp_path, length=8192, batch=32, engine="vllm")
    assert round(vllm.stored_bytes / 2**30, 1) == 12.0
    assert round(crosslayer.plan(tmp_path, length=8192, batch=32).stored_bytes / 2**30, 2) == 6.09


def test_what_fits_into_memory(folder, monkeypatch, capsys):
    (folder / "model.safetensors").write_bytes(bytes(1000))
    plan = crosslayer.plan(folder, memory=f"{1000 + 77 * TOKEN + TOKEN // 2}B")
    assert plan.fitting_length() == 77 and plan.weights_bytes == 1000
    assert run(monkeypatch, "plan", folder, "--memory", "1GiB") == 0
    out = capsys.readouterr().out
    assert "Weights: 1,000" in out and "into 1.00 GiB next to 1,000" in out
    with pytest.raises(ValueError, match="next to 1,000"):
        crosslayer.plan(folder, memory="1000").sentences()


EIGHT = {  # an 8B model, 8,030,261,248 parameters
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16",
}  # fmt: skip


def test_without_a_file_weights_are_counted_from_the_config(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(EIGHT))
    assert crosslayer.plan(tmp_path).weights_bytes is None
    for dtype, engine, size, cells in (
        ("bfloat16", "transformers", 2, 1),
        ("float32", "transformers", 4, 1),
        ("bfloat16", "llama.cpp", 2, 256),
    ):
        plan = crosslayer.plan(tmp_path, memory="48GiB", dtype=dtype, kv_dtype="bfloat16", engine=engine)
        assert plan.parameters == 8_030_261_248 and plan.weights_bytes == size * plan.parameters
        assert plan.fitting_length() == (48 * 2**30 - size * plan.parameters) // 2**17 // cells * cells
    assert crosslayer.plan(tmp_path, memory="24GiB").fitting_length() == 74_075
    assert crosslayer.plan(AutoConfig.for_model(**EIGHT), memory="24GiB").fitting_length() == 74_075
    assert run(monkeypatch, "plan", tmp_path, "--memory", "24GiB", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["weights_bytes"] == 16_060_522_496 and figures["fitting_length"] == 74_075


def test_a_composite_is_counted_as_a_whole(tmp_path):
    text = {**BASE, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "dtype": "float32"}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=tower, mm_tokens_per_image=4)
    model = AutoModelForImageTextToText.from_config(config)
    config.save_pretrained(tmp_path)
    plan = crosslayer.plan(tmp_path, memory="1GiB")
    assert plan.parameters == model.num_parameters() > model.model.language_model.num_parameters()


def test_weights_that_cannot_be_counted_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("crosslayer.wiring.read.WHOLE", ())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plan = crosslayer.plan(tmp_path, memory="1GiB")
    assert plan.weights_bytes is None and "weights_bytes" not in plan.headline()
    assert any("without weights" in sentence for sentence in plan.sentences())


def test_attention_code_of_the_hub_never_runs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "attn_implementation": "someone/attention"}))
    assert crosslayer.plan(tmp_path, memory="1GiB").parameters is None


@pytest.mark.parametrize("text", ["", "GiB", "3XB", "-1GiB", "nan", "1e400", "inf", "0", "24"])
def test_no_size_of_memory(folder, text):
    with pytest.raises(ValueError, match="`memory` must be"):
        crosslayer.plan(folder, memory=text)


def test_weights_of_an_index(folder):
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(10))
    index = {"metadata": {"total_size": 12345}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert crosslayer.plan(folder).weights_bytes == 12345


def test_a_config_on_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(LLAMA)))
    assert run(monkeypatch, "plan", "-", "--length", 10) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stored_bytes"] == 10 * TOKEN


def test_a_config_file(folder):
    assert crosslayer.plan(folder / "config.json", length=10).stored_bytes == 10 * TOKEN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "is not a config: it holds a list"),
        ("{}", "it has no model_type"),
        ('{"model_type": "no_such"}', "has no model type 'no_such'"),
        ('{"model_type": 3}', "it has no model_type"),
        ('{"model_type": "llama", "num_hidden_layers": "x"}', "num_hidden_layers must be a whole number .*got x"),
        ('{"model_type": "llama", "num_hidden_layers": 4097}', "num_hidden_layers must be .*got 4097"),
        ('{"model_type": "llama", "num_attention_heads": -4}', "num_attention_heads must be a whole number"),
        ('{"model_type": "gemma3", "text_config": 3}', "cannot be loaded"),
    ],
)
def test_bad_configs_are_one_line(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.plan(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "ollama"}, "`engine` must be one of transformers, vllm, llama.cpp"),
        ({"kv_dtype": "q8_0"}, "transformers has no KV cache of type q8_0; use `engine` llama.cpp"),
        ({"kv_dtype": "int4", "engine": "vllm"}, "vllm has no KV cache of type int4; use `engine` transformers"),
        ({"kv_dtype": "int5"}, "`kv_dtype` must be .*got 'int5'"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"length": []}, "length must be at least 1 token"),
        ({"method": "no_such"}, "method 'no_such' is not known"),
        ({"method": "{"}, "`method` must be a name or a JSON object"),
        ({"method": "cla", "engine": "llama.cpp"}, "llama.cpp cannot share across layers as cla does"),
        (
            {"method": "shared_choice", "engine": "vllm"},
            "shared_choice: layers attend to chosen tokens only, which",
        ),
        ({"method": ["cla", "no_such"]}, "method 'no_such' is not known"),
    ],
)
def test_bad_options(folder, options, message):
    with pytest.raises(ValueError, match=message):
        crosslayer.plan(folder, **options)


def test_engines_refuse_what_is_not_known_of_them():
    mamba = AutoConfig.for_model("mamba2", num_hidden_layers=2)
    with pytest.raises(ValueError, match="layer 0"):
        crosslayer.plan(mamba, engine="vllm")
    indexed = AutoConfig.for_model("deepseek_v32", num_hidden_layers=2)
    with pytest.raises(ValueError, match="llama.cpp.*layer 0"):
        crosslayer.plan(indexed, engine="llama.cpp")


def test_what_sharing_would_save(folder):
    plan = crosslayer.plan(folder, length=10, method=["cla", '{"name": "cla", "group": 4}', "yoco"])
    pairs, fours, yoco = plan.shared
    assert [one.plan and one.plan.stored_bytes for one in (pairs, fours)] == [5 * TOKEN, 2.5 * TOKEN]
    assert pairs.pretrained == "yes, by retrofit" and yoco.pretrained == "no, only trained from scratch"
    assert plan.headline()["stored_bytes_by_method"]["cla"] == 5 * TOKEN
    alone = crosslayer.plan(folder, method="cla")
    assert "← 0" in alone.sentences()[-1] and "← 0" not in plan.sentences()[-1]


def test_a_method_that_is_not_possible_is_a_row(folder, tmp_path):
    plan = crosslayer.plan(folder, length=100, method=["shared_choice", "cla"], engine="vllm")
    (choice, *cells, reason), (cla, stored, *_) = plan.tables()[0][2]
    assert (choice, cla) == ("shared_choice", "cla") and set(cells) == {"–"} and stored != "–"
    assert reason.startswith("not served by vllm: ") and reason.endswith("chosen tokens only, which vllm cannot do")
    assert plan.headline()["stored_bytes_by_method"] == {"shared_choice": None, "cla": 112 * TOKEN // 2}
    plan.save(tmp_path / "out")
    report = load_result(tmp_path / "out")
    assert isinstance(report, PlanReport) and [len(method.sizes) for method in report.methods] == [0, 1]
    assert reason in report.page()


def test_shares_are_of_the_16_bit_cache(folder):
    """One denominator, whatever the dtype of the model."""
    for dtype, kv_dtype, share in (("bfloat16", None, 1), ("float32", None, 2), ("float32", "bfloat16", 1)):
        plan = crosslayer.plan(folder, length=[64, 128], dtype=dtype, kv_dtype=kv_dtype, method=["cla", "yoco"])
        lengths, methods = plan.tables()
        assert plan.full_at(128) == 128 * TOKEN and plan.kv_share == share
        assert lengths[1][2] == methods[1][2] == "of the 16-bit cache"
        assert [row[2] for row in lengths[2]] == [f"{share:.1%}"] * 2
        assert methods[2][0][2] == f"{share / 2:.1%}"


def test_neighbors_that_are_alike_share_a_line(tmp_path):
    config = {"model_type": "llama", **BASE, "num_key_value_heads": 2, "num_hidden_layers": 120}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [line.split()[0] for line in crosslayer.plan(tmp_path).diagram().splitlines()] == ["layer", "0-119"]
    drop = {"name": "drop", "attention": [110]}
    lines = crosslayer.plan(tmp_path, method=[drop]).sentences()[-1].splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "0-109", "110", "111-119"]
    assert len({line.index("full") for line in lines if "full" in line}) == 1


def test_layers_of_different_kinds_cannot_share(tmp_path):
    config = {"model_type": "gemma2", **BASE, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layer 1 \(full\).*layer 0 \(window 4096\)"):
        crosslayer.plan(tmp_path, method="cla")
    with pytest.raises(ValueError, match=r"layer 0 \(linear attention\)"):
        crosslayer.plan(AutoConfig.for_model("mamba2", num_hidden_layers=2), method="cla")
    with pytest.raises(ValueError, match=r"shared_choice: layer 0 \(window 4096\)"):
        crosslayer.plan(tmp_path, method="shared_choice")
    with pytest.raises(ValueError, match="layers attend"):
        crosslayer.plan(AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=2), method="shared_choice")


def test_what_is_saved_is_read_again(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(monkeypatch, "plan", folder, "--length", "100,300", "--method", "cla", "--out", out) == 0
    report = load_result(out)
    assert isinstance(report, PlanReport) and [size.stored_bytes for size in report.sizes] == [100 * TOKEN, 300 * TOKEN]
    assert report.methods[0].curve[0].stored_bytes == 256 * TOKEN // 2
    assert report.command == f"crosslayer plan {folder.name} --length 100,300 --method cla --out out"
    assert [layer.sources for layer in report.layers] == [(), (0,), (), (2,)]
    assert {path.name for path in (out / "figures").iterdir()} == {"layers.svg", "lengths.svg"}
    page = (out / "report.html").read_text()
    assert "KV cache" in page and "1 of 4" not in page and "4 read" in page
    crosslayer.plan(folder).save(tmp_path / "again")
    assert load_result(tmp_path / "again").headline()["stored_bytes"] == 4096 * TOKEN


def test_page_and_terminal_have_the_same_lengths(folder, tmp_path):
    plan = crosslayer.plan(folder, length=[512, 100], method=["cla", "yoco"])
    plan.save(tmp_path / "out")
    report = load_result(tmp_path / "out")
    assert isinstance(report, PlanReport)
    pages = [*report.tables(), *report.layout().tables]
    for (_, *printed), (_, *shown) in zip(plan.tables(), pages, strict=True):
        assert printed == shown  # heads and rows
    assert [size.length for size in report.methods[0].sizes] == [512, 100]


def test_lines_of_sources_that_overlap_lie_beside_each_other():
    wires = Wires([1.0] * 6, ["full"] * 6, [(), (), (0,), (1,), (), (4, 1)])
    lanes = lanes_of(wires.sources)
    assert lanes[0] != lanes[1] and lanes[4] != lanes[1]
