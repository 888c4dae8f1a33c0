"""Effective speedups: curves with a known answer, the rate of false findings, and what they need from a run."""

import numpy as np
import pytest

import crosslayer
from crosslayer.verbs.compare.grid import read_methods
from crosslayer.verbs.compare.speedup import first_below, geometric_mean, monotone, ratio
from tests.helpers.runs import run, written

TOKENS = np.linspace(1 / 32, 1, 32)  # of evaluations, as a share of a run


def curve(tokens, floor=3.0, scale=0.5, exponent=0.4):
    return floor + scale * tokens**-exponent


@pytest.mark.parametrize("faster", [0.5, 0.8, 1.05, 1.5, 3.0])
def test_a_variant_that_needs_fewer_tokens_has_that_speedup(faster):
    pair = monotone(TOKENS, curve(faster * TOKENS)), monotone(TOKENS, curve(TOKENS))
    # 2%: between two evaluations a curve is taken as a line over log tokens, and an average of three as their middle
    assert ratio(*pair) == pytest.approx(faster, rel=0.02)
    assert ratio(*pair[::-1]) == pytest.approx(1 / ratio(*pair), rel=1e-12)


def test_a_curve_that_jumps_up_is_read_where_it_was_first_as_low():
    losses = curve(TOKENS)
    losses[20:25] += 1.0  # a spike after it
    tokens, lowest = monotone(TOKENS, losses)
    assert (np.diff(lowest) <= 0).all()
    assert first_below((tokens, lowest), curve(0.4)) == pytest.approx(0.4, rel=0.01)


def test_a_loss_above_the_whole_curve_has_no_answer():
    diverged = monotone(TOKENS, curve(TOKENS) + 50.0)
    assert ratio(diverged, monotone(TOKENS, curve(TOKENS))) is None


def test_identical_methods_differ_in_at_most_7_of_100_comparisons():
    """2,000 comparisons of four pairs, whose curves differ by the noise of a run and of each evaluation alone."""
    drawn, excluded = np.random.default_rng(0), 0
    for _ in range(2000):
        ratios = []
        for _ in range(4):
            noisy = [
                monotone(TOKENS, curve(TOKENS) + drawn.normal(0, 0.02) + drawn.normal(0, 0.005, len(TOKENS)))
                for _ in range(2)
            ]
            ratios.append(ratio(*noisy))
        low, high = geometric_mean(ratios).interval
        excluded += not low <= 1 <= high
    assert excluded / 2000 <= 0.07


def trained(method, seed, faster, minimum=1, **changes):
    """Return a run whose held-out loss falls `faster` times as fast."""
    losses = curve(faster * TOKENS) + 0.001 * seed
    return run(method, seed, losses[-1], validation=losses, minimum=minimum, **changes)


def test_three_ratios_of_a_comparison(tmp_path):
    runs = [trained("vanilla", seed, 1) for seed in range(3)]
    runs += [trained("mudd", seed, 2 + 0.1 * seed) for seed in range(3)]
    (outcome,) = crosslayer.compare(written(tmp_path, *runs)).outcomes
    found = outcome.speedup
    assert found.tokens.value == pytest.approx((2.0 * 2.1 * 2.2) ** (1 / 3), rel=0.03)
    assert found.tokens.interval is not None and found.tokens.none == 1 and found.seconds is None
    own, other = runs[-1].model.flops_per_token, runs[0].model.flops_per_token
    assert found.flops.value == pytest.approx(found.tokens.value * other / own)


def test_records_alone_have_no_steps_to_time(tmp_path):
    folders = written(tmp_path, *(trained(method, 0, 1) for method in ("vanilla", "mudd")))
    with pytest.raises(ValueError, match="`step_rounds`"):
        crosslayer.compare(folders, step_rounds=5)


def test_a_rate_that_decays_gives_no_speedup(tmp_path):
    runs = [trained(method, seed, 1, minimum=0.1) for method in ("vanilla", "mudd") for seed in range(3)]
    result = crosslayer.compare(written(tmp_path, *runs))
    assert result.outcomes[0].speedup is None
    assert any("of mudd" in line and "schedule.minimum=1" in line for line in result.sentences())


def test_variants_with_a_rate_of_their_own_are_paired(tmp_path):
    """And a variant with two rates is two configurations, as any other key is."""
    runs = [trained("vanilla", seed, 1, rate=3e-3) for seed in range(3)]
    runs += [trained("mudd", seed, 2, rate=1e-3) for seed in range(3)]
    result = crosslayer.compare(written(tmp_path / "own", *runs))
    assert len(result.configurations) == 1 and len(result.outcomes[0].seeds) == 3
    assert {variant.label: variant.learning_rate for variant in result.variants} == {"vanilla": 3e-3, "mudd": 1e-3}
    more = [trained("mudd", seed, 2, rate=3e-3) for seed in range(3)]
    result = crosslayer.compare(written(tmp_path / "two", *runs, *more))
    assert len(result.configurations) == 2 and all(variant.learning_rate is None for variant in result.variants)


def test_a_rate_is_given_with_the_methods():
    vanilla, mudd = read_methods("[vanilla, {learning_rate: 6e-3}], [mudd, {learning_rate: 1e-3}]")
    assert (vanilla.label, vanilla.learning_rate, mudd.label, mudd.learning_rate) == ("vanilla", 6e-3, "mudd", 1e-3)
    for wrong in ("[mudd, {learning_rate: 2}]", "[mudd, {learning_rate: fast}]"):
        with pytest.raises(ValueError, match="learning_rate"):
            read_methods(f"vanilla, {wrong}")
