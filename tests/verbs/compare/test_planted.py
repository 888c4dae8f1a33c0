"""What is said of runs in which everything is planted."""

import json

import numpy as np
import pytest

import crosslayer
from crosslayer.verbs.compare.words import sentences
from tests.helpers.browser import complaints, resize
from tests.helpers.runs import STEPS, run, snapshot, written
from tests.output.test_page import LOOK

SPREAD = np.array([-1.0, 0.0, 1.0])  # of three seeds


def compared(folder, *runs, **options):
    return crosslayer.compare(written(folder, *runs), **options)


def three(difference, variant="resformer", spread=0.01, **changes):
    """Return runs of three seeds whose paired differences have a mean and a standard deviation."""
    sides = []
    for seed, deviation in enumerate(spread * SPREAD):
        sides += [run("vanilla", seed, 3 + 0.3 * seed, **changes)]
        sides += [run(variant, seed, 3 + 0.3 * seed + difference + deviation, **changes)]
    return sides


def test_a_difference_of_one_standard_error_is_no_win(tmp_path):
    error = 0.01 / np.sqrt(3)
    result = compared(tmp_path, *three(-error))
    (outcome,) = result.outcomes
    assert outcome.verdict == "undecided" and np.isclose(outcome.final.mean, -error)
    (words,) = [line for line in sentences(result) if "no difference" in line.lower()]
    assert words == (
        "No difference seen at this budget between resformer and vanilla, −0.0058 (−0.0306 to +0.0191); a difference "
        "of 0.01 would have needed about 7 seeds."
    )
    assert not any("lower loss" in line.lower() for line in sentences(result))


def test_a_clear_difference_is_a_win_however_much_the_seeds_differ(tmp_path):
    result = compared(tmp_path, *three(-0.1))
    assert result.outcomes[0].verdict == "lower" and result.headline()["results"][0]["verdict"] == "lower"
    (words,) = [line for line in sentences(result) if line.startswith("Lower loss than vanilla")]
    assert "resformer −0.1000 (−0.1248 to −0.0752)" in words
    assert np.allclose(result.differences, [-0.1]) and np.allclose(result.intervals, [[-0.12484, -0.07516]], atol=1e-5)
    assert [part.mean for part in result.outcomes[0].domains.values()] == pytest.approx([-0.1, -0.1])


def test_what_is_clear_alone_is_not_clear_among_many(tmp_path):
    runs = three(-0.028)  # p = 0.04
    for group in range(2, 6):
        runs += [
            run([{"name": "cla", "group": group}], seed, 3 + 0.3 * seed + 0.01 * SPREAD[seed]) for seed in range(3)
        ]
    result = compared(tmp_path, *runs)
    first = result.outcomes[[outcome.variant for outcome in result.outcomes].index("resformer")]
    assert (
        first.final.verdict == "lower"
        and first.verdict == "undecided"
        and np.isclose(first.adjusted, 5 * first.final.p)
    )
    words = "\n".join(sentences(result))
    assert "Beside vanilla, a difference only if taken alone: resformer" in words and "makes 5 comparisons" in words
    assert "lower only if taken alone" in result.page()


def test_an_interval_that_leaves_no_room_is_said_so(tmp_path):
    result = compared(tmp_path, *three(0.0, spread=0.001))
    assert any(
        line.endswith("(−0.0025 to +0.0025); a difference of 0.01 lies outside of the interval.")
        for line in sentences(result)
    )


def test_two_seeds_give_no_verdict_but_both_differences(tmp_path):
    runs = [part for seed in range(2) for part in (run("vanilla", seed, 3.0), run("resformer", seed, 2.5 + 0.1 * seed))]
    result = compared(tmp_path, *runs)
    assert (
        result.outcomes[0].verdict == "undecided"
        and np.isnan(result.intervals).all()
        and np.isnan(result.adjusted).all()
    )
    assert "seed by seed: resformer −0.5000 and −0.4000." in sentences(result)[0]
    assert "−0.5000 and −0.4000" in result.page() and "none: 2 seeds" in result.page()


def test_pairs_that_lack_a_side_are_left_out_and_named(tmp_path):
    result = compared(tmp_path, *three(-0.1), run("vanilla", 7, 9.0), run("svformer", 8, 9.0))
    first, second = result.outcomes
    assert first.seeds == (0, 1, 2) and first.missing == (7,) and np.isclose(first.final.mean, -0.1)
    assert second.seeds == () and second.final is None and second.verdict == "undecided"
    words = sentences(result)
    assert (
        "Left out, since the variant or vanilla has no run of that seed: resformer (seed 7); "
        "svformer (seed 0, 1, 2, 7, 8)." in words
    )
    assert "no pair" in result.page()
    assert "2 beside vanilla · 3 seeds, paired · 8 runs of 102,400 tokens · " in result.layout().subtitle


