"""What an intervention is said to do, against loops over eager maps; its report; and the papers' two experiments."""

import functools
import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import crosslayer
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import packed
from crosslayer.models.load import load_model
from crosslayer.output.progress import metered_by
from crosslayer.verbs.intervene.kinds import (
    Ablate,
    Forbid,
    PositionSwap,
    ScaleValues,
    TokenSwap,
    intervening,
    load_intervention,
    to_entry,
    waiver,
)
from crosslayer.verbs.intervene.result import Effect
from crosslayer.verbs.intervene.run import elsewhere, intervene
from tests.cli.test_cli import run
from tests.helpers.meters import Recorder
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny, tokens

K, T = 9, 24


def naive(model, ids, position, causal=True):
    """Attention received and hidden norm by layer, and the loss behind a position, by loops."""
    out = model(ids[None], output_attentions=True, output_hidden_states=True)
    received, peaks = [], []
    for maps, hidden in zip(out.attentions, out.hidden_states[:-1], strict=True):
        rows = [i for i in range(T) if i != position and (i > position or not causal)]
        window = getattr(model.config, "sliding_window", None)
        rows = [i for i in rows if window is None or i - position < window]
        received.append(sum(maps[0, :, i, position].mean().item() for i in rows) / len(rows))
        norms = hidden[0].norm(dim=-1).tolist()
        peaks.append(norms[position] / float(np.median([x for i, x in enumerate(norms) if i != position])))
    if not causal:
        return received, peaks, None
    log = out.logits[0].log_softmax(-1)
    behind = [-log[i, ids[i + 1]].item() for i in range(position + 1, T - 1)]
    return received, peaks, sum(behind) / len(behind)


@functools.cache
def by_loops(family, change=None):
    """The means over sequences of what `naive` finds in a model as it is, or under a change."""
    model, ids, causal = tiny(family, "eager"), tokens(), family != "bert"
    with torch.no_grad(), intervening(model, *(() if change is None else (change,))):
        received, peaks, losses = zip(*(naive(model, sequence, K, causal) for sequence in ids), strict=True)
    return np.mean(received, axis=0), np.mean(peaks, axis=0), np.mean(losses) if causal else None


