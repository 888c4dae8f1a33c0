"""What repeats add up to, and how a prediction that is off is explained."""

import pytest

from crosslayer.verbs.bench.costs import Prediction, Rates
from crosslayer.verbs.bench.record import Comparison, Timing, UnsteadyRate
from crosslayer.verbs.bench.summary import explain, middle, unsteadiest

RATES = ("matrices", "attention", "weights", "states", "copies", "operator")


def side(quartiles, share):
    return Timing(median=1.0, quartiles=quartiles, predicted=Prediction(seconds=1.0, work={}, operators=share))


def comparison(candidate, baseline):
    return Comparison(candidate=candidate, baseline=baseline, ratio=1.0, interval=None, verdict="no difference seen")


def copies(spread):
    return UnsteadyRate(rate="copies", spread=spread)


def test_a_prediction_that_is_off_is_explained_by_what_was_seen():
    calm = comparison(side((1.0, 1.1), 0.1), side((1.0, 1.1), 0.1))
    assert explain("the ratio", 1.15, 1.0, calm, copies(0.5)) is None
    assert "no cause" in explain("the ratio", 1.3, 1.0, calm, copies(0.1)).words
    assert "copies rate varied by 50%" in explain("the ratio", 0.7, 1.0, calm, copies(0.5)).words
    noisy = comparison(calm.candidate, side((1.0, 1.5), 0.9))
    note = explain("the ratio", 0.7, 1.0, noisy, copies(0.1))
    assert note.off == pytest.approx(-0.3) and "30% below" in note.words
    assert "baseline's repeats vary by 50%" in note.words and "90% of the baseline's prediction" in note.words


def test_the_median_of_each_rate_counts_and_the_least_steady_is_named():
    base = Rates(**dict.fromkeys(RATES, 1.0))
    repeats = [base, base, base.model_copy(update={"weights": 3.0})]
    assert unsteadiest(repeats) == UnsteadyRate(rate="weights", spread=1.0)
    assert middle(repeats) == base and middle(repeats[1:]).weights == 2.0
