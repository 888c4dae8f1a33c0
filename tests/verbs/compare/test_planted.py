"""Verdicts, intervals and sentences of comparisons whose runs have planted losses."""

import json

import numpy as np
import pytest

import crosslayer
from crosslayer.output.formatting import UNKNOWN
from crosslayer.verbs.compare.page import _finals
from crosslayer.verbs.compare.sentences import sentences
from tests.helpers.browser import complaints, resize
from tests.helpers.daily import daily
from tests.helpers.runs import STEPS, run, snapshot, written
from tests.output.test_page import LOOK

SPREAD = np.array([-1.0, 0.0, 1.0])  # of three seeds


def compared(folder, *runs, **options):
    return crosslayer.compare(written(folder, *runs), **options)


def three(difference, variant="resformer", spread=0.01, **changes):
    """Return runs of three seeds whose paired differences have this mean and standard deviation."""
    runs = []
    for seed, deviation in enumerate(spread * SPREAD):
        runs += [run("vanilla", seed, 3 + 0.3 * seed, **changes)]
        runs += [run(variant, seed, 3 + 0.3 * seed + difference + deviation, **changes)]
    return runs


def test_a_difference_of_one_standard_error_is_no_win(tmp_path):
    error = 0.01 / np.sqrt(3)
    result = compared(tmp_path, *three(-error))
    (outcome,) = result.outcomes
    assert outcome.verdict == "no difference seen" and np.isclose(outcome.final.change.value, -error)
    (sentence,) = [line for line in sentences(result) if "resformer" in line and "speedup" not in line]
    assert "difference seen" in sentence and "−0.0058 (−0.0306 to +0.0191)" in sentence
    assert "about 7 seeds" in sentence


def test_a_clear_difference_is_a_win_however_much_the_seeds_differ(tmp_path):
    result = compared(tmp_path, *three(-0.1))
    assert result.outcomes[0].verdict == "lower" and result.headline()["results"][0]["verdict"] == "lower"
    (sentence,) = [line for line in sentences(result) if "resformer" in line and "speedup" not in line]
    assert sentence.startswith("Lower final loss than vanilla")
    assert "resformer −0.1000 (−0.1248 to −0.0752)" in sentence
    found = result.outcomes[0]
    assert np.isclose(found.final.change.value, -0.1)
    assert found.final.change.interval == pytest.approx((-0.12484, -0.07516), abs=1e-5)
    assert [entry.change.value for entry in found.domains.values()] == pytest.approx([-0.1, -0.1])


def test_what_is_clear_alone_is_not_clear_among_many(tmp_path):
    runs = three(-0.028)  # p = 0.04
    for group in range(2, 6):
        runs += [
            run([{"name": "cla", "group": group}], seed, 3 + 0.3 * seed + 0.01 * SPREAD[seed]) for seed in range(3)
        ]
    result = compared(tmp_path, *runs)
    first = result.outcomes[[outcome.variant for outcome in result.outcomes].index("resformer")]
    assert (
        first.final.change.verdict == "lower"
        and first.verdict == "no difference seen"
        and np.isclose(first.adjusted, 5 * first.final.change.p)
    )
    text = "\n".join(sentences(result))
    assert "comparisons: resformer" in text and "makes 5 comparisons" in text
    assert "before correction" in result.page()


def test_an_interval_that_excludes_a_relevant_difference_says_so(tmp_path):
    result = compared(tmp_path, *three(0.0, spread=0.001))
    (sentence,) = [line for line in sentences(result) if "resformer" in line and "speedup" not in line]
    assert "(−0.0025 to +0.0025)" in sentence and "difference" in sentence