@pytest.mark.parametrize("change", [waiver(K), Forbid((K,)), TokenSwap(K, 5), Ablate(0, K)], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bert"])
def test_measures_are_those_of_a_loop(family, change):
    for implementation in ("eager", "sdpa"):
        result = intervene(tiny(family, implementation), tokens(), interventions=[change], controls=0, scan="none")
        for side, inside in enumerate((None, change)):
            received, peaks, loss = by_loops(family, inside)
            for expected, measured in ((received, result.attention_received), (peaks, result.hidden_norm_ratio)):
                assert np.abs(measured[side] - expected).max() <= 1e-5 * expected.max()  # float32 inside
            assert (result.loss_behind is None) == (loss is None)
            assert loss is None or abs(result.loss_behind[side] - loss) < 1e-5
        if isinstance(change, Ablate):
            assert result.hidden_norm_ratio[1, 1] == 0
        if isinstance(change, Forbid):
            assert result.attention_received[1].max() == 0


@pytest.mark.parametrize("change", [waiver(K), Forbid((K,))], ids=str)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_last_tokens_row_is_that_of_the_head_where_it_changes_most(family, change):
    model, ids, sides = tiny(family, "eager"), tokens(), []
    for inside in ((), (change,)):
        with torch.no_grad(), intervening(model, *inside):
            maps = [model(sequence[None], output_attentions=True).attentions for sequence in ids]
        rows = [torch.stack([layer[0, :, -1] for layer in of_sequence]) for of_sequence in maps]  # (L, H, T) each
        sides.append(torch.stack(rows).mean(0))
    gaps = (sides[1] - sides[0])[:, :, K].abs()  # (L, H)
    row = intervene(model, ids, interventions=[change], controls=0, scan="none").last_row_of_head
    assert gaps[row.layer, row.head].item() == pytest.approx(gaps.max().item(), rel=1e-5)
    for found, expected in zip((row.before, row.after), sides, strict=True):
        assert np.allclose(found, expected[row.layer, row.head], atol=1e-6)  # six digits are kept


def test_scan_controls_and_what_is_left_alone():
    model, ids = tiny("llama"), tokens()
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    meter, whole, part = Recorder(), [0, 1, 2], [1]
    with metered_by(meter):
        result = intervene(model, ids, interventions=[waiver(K)], scan=[whole, part], controls=2)
    assert meter.works == [("running", 10)] and meter.steps == [(done, 10, "") for done in range(1, 11)]
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    received = result.main.attention_received
    assert [trial.layers for trial in result.scan] == [[], part, whole]
    assert result.scan[0].attention_received == received.before
    assert result.scan[2].attention_received == received.after
    assert np.allclose(result.scan[1].attention_received.array()[:2], result.attention_received[0, :2], atol=1e-12)
    gaps = np.abs(result.scan[1].hidden_norm_ratio.array() - result.hidden_norm_ratio[0])
    assert gaps[:2].max() < 1e-12 and gaps[2] > 1e-3  # entering the layers up to the changed one, and the next
    changes = {change.position: change for change in result.positions}
    roles = [change.role for change in result.positions]
    assert changes[0].role == "first token" and roles.count("left alone") == 2
    for control in result.controls:
        change = changes[control.position]
        assert change.role == "left alone"
        start = change.attention_received.before.array()
        assert np.allclose(control.before.attention_received.array(), start, atol=1e-12)
    before, after = result.loss_behind
    assert result.main.loss_behind.difference.mean == pytest.approx(after - before)


def test_swaps_are_controlled_by_random_content():
    model, ids = tiny("gpt2"), tokens()
    result = intervene(model, ids, interventions=[PositionSwap(K, 0), TokenSwap(3, "bos")], controls=1)
    assert result.scan == [] and result.main.position == K
    swap, token = result.controls[0].interventions
    assert swap.position == K == result.controls[0].position and token.token == "random"
    assert result.controls[0].before.attention_received == result.main.attention_received.before
    assert [place.role for place in result.positions] == ["intervened", "intervened", "first token", "left alone"]
    draw = np.random.default_rng(0)  # 500 of 64 rows: the position's own and the one under test would come
    drawn = {elsewhere(model, PositionSwap(K, 0), 1, T, draw).source for _ in range(500)}
    assert not drawn & {0, K} and len(drawn) > 50
    entries = json.loads(json.dumps(result.record()["controls"][0]["interventions"]))
    assert [load_intervention(entry) for entry in entries] == [swap, token]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ((), {}, "intervention is missing"),
        ((waiver(22),), {}, "position 22 needs two tokens after it, and sequences have 24 tokens"),
        ((waiver(1, layers=[7]),), {}, "layer 7 does not exist"),
        ((waiver(1),), {"scan": [[3]]}, "layer 3 does not exist"),
        ((waiver(1),), {"scan": [1, 2]}, r"groups of layers such as \[\[0, 1, 2\], \[3, 4\]\], got \[1, 2\]"),
        ((waiver(1),), {"scan": 3}, "`scan` must be auto, none, ranges .* got 3"),
        (None, {}, r"must be a list such as \[waiver\(255\)\], got None"),
        ({"kind": "waiver", "positions": [3]}, {}, "must be a list .* got {'kind': 'waiver'"),
        ((waiver(1),), {"seed": 2**63}, "seed must be less than"),
        ((waiver(1),), {"controls": -1}, "controls must be greater than or equal to 0, got -1"),
        ((waiver(1),), {"scan": "0-3"}, "'0-3' is out of range; layers go from 0 to 2"),
        ((waiver(1),), {"scan": "x"}, "neither a layer nor a range"),
        ((waiver(1),), {"dtype": "float32"}, "dtype and device apply only to models given by name"),
        (({"kind": "waiver", "positions": [True]},), {}, "waiver: positions.0: must be a number, got true"),
        ((), {"interventions": waiver(1)}, r"a list such as \[waiver\(255\)\], got Waiver\(positions=\(1,\)"),
        ((waiver(24),), {}, "position 24 is outside the sequences, which have 24 tokens"),
        ((TokenSwap(1, 5),), {"scan": [[1]]}, "`scan` needs an intervention that acts by layer"),
        ((PositionSwap(1, 2),), {}, "needs a learned position table"),
    ],
)
def test_what_cannot_be_done_is_one_line(changes, options, message):
    with pytest.raises(ValueError, match=message) as error:
        intervene(tiny("llama"), tokens(), **{"interventions": changes, **options})
    assert "\n" not in str(error.value) and not isinstance(error.value, ValidationError)


