"""What an intervention is said to do, against loops over eager maps; its report; and the papers' two experiments."""

import json

import numpy as np
import pytest
import torch
import yaml

import crosslayer
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import pack
from crosslayer.intervention.apply import (
    Ablate,
    Forbid,
    PositionSwap,
    ScaleValues,
    TokenSwap,
    intervene,
    load_intervention,
    to_entry,
    waiver,
)
from crosslayer.intervention.measure import _elsewhere, effect
from crosslayer.intervention.record import InterventionRecord
from crosslayer.models.load import load_model
from tests.cli.test_cli import run
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


@pytest.mark.parametrize("change", [waiver(K), Forbid((K,)), TokenSwap(K, 5), Ablate(0, K)], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bert"])
@torch.no_grad()
def test_measures_are_those_of_a_loop(family, implementation, change):
    model, ids, causal = tiny(family, "eager"), tokens(), family != "bert"
    record = effect(tiny(family, implementation), ids, change, controls=1, scan=[]).record()
    InterventionRecord.model_validate(record)
    for side, inside in (("before", ()), ("after", (change,))):
        with intervene(model, *inside):
            found = [naive(model, one, K, causal) for one in ids]
        names = ("attention_received", "hidden_norm_ratio")
        for name, values in zip(names, zip(*found, strict=True), strict=False):
            mean = np.mean(values, axis=0)
            assert np.abs(np.array(record[name][side]["mean"]) - mean).max() <= 1e-5 * mean.max(), (
                name
            )  # float32 inside
        if causal:
            assert abs(record["loss_behind"][side]["mean"] - np.mean([one[2] for one in found])) < 1e-5
    assert causal or record["loss_behind"] is None
    if isinstance(change, Ablate):
        assert record["hidden_norm_ratio"]["after"]["mean"][1] == 0
    if isinstance(change, Forbid):
        assert max(record["attention_received"]["after"]["mean"]) == 0


def test_scan_controls_and_what_is_left_alone():
    model, ids = tiny("llama"), tokens(batch=3)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    seen = []
    whole, part = [0, 1, 2], [2]
    found = effect(model, ids, waiver(K), scan=[whole, part], controls=2, probes=3, progress=lambda *x: seen.append(x))
    record = found.record()
    assert seen == [(i, 15) for i in range(1, 16)]
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    after = record["attention_received"]["after"]
    before = record["attention_received"]["before"]
    assert [one["layers"] for one in record["scan"]] == [[], part, whole]
    assert record["scan"][0]["attention_received"] == before and record["scan"][2]["attention_received"] == after
    assert np.allclose(record["scan"][1]["attention_received"]["mean"][:2], before["mean"][:2], atol=1e-12)
    assert np.abs(np.array(record["scan"][1]["hidden_norm_ratio"]["mean"]) - before["mean"]).max() > 1e-3
    roles = {one["position"]: one["role"] for one in record["others"]}
    assert roles[0] == "first token" and list(roles.values()).count("left alone") == 2
    for control in record["controls"]:
        assert roles[control["position"]] == "left alone"
        other = next(one for one in record["others"] if one["position"] == control["position"])
        start = control["before"]["attention_received"]["mean"]
        assert np.allclose(start, other["attention_received"]["before"]["mean"], atol=1e-12)
    difference = record["loss_behind"]["difference"]["mean"]
    assert difference == pytest.approx(record["loss_behind"]["after"]["mean"] - record["loss_behind"]["before"]["mean"])


def test_swaps_are_controlled_by_random_content():
    model, ids = tiny("gpt2"), tokens()
    record = effect(model, ids, PositionSwap(K, 0), TokenSwap(3, "bos"), controls=1).record()
    assert record["scan"] == [] and record["position"] == K
    swap, token = record["controls"][0]["interventions"]
    assert swap["position"] == K and token["token"] == "random"
    draw = np.random.default_rng(0)  # 500 of 64 rows: the position's own and the one under test would come
    drawn = {_elsewhere(model, PositionSwap(K, 0), 1, T, draw).source for _ in range(500)}
    assert not drawn & {0, K} and len(drawn) > 50
    again = [load_intervention(entry) for entry in json.loads(json.dumps(record["controls"][0]["interventions"]))]
    assert [to_entry(one) for one in again] == [swap, token]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ((), {}, "there is nothing to do"),
        ((waiver(22),), {}, "position 22 needs two tokens behind it; sequences have 24 tokens"),
        ((waiver(1, layers=[7]),), {}, "layer 7 does not exist"),
        ((waiver(1),), {"scan": [[3]]}, "layer 3 does not exist"),
        ((waiver(1),), {"probes": 3}, "probes = 3; use 1 to 2"),
        ((waiver(24),), {}, "position 24 is outside of the sequences of 24 tokens"),
        ((TokenSwap(1, 5),), {"scan": [[1]]}, "none of the interventions acts by layer"),
        ((PositionSwap(1, 2),), {}, "no learned position table"),
    ],
)
def test_what_cannot_be_done_is_one_line(changes, options, message):
    with pytest.raises(ValueError, match=message):
        effect(tiny("llama"), tokens(), *changes, **options)


