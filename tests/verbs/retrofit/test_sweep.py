"""A sweep over a retrofit's options: one table, paired with the first variant, and no model."""

import json

import pytest
import torch

import crosslayer
from crosslayer.judge.report import Against
from crosslayer.verbs.retrofit.run import options_of
from tests.helpers.tiny import VOCABULARY, tiny
from tests.verbs.retrofit.test_verb import inputs, retrofit  # noqa: F401

LENGTH = 16
OPTIONS = {"method": "uniattn", "layers": "4-7", "windows": 32, "calibration": 48, "length": LENGTH}
TARGETS = ["attention", "mlp", "heads", "heads-from-values"]


def ids(count, seed):
    return torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def source():
    return tiny("llama", dtype=torch.float32, num_hidden_layers=8)


def test_each_row_is_what_its_own_retrofit_has(source, tmp_path):
    text = {"web": ids(90, 0), "code": ids(90, 1)}
    swept = crosslayer.retrofit(
        source, text, **OPTIONS, compensation="layerwise", sweep=[f"target={','.join(TARGETS)}"]
    )
    names = {target: f"--target {target}" for target in TARGETS}
    assert list(swept.changes("bytes")) == list(names.values())
    for number, (target, name) in enumerate(names.items()):
        alone = crosslayer.retrofit(source, text, **OPTIONS, compensation="layerwise", target=target)
        for scope in ("all", *alone.domains):
            own, kl = swept.row(name, "KL", scope).change, alone.of("KL", scope)
            assert (own.value, *own.interval) == pytest.approx((kl.value, *kl.interval), rel=1e-6)
        assert swept.changes("bytes")[name].value == pytest.approx(alone.kv_share)
        row = swept.row(name, "KL", against=Against.FIRST)
        if not number:
            assert row is None
            continue
        assert row.change.value == pytest.approx(alone.of("KL").value - swept.of("KL").value, abs=1e-6)
        assert row.change.low <= row.change.value <= row.change.high
    assert not swept.rows_of("retrieval") and swept.settings.target == "attention"
    page = swept.save(tmp_path / "out")
    assert sorted(path.name for path in page.parent.iterdir()) == ["figures", "record.json", "report.html"]
    assert crosslayer.load_result(tmp_path / "out").rows == swept.rows
    assert "--target heads-from-values" in page.read_text(encoding="utf-8")


def test_a_count_of_readers_lays_blocks_below_the_middle(source):
    options = {"method": "cla", "compensation": "none", "windows": 16, "length": LENGTH}
    swept = crosslayer.retrofit(source, ids(16, 0), **options, size=3, sweep=["count=2,4"])
    assert swept.choice.groups == [[5, 6, 7]]
    assert [change.value for change in swept.changes("bytes").values()] == [6 / 8, 4 / 8]
    below = crosslayer.retrofit(source, ids(16, 0), **options, size=2, count=4)
    assert below.choice.groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="`count`.*6.*`size` 4,.*9"):
        crosslayer.retrofit(source, ids(16, 0), **options, size=4, count=9)


def test_every_combination_is_a_variant():
    options = options_of(method="uniattn", sweep=("size=2,3", "groups = 1, 4"), compensation="mean")
    named = {name: (each.size, each.groups) for name, each in options.variants().items()}
    assert named == {f"--size {size} --groups {groups}": (size, groups) for size in (2, 3) for groups in (1, 4)}
    both = options_of(method="cla", layers="auto", count=2, sweep=("count=3,6", "layers=auto,top-half"))
    assert [*both.variants()] == [f"--count {count} --layers {way}" for count in (3, 6) for way in ("auto", "top-half")]
    assert [*options_of(method="cla").variants()] == [""]


BAD = [
    (("--sweep", "sizes=2,3"), "--sweep must be KEY=VALUE,VALUE, each once, with a KEY of method, layers"),
    (("--sweep", "size"), "--sweep must be KEY=VALUE,VALUE"),
    (("--sweep", "size=2,2"), "--sweep must be KEY=VALUE,VALUE"),
    (("--sweep", "size=2", "--sweep", "size=3"), "--sweep must be KEY=VALUE,VALUE"),
    (("--sweep", "size=2,many"), "size must be a valid integer, got 'many'"),
    (
        ("--sweep", "target=attention,head"),
        "target must be one of 'attention', 'heads', 'mlp', 'heads-from-values', got 'head'",
    ),
    (("--sweep", "groups=1,2"), "--groups 1 has no effect"),
    (("--sweep", "count=3,4"), "--count must be a multiple of --size − 1 = 3, got 4"),
    (("--sweep", "size=2,4", "--full"), "--sweep needs --method, without a budget and without --full"),
    (("--sweep", "size=2,4", "--heal", "heal-smoke"), "--heal has no effect with --sweep"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda option: str(option)[:60])
def test_bad_sweeps_are_refused_before_a_model_is_loaded(monkeypatch, inputs, tmp_path, capsys, options, message):  # noqa: F811
    monkeypatch.setattr("crosslayer.verbs.retrofit.run.ready_model", lambda *args, **options: 1 / 0)
    assert retrofit(monkeypatch, inputs, tmp_path / "out", "--method", "uniattn", *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1 and message in lines[0]


def test_the_command_prints_one_table(monkeypatch, inputs, tmp_path, capsys):  # noqa: F811
    words = ("--method", "uniattn", "--compensation", "none", "--sweep", "count=1,2", "--size", 2)
    assert retrofit(monkeypatch, inputs, tmp_path / "out", *words) == 0
    printed = capsys.readouterr().out
    assert "--count 1" in printed and "--count 2" in printed and "against the first" in printed
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert [row["change"]["value"] for row in record["rows"] if row["quantity"] == "bytes"] == [0.9375, 0.875]
    assert "next:" not in printed  # no model was saved that could be verified
    assert record["settings"]["sweep"] == ["count=1,2"] and not (tmp_path / "out" / "model.safetensors").exists()