def test_a_machine_is_named_where_all_runs_had_it(tmp_path):
    runs = [run(variant, seed) for seed in range(2) for variant in ("vanilla", "resformer")]
    environment = runs[0].environment
    elsewhere = environment.model_copy(update={"machine": environment.machine.model_copy(update={"gpu": "GPU X"})})
    other = [part.model_copy(update={"environment": elsewhere}) for part in runs]
    assert compared(tmp_path / "there", *other).layout().subtitle.endswith(" tokens · GPU X")
    assert compared(tmp_path / "both", *runs[:2], *other[2:]).layout().subtitle.endswith(" tokens")


def test_a_planted_critical_point(tmp_path):
    gap = 0.001 * (np.array(STEPS) - 120.0)
    result = compared(
        tmp_path, *three(0.1), *(run("svformer", seed, 3.2, gap + 1e-4 * seed) for seed in range(3)), smooth=1
    )
    points = {outcome.variant: outcome.critical for outcome in result.outcomes}
    assert points["resformer"] is None  # its curve is the baseline's
    assert np.allclose(points["svformer"].reached, [120, 119.9, 119.8]) and np.isclose(points["svformer"].mean, 119.9)
    assert any(
        line.startswith("svformer is overtaken by vanilla in training loss at step 120") for line in sentences(result)
    )
    smooth = compared(tmp_path / "smooth", *three(0.1), *(run("svformer", s, 3.2, gap) for s in range(3)), smooth=30)
    late = [outcome.critical for outcome in smooth.outcomes if outcome.variant == "svformer"]
    assert np.isclose(late[0].mean, 130)  # the mean over the last three points lags by one of them


def test_a_critical_point_to_come_is_expected(tmp_path):
    gap = 0.001 * (np.array(STEPS) - 400.0)
    result = compared(tmp_path, *three(0.0), *(run("svformer", seed, 3.0, gap) for seed in range(3)), smooth=1)
    points = result.outcomes[-1].critical
    assert points.reached == (None,) * 3 and points.mean is None and np.allclose(points.expected, 400)
    assert "expected 400" in result.page()


def test_critical_points_over_lengths_are_continued(tmp_path):
    runs = []
    for length in (64, 256):
        gap = 0.001 * (np.array(STEPS) - (20 + length / 2))
        runs += [run("vanilla", seed, length=length) for seed in range(3)]
        runs += [run("svformer", seed, 3.1, gap, length=length) for seed in range(3)]
    result = compared(tmp_path, *runs, smooth=1)
    (trend,) = result.trends
    reached = np.array([52 * 8 * 64, 148 * 8 * 256])  # steps, of eight sequences
    exponent = np.log(reached[1] / reached[0]) / np.log(4)
    assert trend.lengths == (64, 256) and np.allclose(trend.tokens, reached) and np.isclose(trend.exponent, exponent)
    assert trend.interval is None and trend.next_length == 512
    assert np.isclose(trend.next_tokens, reached[1] * 2**exponent) and not result.laws
    (words,) = [line for line in sentences(result) if "no interval from two lengths" in line]
    assert "overtakes svformer after 26,624 tokens with sequences of 64, 303,104 tokens with sequences of 256;" in words


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_nothing_is_said_of_curves_that_differ_by_noise(tmp_path, seeds):
    """A band that holds point by point lies below 0 somewhere on most pages, and noise crosses 0 all the time."""
    generator = np.random.default_rng(0)
    told = 0
    for page in range(20):
        runs = []
        for length in (64, 256):
            for seed in range(seeds):
                noise = generator.normal(0, 0.01, len(STEPS))
                runs += [run("vanilla", seed, length=length), run("svformer", seed, 3.0, noise, length=length)]
        result = compared(tmp_path / f"{page}", *runs)
        told += any("overtake" in line for line in sentences(result)) or "Critical points" in result.page()
    assert told <= 2


def test_an_variant_that_is_not_overtaken_has_no_trend(tmp_path):
    """Every pair ends above 0, but so unevenly that the band does not."""
    runs = []
    for length in (64, 256):
        for seed, slope in enumerate((0.0001, 0.0001, 0.01)):
            rise = np.where(np.array(STEPS) > 120, slope, 0.01) * (np.array(STEPS) - 120.0)
            runs += [run("vanilla", seed, length=length), run("svformer", seed, 3.0, rise, length=length)]
    result = compared(tmp_path, *runs, smooth=1)
    assert all(outcome.critical.mean is not None and not outcome.overtaken for outcome in result.outcomes)
    assert not result.trends and "Critical points" not in result.page()


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
    assert abs(baseline.exponent - 0.05) < 1e-9 and abs(baseline.fewer) < 1e-9
    assert abs(law.exponent - 0.05) < 1e-3 and abs(law.fewer - 0.2) < 0.005 and not law.extrapolated
    assert law.fewer_interval[0] < law.fewer < law.fewer_interval[1]
    assert law.exponent_interval is not None and law.exponent_over_seeds is not None
    assert any("resformer reaches the loss of vanilla at its largest with 2" in line for line in sentences(result))