def test_two_seeds_give_no_verdict_but_both_differences(tmp_path):
    runs = [
        entry for seed in range(2) for entry in (run("vanilla", seed, 3.0), run("resformer", seed, 2.5 + 0.1 * seed))
    ]
    result = compared(tmp_path, *runs)
    (outcome,) = result.outcomes
    assert outcome.verdict is None and outcome.adjusted is None
    assert outcome.final.change.interval is None and outcome.final.values == pytest.approx((-0.5, -0.4))
    assert "resformer −0.5000, −0.4000 (2 seeds)" in sentences(result)[0] and "95%" not in sentences(result)[0]
    assert "not tested: 2 seeds" in result.page()
    assert [card[:2] for card in result.layout().cards[:4]] == [
        ("Lower than vanilla", "0"), ("Higher than vanilla", "0"), ("No difference seen", "0"), ("Not tested", "1"),
    ]  # fmt: skip
    assert result.headline()["results"][0]["verdict"] is None


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_an_interval_is_written_only_where_one_was_computed(tmp_path, seeds):
    """Two values beside one another read as an interval: below three seeds they are named as the seeds' own."""
    differences = (-0.5, -0.4, -0.48)[:seeds]
    runs = [run("vanilla", seed, 3.0) for seed in range(seeds)]
    runs += [run("resformer", seed, 3.0 + difference, difference) for seed, difference in enumerate(differences)]
    result = compared(tmp_path, *runs)
    layout = result.layout()
    final, domains = layout.lead[0], next(table for table in layout.tables if "by domain" in table[0])
    row = dict(zip(final[1], final[2][1], strict=True))
    relative = next(panel for panel in layout.panels if panel.key == "relative_loss")
    (line,) = relative.lines
    each = {1: "−0.5000 (1 seed)", 2: "−0.5000, −0.4000 (2 seeds)"}
    if seeds < 3:
        assert row["difference to vanilla"] == each[seeds]
        assert domains[2][0][1:] == [each[seeds]] * 2
        texts = [domains[0], relative.sentence, *(panel.sentence for panel in layout.panels), *layout.cards[-1]]
        assert not any("95%" in text for text in texts)
        assert line.low is None and "confidence interval" not in relative.sentence
    else:
        assert row["difference to vanilla"].startswith("−0.4600 (−0.59")
        assert "(−0.59" in domains[2][0][1] and "95% confidence interval" in relative.sentence
        assert line.low is not None and line.name == "resformer" and "95% CI" in layout.cards[-1][2]


def test_pairs_that_lack_a_side_are_left_out_and_named(tmp_path):
    result = compared(tmp_path, *three(-0.1), run("vanilla", 7, 9.0), run("svformer", 8, 9.0))
    first, second = result.outcomes
    assert first.seeds == (0, 1, 2) and first.missing == (7,) and np.isclose(first.final.change.value, -0.1)
    assert second.seeds == () and second.final is None and second.verdict is None and second.loss is None
    assert any("resformer (seed 7); svformer (seed 0, 1, 2, 7, 8)." in line for line in sentences(result))
    assert "no pair" in result.page()
    assert first.loss == pytest.approx(np.mean([row.final_loss for row in result.runs if row.variant == "resformer"]))
    _, _, finals = _finals(result, "")
    assert [row[1] for row in finals] == ["3", "3", "0"]  # seed 7 of the baseline, with a loss of 9, counts nowhere
    assert (
        max(float(row[2]) for row in finals[:2]) < 8
        and finals[2][2] == UNKNOWN
        and result.headline()["results"][1]["loss"] is None
    )
    assert "102,400 tokens" in result.layout().subtitle


def test_a_machine_is_named_where_all_runs_had_it(tmp_path):
    runs = [run(variant, seed) for seed in range(2) for variant in ("vanilla", "resformer")]
    environment = runs[0].environment
    elsewhere = environment.model_copy(update={"machine": environment.machine.model_copy(update={"gpu": "GPU X"})})
    other = [entry.model_copy(update={"environment": elsewhere}) for entry in runs]
    assert compared(tmp_path / "there", *other).layout().subtitle.endswith(" tokens · GPU X")
    assert compared(tmp_path / "both", *runs[:2], *other[2:]).layout().subtitle.endswith(" tokens")


def test_a_planted_critical_point(tmp_path):
    gap = 0.001 * (np.array(STEPS) - 120.0)
    result = compared(
        tmp_path, *three(0.1), *(run("svformer", seed, 3.2, gap + 1e-4 * seed) for seed in range(3)), smooth=1
    )
    points = {outcome.variant: outcome.critical for outcome in result.outcomes}
    assert points["resformer"] is None  # its curve is the baseline's
    assert np.allclose(points["svformer"].reached, [120, 119.9, 119.8]) and np.isclose(
        points["svformer"].step.value, 119.9
    )
    assert any("overtakes svformer" in line and "(by seed: 120, 120, 120)" in line for line in sentences(result))
    smooth = compared(tmp_path / "smooth", *three(0.1), *(run("svformer", s, 3.2, gap) for s in range(3)), smooth=30)
    late = [outcome.critical for outcome in smooth.outcomes if outcome.variant == "svformer"]
    assert np.isclose(late[0].step.value, 130)  # the mean over the last three points lags by one of them


