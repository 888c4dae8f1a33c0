"""The machine answers what it does."""

import math

import torch

from crosslayer.verbs.bench.costs import Load, structure
from crosslayer.verbs.bench.machine import measure_rates, operators
from tests.helpers.tiny import tiny


def test_rates_are_positive_numbers():
    model = tiny("llama", dtype=torch.float32)
    rates = measure_rates(structure(model), Load(8, 1, 2), model)
    assert all(0 < rate < math.inf for rate in rates.by_name().values()) and len(rates.by_name()) == 6
    assert not rates.asynchronous and rates.operator < 1e-2


def test_operators_are_counted():
    assert operators(lambda: torch.ones(2) + 1) == 2  # ones, add