def test_the_verb_writes_a_whole_folder_that_can_be_run_again(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["intervene", "minilm", "--sequences", 3, "--length", 64]
    assert run(monkeypatch, *words, "--position-swap", "40:0", "--waiver", "20,21", "--out", out) == 0
    printed = capsys.readouterr().out.strip().splitlines()
    headline = json.loads(printed[-1])
    assert headline["position"] == 20 and headline["loss_behind"] is None
    record = json.loads((out / "record.json").read_text())
    result = Effect.from_record(record)
    assert result.record() == record and result.command.startswith("crosslayer intervene minilm")
    assert result.model.name == headline["model"] == "minilm"
    assert result.settings.text.startswith("embedded corpus") and len(result.settings.documents) == 3
    assert result.controls[0].after.attention_received.n == 2 and "layers, two sequences)" in result.sentences()[-1]
    assert str(tmp_path) not in (out / "record.json").read_text()
    assert [one["kind"] for one in record["interventions"]] == ["waiver", "position_swap"]
    assert result.attention_received.shape == (2, 6)
    figures = {path.stem for path in (out / "figures").iterdir()}
    assert {"attention_before", "attention_after", "attention_received", "first_token", "controls"} <= figures
    again = intervene("minilm", interventions=result.interventions, sequences=3, length=64)
    assert again.interventions == result.interventions
    assert again.positions == result.positions and again.controls == result.controls


def test_flex_attention_is_refused_by_a_line_before_anything_runs():
    model = tiny("llama", "flex_attention", torch.float32)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    for measure in (
        lambda: intervene(model, tokens(), interventions=[waiver(K)]),
        lambda: crosslayer.diagnose(model, tokens()),
    ):
        with pytest.raises(ValueError, match=r"got flex_attention.* attn_implementation='sdpa'"):
            measure()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at least one, such as --waiver 255"),
        (["--waiver", "x"], "waiver: positions.0 must be a valid integer, got 'x'"),
        (["--waiver", "-1"], "greater than or equal to 0"),
        (["--waiver", "64"], "position 64 is outside the sequences, which have 64 tokens"),
        (["--scale-values", "3:inf"], "scale_values: factor must be a finite number"),
        (["--token-swap", "3:5", "--scan", "0-2"], "--scan needs an intervention that acts by layer"),
        (["--waiver", "3", "--layers", "6"], "layers 0 to 5"),
        (["--waiver", "3", "--scan", "0-6"], "layers go from 0 to 5"),
        (["--token-swap", "0"], "--token-swap must be POSITION:TOKEN"),
        (["--token-swap", "0:5", "--layers", "1"], "--layers needs --waiver"),
        (["--position-swap", "3:512"], "rows 0 to 511"),
        (["--ablate", "9:3"], "layer 9 does not exist"),
        (["--scale-values", "3:big"], "scale_values: factor must be a valid number, got 'big'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(monkeypatch, tmp_path, capsys, words, message):
    common = ["intervene", "minilm", "--sequences", 2, "--length", 64, "--out", tmp_path / "out"]
    assert run(monkeypatch, *common, *words) == 2
    *_, line = lines = capsys.readouterr().err.splitlines()
    assert line.startswith("crosslayer: error: ") and message in line, lines
    assert sum("error" in word for word in lines) == 1, lines
    assert not (tmp_path / "out").exists()


def test_positions_far_apart_are_shifted_alike():
    model, ids = tiny("llama", max_position_embeddings=256), tokens(batch=1, length=200)
    result = intervene(model, ids, interventions=[waiver(10, 150), TokenSwap(90, 5)], controls=2)
    assert len(result.controls) == 2
    for control in result.controls:
        first, second = control.interventions[0].positions
        assert (second - first) % 197 == 140 and control.position == first
    assert [place.position for place in result.positions][:4] == [10, 150, 90, 0]


def test_layers_without_attention_are_not_scanned():
    plain = tiny("llama", num_hidden_layers=6)
    model = crosslayer.convert(plain, {"name": "drop", "attention": (0, 3)}).model
    result = intervene(model, tokens(), interventions=[waiver(K)])
    assert [trial.layers for trial in result.scan] == [[], [1], [1, 2], [2, 4, 5], [1, 2, 4, 5]]
    assert result.main.attention_received.after.mean[0] is None
    assert np.isnan(result.attention_received[:, [0, 3]]).all() and np.isfinite(result.attention_received[:, 1]).all()
    early = intervene(plain, tokens(), interventions=[waiver(K, layers=[0, 1])], scan=[[0], [0, 4], [0, 1, 2]])
    assert [trial.layers for trial in early.scan] == [[], [0], [0, 1]]


def test_the_last_token_of_an_encoder_can_be_forbidden():
    before, after = intervene(tiny("bert"), tokens(), interventions=[Forbid((T - 1,))]).attention_received
    assert after.max() == 0 < before.min()


def test_an_ablation_leaves_the_readings_of_its_own_layer():
    before, after = intervene(tiny("bert"), tokens(), interventions=[Ablate(1, K)], controls=0).mlp_l1_l2
    assert after[1] == pytest.approx(before[1], rel=1e-9) and after[2] != pytest.approx(before[2], rel=1e-3)


def test_interventions_nest_in_one_call_and_in_two():
    model, ids = tiny("llama"), tokens()
    both = (waiver(K), ScaleValues((3,), 0.5))
    with torch.no_grad(), intervening(model, *both):
        once = model(ids).logits
    with torch.no_grad(), intervening(model, both[0]), intervening(model, both[1]):
        assert torch.equal(model(ids).logits, once)


def test_a_result_is_saved_and_loaded_again_equal(tmp_path):
    changes = [waiver(K, 12, layers=[0, 1]), ScaleValues((3,), 0.5), TokenSwap(5, "bos"), Ablate(1, 7, "mean")]
    result = intervene(tiny("llama"), tokens(), interventions=changes, controls=1, scan="0,1")
    page = result.save(tmp_path / "out")
    assert page == tmp_path / "out" / "report.html" and page.read_text() == result.page()
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record == result.record() and record["schema"] == "crosslayer/intervene/7"
    again = Effect.from_record(record)
    assert again == result and again.page() == result.page() and again.headline() == result.headline()
    assert again.interventions == changes and again.settings.text is None and again.command is None
    assert "srcdoc" in result._repr_html_()
    assert f"<td data-name='item'>seconds</td><td data-name='value'>{result.seconds:.1f}</td>" in result.page()
    assert crosslayer.load_result(tmp_path / "out") == result
    with pytest.raises(ValueError, match="'crosslayer/intervention/2';.*crosslayer/intervene/7"):
        Effect.from_record({**record, "schema": "crosslayer/intervention/2"})
    for broken in ({"positions": []}, {"colour": 1}, {"model": {**record["model"], "layers": 4}}):
        with pytest.raises(ValidationError):
            Effect.from_record({**record, **broken})
    record["positions"][0]["attention_received"]["after"]["mean"][1] = "much"
    with pytest.raises(ValidationError, match="only numbers"):
        Effect.from_record(record)


def test_a_ratio_to_nothing_is_no_number():
    """With all values at zero their norms have no ratio: the page says so, and nothing fails."""
    nothing = ScaleValues(tuple(range(T - 2)), 0.0)
    result = intervene(tiny("llama"), tokens(), interventions=[nothing], controls=0, scan="none")
    assert result.main.value_norm_ratio.after.mean == [None, None, None]
    assert np.isnan(result.value_norm_ratio[1]).all() and np.isfinite(result.value_norm_ratio[0]).all()
    assert result.headline()["value_norm_ratio_min"]["after"] is None
    assert "value norm cannot be compared" in result.sentences()[1] and "nan" not in result.sentences()[1]
    assert "Norm of" in result.page()


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_arrays_have_the_shapes_that_they_say(family):
    changes = [PositionSwap(K, 0), waiver(K)]
    result = intervene(tiny(family), tokens(), interventions=changes, scan=[[0], [1, 2]], controls=2)
    layers, bins = 3, result.attention_by_position
    for array in (result.attention_received, result.hidden_norm_ratio, result.value_norm_ratio, result.mlp_l1_l2):
        assert array.shape == (2, layers) and array.dtype == np.float64 and np.isfinite(array).all()
    inside = bins.before.edges.index(K)  # watched positions have bins of their own
    for row, binned in zip(result.attention_received, (bins.before.mean, bins.after.mean), strict=True):
        assert np.allclose([of_layer[inside] for of_layer in binned], row, atol=1e-12)
    assert len(result.scan) == 4 and len(result.controls) == 2
    assert result.loss_behind is None if family == "bert" else result.loss_behind.shape == (2,)


def test_texts_and_plain_entries_are_taken_too():
    """Documents in place of ids, and interventions as a record holds them, give what ids and objects do."""
    model, documents = tiny("llama", vocab_size=len(WORDS)), [" ".join(f"w{i * 7 % 500}" for i in range(600))]
    options = {"sequences": 3, "length": 16, "seed": 4}
    result = intervene(model, documents, tokenizer(), interventions=[to_entry(waiver(K))], scan="none", **options)
    ids = packed(documents, tokenizer(), **options).ids
    same = intervene(model, ids, interventions=[waiver(K)], scan="none", seed=4)
    assert result.positions == same.positions and result.controls == same.controls
    assert (result.settings.text, result.settings.documents) == ("own texts", [0, 0, 0])
    assert (same.settings.text, same.settings.documents, same.settings.bos) == (None, [], None)
    assert (same.settings.sequences, same.settings.length) == (3, 16)
    with pytest.raises(ValueError, match="pass tokenizer=…"):
        intervene(model, documents, interventions=[waiver(K)], **options)


def test_what_can_be_refused_cheaply_is_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("crosslayer.models.load.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    for changes, text, message in (
        ([waiver(600)], None, "position 600 is outside the sequences, which have 512 tokens"),
        ([waiver(5)], ["too short"], "the text has 9 bytes"),
        ([waiver(5)], TextSource("none.txt"), "'none.txt' does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            intervene("smollm2", text, interventions=changes)


@pytest.mark.slow
def test_isolating_a_token_of_smollm2_moves_the_sink_to_it():
    """Position 255 in layers 12-28: from under 1 % to over 10 %, a peak, a drain; not by layers 12-29 alone."""
    options = {"scan": "12-29", "controls": 0, "sequences": 1}
    result = intervene("smollm2", interventions=[waiver(255)], device="cpu", **options)
    before, after = result.attention_received[:, 12:29]
    assert before.max() < 0.01 < 0.10 < after.min() and after.mean() > 0.20
    assert result.hidden_norm_ratio[1, 12:19].min() > 100
    assert result.value_norm_ratio[1, 12:29].max() < 0.5
    assert [trial.layers for trial in result.scan] == [[], [*range(12, 30)], [*range(30)]]
    assert result.scan[1].attention_received.array()[12:29].max() < 0.01
    assert result.model.name == "smollm2" and result.settings.length == 512


@pytest.mark.slow
def test_the_row_of_position_0_makes_a_sink_of_minilm_and_a_random_row_does_not():
    model, tokens_of = load_model("minilm", device="cpu")
    ids = packed(load_documents(TextSource()), tokens_of, sequences=4, length=512).ids
    result = intervene(model, ids, interventions=[PositionSwap(383, 0)], controls=2)
    before, after = result.attention_received[:, 1:5]
    assert (after > 20 * before).all()
    assert len(result.controls) == 2
    for control in result.controls:
        assert (control.after.attention_received.array()[1:5] < 3 * before).all()


def test_a_position_that_takes_the_attention_instead_is_named():
    result = crosslayer.intervene(tiny("llama"), tokens(), interventions=[Forbid((0,))], controls=0)
    bins = result.attention_by_position
    assert not [line for line in result.sentences() if "instead" in line]  # random weights have no sink
    index = bins.after.edges.index(1)
    means = [[old + 0.25 * (at == index) for at, old in enumerate(row)] for row in bins.before.mean]
    moved = bins.model_copy(update={"after": bins.after.model_copy(update={"mean": means})})
    (line,) = [
        line for line in result.model_copy(update={"attention_by_position": moved}).sentences() if "instead" in line
    ]
    old = np.mean([row[index] for row in bins.before.mean])
    assert line.startswith("Position 1 ") and f"{old:.2%}" in line and f"{old + 0.25:.2%}" in line