@pytest.mark.parametrize("seeds", daily([1, 2, 3], 3))
def test_nothing_is_said_of_curves_that_differ_by_noise(tmp_path, seeds):
    """A band that holds point by point lies below 0 somewhere on most pages, and noise crosses 0 all the time."""
    generator = np.random.default_rng(0)
    overtaken = 0
    for page in range(20):
        runs = []
        for length in (64, 256):
            for seed in range(seeds):
                noise = generator.normal(0, 0.01, len(STEPS))
                runs += [run("vanilla", seed, length=length), run("svformer", seed, 3.0, noise, length=length)]
        result = compared(tmp_path / f"{page}", *runs)
        overtaken += any("overtake" in line for line in sentences(result)) or "Critical points" in result.page()
    assert overtaken <= 2


def test_a_variant_that_is_not_clearly_overtaken_is_not_named(tmp_path):
    """Every pair ends above 0, but so unevenly that the band does not."""
    runs = []
    for length in (64, 256):
        for seed, slope in enumerate((0.0001, 0.0001, 0.01)):
            rise = np.where(np.array(STEPS) > 120, slope, 0.01) * (np.array(STEPS) - 120.0)
            runs += [run("vanilla", seed, length=length), run("svformer", seed, 3.0, rise, length=length)]
    result = compared(tmp_path, *runs, smooth=1)
    assert all(outcome.critical.step is not None and not outcome.overtaken for outcome in result.outcomes)
    assert "Critical points" not in result.page()


SIZES = {"tiny": 1_000_000, "mini": 3_000_000, "small": 9_000_000}


def sized(saved, sizes=SIZES, seeds=3, noise=0.0):
    """Return runs whose losses follow 6 C^-0.05; one variant needs so much less of it."""
    runs = []
    for size, parameters in sizes.items():
        for seed in range(seeds):
            drawn = np.random.default_rng(seed).normal(0, noise)
            common = {"size": size, "parameters": parameters}
            runs.append(run("vanilla", seed, 6 * parameters**-0.05, **common))
            runs.append(run("resformer", seed, 6 * (parameters / (1 - saved)) ** -0.05 + drawn, **common))
    return runs


def test_planted_exponents_and_what_they_save(tmp_path):
    result = compared(tmp_path, *sized(0.2, noise=1e-4))
    assert [law.variant for law in result.laws] == ["vanilla", "resformer"] and result.no_laws is None
    baseline, law = result.laws
    assert law.cost == "parameters" and sorted(law.costs) == sorted(SIZES.values())
    assert abs(baseline.exponent.value - 0.05) < 1e-9 and abs(baseline.fewer.value) < 1e-9
    assert abs(law.exponent.value - 0.05) < 1e-3 and abs(law.fewer.value - 0.2) < 0.005 and not law.extrapolated
    assert law.fewer.low < law.fewer.value < law.fewer.high and (law.fewer.n, law.exponent.n) == (3, 3)
    assert law.exponent.interval is not None and law.exponent_over_seeds.low < 0.05 < law.exponent_over_seeds.high
    assert any("resformer needs 2" in line and "%) fewer parameters" in line for line in sentences(result))


def test_two_sizes_with_two_seeds_have_a_law_without_intervals(tmp_path):
    sizes = {"tiny": 1_000_000, "mini": 3_000_000}
    law = compared(tmp_path, *sized(-0.5, sizes, seeds=2)).laws[1]
    assert all(found.interval is None for found in (law.exponent, law.exponent_over_seeds, law.fewer))
    assert abs(law.fewer.value + 0.5) < 1e-9 and law.extrapolated  # it needs half as much again, more than was trained


def test_where_a_larger_model_is_worse_no_saving_is_reported(tmp_path):
    runs = []
    for size, parameters, plain in (("tiny", 10**6, 3.0), ("mini", 4 * 10**6, 3.3)):
        for seed in range(3):
            runs.append(run("vanilla", seed, plain + seed / 100, size=size, parameters=parameters))
            runs.append(run("resformer", seed, plain - 0.5 + seed / 90, size=size, parameters=parameters))
    result = compared(tmp_path, *runs)
    assert [law.fewer for law in result.laws] == [None, None]
    assert any("resformer does" in line for line in sentences(result))