def test_the_verb_writes_a_whole_folder_that_can_be_run_again(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["intervene", "minilm", "--sequences", 2, "--length", 64, "--probes", 1]
    assert run(monkeypatch, *words, "--position-swap", "40:0", "--waiver", "20,21", "--out", out) == 0
    printed = capsys.readouterr().out.strip().splitlines()
    headline = json.loads(printed[-1])
    assert headline["position"] == 20 and headline["loss_behind"] is None
    record = json.loads((out / "record.json").read_text())
    InterventionRecord.model_validate(record)
    assert str(tmp_path) not in (out / "record.json").read_text()
    assert [one["kind"] for one in record["interventions"]] == ["waiver", "position_swap"]
    assert len(record["attention_received"]["after"]["mean"]) == 6
    figures = {path.stem for path in (out / "figures").iterdir()}
    assert {"attention_before", "attention_after", "attention_received", "first_token", "controls"} <= figures
    (tmp_path / "same.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(record["interventions"]))))
    for file in (out / "record.json", tmp_path / "same.yaml"):
        target = tmp_path / file.suffix[1:]
        assert run(monkeypatch, *words, "--file", file, "--out", target) == 0
        again = json.loads((target / "record.json").read_text())
        assert again["interventions"] == record["interventions"]
        assert again["attention_received"] == record["attention_received"]
        assert again["controls"] == record["controls"]


def test_flex_attention_is_refused_by_a_line_before_anything_runs():
    model = tiny("llama", "flex_attention", torch.float32)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran, which compiles its masks"))
    for measure in (lambda: effect(model, tokens(), waiver(K)), lambda: crosslayer.diagnose(model, tokens())):
        with pytest.raises(ValueError, match="masks of flex attention cannot be read; load the model with sdpa or ea"):
            measure()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to do; give an intervention, such as --waiver 255"),
        (["--waiver", "x"], "waiver: positions.0: "),
        (["--waiver", "-1"], "greater than or equal to 0"),
        (["--waiver", "64"], "position 64 is outside of the sequences of 64 tokens"),
        (["--scale-values", "3:inf"], "scale_values: factor: Input should be a finite number"),
        (["--token-swap", "3:5", "--scan", "0-2"], "none of the interventions acts by layer"),
        (["--waiver", "3", "--layers", "6"], "layers go from 0 to 5"),
        (["--waiver", "3", "--scan", "0-6"], "layers go from 0 to 5"),
        (["--token-swap", "0"], "write position:token"),
        (["--token-swap", "0:5", "--layers", "1"], "--layers does nothing without"),
        (["--position-swap", "3:512"], "it has rows 0 to 511"),
        (["--ablate", "9:3"], "layer 9 does not exist"),
        (["--scale-values", "3:big"], "scale_values: factor: "),
        (["--file", "none.json"], "a .json, .yaml or .yml file that exists"),
        (["--file", "list.json"], "list.json', line 1: "),
        (["--file", "list.yaml"], "write a list such as"),
        (["--file", "kind.yaml"], "'waver' is not known"),
    ],
)
def test_bad_input_is_one_line_and_status_2(monkeypatch, tmp_path, capsys, words, message):
    for name, text in {"list.json": "{waiver}", "list.yaml": "waiver", "kind.yaml": "[{kind: waver}]"}.items():
        (tmp_path / name).write_text(text)
    words = [
        tmp_path / word if word in ("none.json", "list.json", "list.yaml", "kind.yaml") else word for word in words
    ]
    common = ["intervene", "minilm", "--sequences", 2, "--length", 64, "--out", tmp_path / "out"]
    assert run(monkeypatch, *common, *words) == 2
    *_, line = lines = capsys.readouterr().err.splitlines()
    assert line.startswith("crosslayer: error: ") and message in line, lines
    assert sum("error" in word for word in lines) == 1, lines
    assert not (tmp_path / "out").exists()


