"""Power laws of the loss: fitted, with intervals, and what they save.

    L = A · C^−α, fitted as a straight line of log L over log C

Source: Attention Residuals (arXiv 2603.15031), scaling laws; arXiv 2410.17897, Fig. 1.
Shapes: P points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from crosslayer.stats.means import FEWEST, Interval, t_quantile

FARTHEST = 1000  # times a cost at which a law says anything


@dataclass(frozen=True)
class PowerLaw:
    """L = scale · C^−exponent; intervals are of 95 %, by Student's t, and missing with two points.

    They hold where the logarithms of the losses scatter evenly about the line; a curve that bends has none.
    """

    scale: float
    exponent: float
    exponent_interval: Interval | None
    smallest: float
    largest: float

    def loss(self, cost: float) -> float:
        """Return the loss at a cost."""
        return self.scale * cost**-self.exponent

    def cost(self, loss: float) -> float:
        """Return the cost at which the law reaches a loss."""
        return (self.scale / loss) ** (1 / self.exponent)


def fit_power_law(costs: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Return the law through P points of costs (parameters, tokens, FLOPs) and losses, all positive.

    Raises:
        ValueError: there are fewer than two different costs, or a value is not positive.

    """
    if len(costs) != len(losses) or len(set(costs)) < 2:
        raise ValueError(f"a power law needs two different costs, each with its loss; got {len(set(costs))}")
    if not all(np.isfinite(value) and value > 0 for value in (*costs, *losses)):
        raise ValueError("a power law needs costs and losses above 0")
    line: Any = stats.linregress(np.log(costs), np.log(losses))
    interval = None
    if len(costs) >= FEWEST:  # two lie on a line
        half = t_quantile(len(costs) - 2) * float(line.stderr)
        interval = (-line.slope - half, -line.slope + half)
    return PowerLaw(float(np.exp(line.intercept)), float(-line.slope), interval, min(costs), max(costs))


def relative_cost(method: PowerLaw, baseline: PowerLaw, cost: float) -> float | None:
    """Return the method's cost over the baseline's, for the loss that the baseline has at `cost`: below 1 it saves.

    None where the method's law does not fall, or reaches that loss nowhere near: at less or more than a thousandth or a
    thousand times the cost.
    """
    if method.exponent <= 0:
        return None
    logarithm = math.log(method.scale / baseline.loss(cost)) / method.exponent - math.log(cost)
    return math.exp(logarithm) if abs(logarithm) < math.log(FARTHEST) else None