def test_tokens_make_a_law_too(tmp_path):
    runs = [
        run(variant, seed, 6 * steps**-0.1 * factor, steps=steps)
        for variant, factor in (("vanilla", 1.0), ("resformer", 0.98))
        for steps in (200, 400)
        for seed in range(2)
    ]
    result = compared(tmp_path, *runs)
    assert {law.cost for law in result.laws} == {"tokens"} and np.isclose(result.laws[1].exponent.value, 0.1)
    assert np.isclose(result.laws[1].fewer.value, 1 - 0.98**10)


def test_configurations_of_the_same_cost_have_no_law(tmp_path):
    runs = []
    for number, rate in enumerate((1e-3, 3e-3)):
        for entry in three(0.01 * number):
            recipe = {**entry.recipe, "train": {"learning_rate": rate}}
            runs.append(entry.model_copy(update={"recipe": recipe}))
    result = compared(tmp_path, *runs)
    labels = [configuration.label for configuration in result.configurations]
    assert labels == ["train.learning_rate=0.001", "train.learning_rate=0.003"]
    (sentence,) = [line for line in sentences(result) if line.startswith("No power law")]
    assert not result.laws and "6.144e+11, 6.144e+11 FLOPs" in sentence


def test_configurations_that_cost_nearly_the_same_have_no_law(tmp_path):
    """A line through costs that differ by rounding would have any exponent."""
    runs = []
    for size, parameters in SIZES.items():
        steps = 10_000 * 1_000_000 // parameters + 1
        for seed in range(3):
            common = {"size": size, "parameters": parameters, "steps": steps}
            runs += [run(variant, seed, 3.0 + 0.01 * seed, **common) for variant in ("vanilla", "resformer")]
    result = compared(tmp_path, *runs)
    costs = sorted(entry.flops_per_token * entry.tokens for entry in result.runs)
    assert costs[0] < costs[-1] < 1.01 * costs[0] and not result.laws
    assert "a factor of 1.5" in "\n".join(sentences(result))


def halved(entry):
    """Return a run of half as many steps, and of half the text."""
    return entry.model_copy(update={"steps": entry.steps // 2, "tokens": entry.tokens // 2})


def test_steps_that_differ_leave_no_relative_curve(tmp_path):
    """Step 100 of one schedule is not step 100 of another."""
    runs = three(0.0)
    runs = [each if each.model.methods == [] else halved(each) for each in runs]
    assert compared(tmp_path, *runs).outcomes[0].curve is None


def test_sinks_and_stream_at_the_end_are_reported(tmp_path):
    inner = {"vanilla": (0.5, 20.0), "resformer": (0.25, 4.0)}
    runs = [
        run(variant, seed, snapshots=[snapshot(100, 0.1, 2.0), snapshot(200, share, growth)])
        for variant, (share, growth) in inner.items()
        for seed in range(2)
    ]
    result = compared(tmp_path, *runs)
    (rows,) = [rows for _, head, rows in result.layout().tables if "attention on the first token" in head]
    assert [row[0] for row in rows] == ["vanilla", "resformer"]
    assert {"50.0%", "× 20.00"} <= {*rows[0]} and {"25.0%", "× 4.00"} <= {*rows[1]}
    assert [panel.key for panel in result.layout().panels][-3:] == ["first_token_share", "sink_rate", "stream_growth"]


def test_twelve_variants_on_a_page_are_readable(tmp_path, browser):
    """No line, legend or label is cut off or overlaps another, and no figure has more than seven lines."""
    methods = [[{"name": "cla", "group": group}] for group in range(2, 13)]
    variants = ["vanilla", [{"name": "svformer", "anchors": [0, 2, 4]}, {"name": "cla", "group": 2}], *methods]
    runs = [
        run(variant, seed, 3 + number / 50 + seed / 99, number / 50)
        for number, variant in enumerate(variants)
        for seed in range(3)
    ]
    result = compared(tmp_path / "runs", *runs)
    page = result.save(tmp_path / "out")
    assert max(len(panel.lines) for panel in result.layout().panels) == 7
    for width in (1280, 390):
        resize(browser, width)
        browser.get(page.as_uri())
        assert browser.execute_script(LOOK) == [] and complaints(browser) == []


def test_the_result_comes_back_equal_and_a_change_is_refused(tmp_path):
    result = compared(tmp_path / "runs", *sized(0.2))
    result.save(tmp_path / "out")
    assert crosslayer.load_result(tmp_path / "out") == result
    record = result.record()
    record["runs"][0]["variant"] = "somebody"
    (tmp_path / "out" / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="list those"):
        crosslayer.load_result(tmp_path / "out")
