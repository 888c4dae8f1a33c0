"""The same losses have the same interval, whichever verb reports them."""

import pytest

import crosslayer
from crosslayer.judge import judge
from crosslayer.testing.tiny import tokens
from tests.helpers.tiny import tiny

TEXT = {"a": tokens(40, 20, 0), "b": tokens(40, 20, 1)}
UNITED = ("KL", "perplexity", "changed tokens")


@pytest.mark.parametrize("seed", [0, 5])
def test_retrofit_and_measure_report_the_same_of_the_same_losses(seed, monkeypatch):
    """A retrofit's own report, and `measure` of that retrofit as a candidate, given the losses of the report."""
    model, kept = tiny("llama", num_hidden_layers=4), {}
    find = judge.losses

    def keep(*args, **options):
        found = find(*args, **options)
        kept.setdefault("first", next(iter(found.values())))
        return {name: kept["first"] for name in found}

    monkeypatch.setattr(judge, "losses", keep)
    method = {"name": "cla", "groups": [[2, 3]]}
    options = {"windows": 32, "length": 20, "seed": seed}
    report = crosslayer.retrofit(model, TEXT, method=method, **options)
    measured = crosslayer.measure(model, candidates={"retrofit": report.model}, text=TEXT, only=["kl"], **options)
    rows = [row for row in report.rows if row.quantity in UNITED]
    assert rows and rows == list(measured.rows)
    assert report.frame()["quantity"][: len(rows)] == measured.frame()["quantity"]
    assert {row.quantity for row in rows} == set(UNITED)
    other = crosslayer.measure(
        model, candidates={"retrofit": report.model}, text=TEXT, only=["kl"], **options | {"seed": seed + 1}
    )
    assert other.rows[0].change != measured.rows[0].change  # the seed is that of the bootstrap