def test_two_sizes_with_two_seeds_have_a_law_without_intervals(tmp_path):
    sizes = {"tiny": 1_000_000, "mini": 3_000_000}
    law = compared(tmp_path, *sized(-0.5, sizes, seeds=2)).laws[1]
    assert law.exponent_interval is None and law.exponent_over_seeds is None and law.fewer_interval is None
    assert abs(law.fewer + 0.5) < 1e-9 and law.extrapolated  # it needs half as much again, more than was trained


def test_where_a_larger_model_is_worse_no_law_says_what_would_be_saved(tmp_path):
    runs = []
    for size, parameters, plain in (("tiny", 10**6, 3.0), ("mini", 4 * 10**6, 3.3)):
        for seed in range(3):
            runs.append(run("vanilla", seed, plain + seed / 100, size=size, parameters=parameters))
            runs.append(run("resformer", seed, plain - 0.5 + seed / 90, size=size, parameters=parameters))
    result = compared(tmp_path, *runs)
    assert [law.fewer for law in result.laws] == [None, None]
    (words,) = [line for line in sentences(result) if "no law says" in line]
    assert words == "The loss of vanilla and resformer does not fall with parameters; no law says what would reach it."


def test_tokens_make_a_law_too(tmp_path):
    runs = [
        run(variant, seed, 6 * steps**-0.1 * factor, steps=steps)
        for variant, factor in (("vanilla", 1.0), ("resformer", 0.98))
        for steps in (200, 400)
        for seed in range(2)
    ]
    result = compared(tmp_path, *runs)
    assert {law.cost for law in result.laws} == {"tokens"} and np.isclose(result.laws[1].exponent, 0.1)
    assert np.isclose(result.laws[1].fewer, 1 - 0.98**10)


def test_settings_of_the_same_cost_have_no_law(tmp_path):
    runs = []
    for number, rate in enumerate((1e-3, 3e-3)):
        for part in three(0.01 * number):
            recipe = {**part.recipe, "train": {"learning_rate": rate}}
            runs.append(part.model_copy(update={"recipe": recipe}))
    result = compared(tmp_path, *runs)
    assert [setting.label for setting in result.settings] == ["train.learning_rate=0.001", "train.learning_rate=0.003"]
    assert not result.laws and "No power law: the runs of vanilla cost 6.144e+11, 6.144e+11 F" in (
        "\n".join(sentences(result))
    )


def test_settings_that_cost_nearly_the_same_have_no_law(tmp_path):
    """A budget of FLOPs over sizes: a line through costs that differ by rounding would have any exponent."""
    runs = []
    for size, parameters in SIZES.items():
        steps = 10_000 * 1_000_000 // parameters + 1
        for seed in range(3):
            common = {"size": size, "parameters": parameters, "steps": steps}
            runs += [run(variant, seed, 3.0 + 0.01 * seed, **common) for variant in ("vanilla", "resformer")]
    result = compared(tmp_path, *runs)
    costs = sorted(part.flops_per_token * part.tokens for part in result.runs)
    assert costs[0] < costs[-1] < 1.01 * costs[0] and not result.laws
    assert "and a law needs a factor of 1.5 between them." in "\n".join(sentences(result))


def halved(part):
    """Return a run of half as many steps, and of half the text."""
    return part.model_copy(update={"steps": part.steps // 2, "tokens": part.tokens // 2})


def test_steps_that_differ_leave_no_relative_curve(tmp_path):
    """Under a budget variants have schedules of their own, and step 100 of one is not step 100 of another."""
    runs = three(0.0)
    runs = [part if part.model.methods == [] else halved(part) for part in runs]
    assert compared(tmp_path, *runs).outcomes[0].curve is None


def test_what_was_seen_inside(tmp_path):
    inner = {"vanilla": (0.5, 20.0), "resformer": (0.25, 4.0)}
    runs = [
        run(variant, seed, snapshots=[snapshot(100, 0.1, 2.0), snapshot(200, share, growth)])
        for variant, (share, growth) in inner.items()
        for seed in range(2)
    ]
    result = compared(tmp_path, *runs)
    assert (
        "At the end the first token takes 25.0% (resformer) to 50.0% (vanilla) of the attention; from the first layer "
        "to the last the stream's norm grows by × 4.00 (resformer) to × 20.00 (vanilla)." in sentences(result)
    )
    assert [panel.key for panel in result.layout().panels][-3:] == ["first_token", "sink_rate", "stream_growth"]


def test_twelve_variants_on_a_page_can_be_told(tmp_path, browser):
    """No line, legend or label is cut or lies over another, and no figure has more than seven lines."""
    methods = [[{"name": "cla", "group": group}] for group in range(2, 13)]
    variants = ["vanilla", [{"name": "svformer", "anchors": [0, 2, 4]}, {"name": "cla", "group": 2}], *methods]
    runs = [
        run(variant, seed, 3 + place / 50 + seed / 99, place / 50)
        for place, variant in enumerate(variants)
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
    with pytest.raises(ValueError, match="of a setting or a variant that the record does not list"):
        crosslayer.load_result(tmp_path / "out")