def test_positions_far_apart_are_shifted_alike():
    model, ids = tiny("llama", max_position_embeddings=256), tokens(batch=1, length=200)
    record = effect(model, ids, waiver(10, 150), TokenSwap(90, 5), controls=2).record()
    for control in record["controls"]:
        one, two = control["interventions"][0]["positions"]
        assert (two - one) % 197 == 140 and control["position"] == one
    assert [one["position"] for one in record["others"]][:3] == [150, 90, 0]


def test_layers_without_attention_are_not_scanned():
    plain = tiny("llama", num_hidden_layers=6)
    model = crosslayer.rewire(plain, {"name": "drop", "attention": (0, 3)}).model
    record = effect(model, tokens(), waiver(K)).record()
    assert [one["layers"] for one in record["scan"]] == [[], [1], [1, 2], [2, 4, 5], [1, 2, 4, 5]]
    assert record["attention_received"]["after"]["mean"][0] is None
    early = effect(plain, tokens(), waiver(K, layers=[0, 1]), scan=[[0], [0, 4], [0, 1, 2]]).record()
    assert [one["layers"] for one in early["scan"]] == [[], [0], [0, 1]]


def test_the_last_token_of_an_encoder_can_be_forbidden():
    record = effect(tiny("bert"), tokens(), Forbid((T - 1,))).record()
    assert max(record["attention_received"]["after"]["mean"]) == 0 < min(record["attention_received"]["before"]["mean"])


def test_an_ablation_leaves_the_readings_of_its_own_layer():
    record = effect(tiny("bert"), tokens(), Ablate(1, K), controls=0).record()
    before, after = (record["mlp_l1_l2"][side]["mean"] for side in ("before", "after"))
    assert after[1] == pytest.approx(before[1], rel=1e-9) and after[2] != pytest.approx(before[2], rel=1e-3)


def test_interventions_nest_in_one_call_and_in_two():
    model, ids = tiny("llama"), tokens()
    both = (waiver(K), ScaleValues((3,), 0.5))
    with torch.no_grad(), intervene(model, *both):
        once = model(ids).logits
    with torch.no_grad(), intervene(model, both[0]), intervene(model, both[1]):
        assert torch.equal(model(ids).logits, once)


def test_isolating_a_token_of_smollm2_moves_the_sink_to_it():
    """Position 255 in layers 12-28: from under 1 % to over 10 %, a peak, a drain; not by layers 12-29 alone."""
    model, tokenizer = load_model("smollm2", device="cpu")
    ids = pack(load_documents(TextSource()), tokenizer, sequences=1, length=512)
    record = effect(model, ids, waiver(255), scan=[range(12, 30)], controls=0, probes=1).record()
    received = {side: record["attention_received"][side]["mean"][12:29] for side in ("before", "after")}
    assert max(received["before"]) < 0.01 < 0.10 < min(received["after"]) and np.mean(received["after"]) > 0.20
    assert min(record["hidden_norm_ratio"]["after"]["mean"][12:19]) > 100
    assert max(record["value_norm_ratio"]["after"]["mean"][12:29]) < 0.5
    assert max(record["scan"][0]["attention_received"]["mean"][12:29]) < 0.01


def test_the_row_of_position_0_makes_a_sink_of_minilm_and_a_random_row_does_not():
    model, tokenizer = load_model("minilm", device="cpu")
    ids = pack(load_documents(TextSource()), tokenizer, sequences=4, length=512)
    record = effect(model, ids, PositionSwap(383, 0), controls=2, probes=4).record()
    before, after = (np.array(record["attention_received"][side]["mean"]) for side in ("before", "after"))
    assert (after[1:5] > 20 * before[1:5]).all()
    for control in record["controls"]:
        assert (np.array(control["after"]["attention_received"]["mean"])[1:5] < 3 * before[1:5]).all()
