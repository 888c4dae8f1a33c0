"""How many times fewer tokens, FLOPs or seconds a variant needs than the baseline for the same loss.

    T_b / t_v(L_b)   if the variant reaches the baseline's final loss L_b, after t_v tokens of T_b
    t_b(L_v) / T_v   otherwise, by the tokens after which the baseline had the variant's final loss; below 1

Both are the same question asked at the higher of the two final losses, so exchanging variant and baseline gives the
inverse. Losses are held-out losses, smoothed alike and made monotone. A learning rate that decays lowers the final loss
of a run below what the same run shows at the same tokens of a longer schedule, so a speedup is only computed for a
constant rate after the warmup.
Shapes: N evaluations, S pairs (seeds with a run of both).
"""

import math
from collections.abc import Sequence

import numpy as np

from crosslayer.stats.differences import t_mean
from crosslayer.stats.estimate import Estimate
from crosslayer.stats.times import TimeComparison
from crosslayer.verbs.compare.result import EVALUATIONS, ComparedRun, Speedup

# Evaluations that are averaged. A single one carries noise of its windows and of its step, which would decide when a
# curve first reaches a loss; many would flatten the steep beginning.
WIDTH = 3

Curve = tuple[np.ndarray, np.ndarray]  # tokens (N − WIDTH + 1,), lowest loss until then


def speedup(
    candidates: Sequence[ComparedRun], baselines: Sequence[ComparedRun], step: TimeComparison | None
) -> Speedup | None:
    """Return the speedup of runs (S,) over the baseline's of the same seeds; None without curves that can show it."""
    runs = (*candidates, *baselines)
    if not candidates or not all(run.constant_rate and len(run.validation.steps) >= EVALUATIONS for run in runs):
        return None
    curves = []
    for run in runs:
        steps, losses = np.array(run.validation.steps), np.array(run.validation.losses)
        curves.append(monotone(steps * run.tokens / run.steps, losses))
    pairs = zip(curves[: len(candidates)], curves[len(candidates) :], strict=True)
    by_seed = [ratio(candidate, baseline) for candidate, baseline in pairs]
    # A mean over the other seeds would leave out the worst ones.
    if any(value is None for value in by_seed):
        return None
    tokens = geometric_mean([value for value in by_seed if value is not None])

    # Seconds follow from the ratio of step times. Both factors have an interval. The ends are the worst and the best of
    # both at once, so this interval is wider than it has to be.
    seconds = None
    if step is not None:
        low, high = None, None
        if tokens.interval is not None and step.change.interval is not None:
            low = tokens.interval[0] / step.change.interval[1]
            high = tokens.interval[1] / step.change.interval[0]
        seconds = tokens.model_copy(update={"value": tokens.value / step.change.value, "low": low, "high": high})
    variant_flops, baseline_flops = candidates[0].flops_per_token, baselines[0].flops_per_token
    return Speedup(
        by_seed=tuple(value for value in by_seed if value is not None),
        tokens=tokens,
        flops=tokens.mapped(lambda value: value * baseline_flops / variant_flops) if variant_flops > 0 else None,
        seconds=seconds,
    )


def monotone(tokens: np.ndarray, losses: np.ndarray) -> Curve:
    """Return the moving average of `WIDTH` losses (N,), lowest so far, at the mean tokens of each average.

    Each average is placed at the mean of its tokens. Placed at the last of them, it would lag behind a falling curve,
    and speedups would move towards 1.
    """
    kernel = np.full(WIDTH, 1 / WIDTH)
    means, losses = (np.convolve(values, kernel, mode="valid") for values in (tokens, losses))
    return means, np.minimum.accumulate(losses)


def ratio(candidate: Curve, baseline: Curve) -> float | None:
    """Return the speedup of one pair; None if the higher final loss is above the other curve's first value."""
    # Both are asked for the higher of the two final losses, which both reach.
    if candidate[1][-1] <= baseline[1][-1]:
        reached = first_below(candidate, baseline[1][-1])
        return None if reached is None else float(baseline[0][-1] / reached)
    reached = first_below(baseline, candidate[1][-1])
    return None if reached is None else float(reached / candidate[0][-1])


def first_below(curve: Curve, loss: float) -> float | None:
    """Return after how many tokens a monotone curve reaches a loss that its end is not above.

    Between two points it is a line over the logarithm of tokens. None if the curve begins below the loss.
    """
    tokens, losses = curve
    after = int(np.argmax(losses <= loss))
    if after == 0:
        return float(tokens[0]) if losses[0] == loss else None
    before = after - 1
    share = (losses[before] - loss) / (losses[before] - losses[after])
    return float(tokens[before] * (tokens[after] / tokens[before]) ** share)


def geometric_mean(ratios: Sequence[float]) -> Estimate:
    """Return the geometric mean of ratios (S,), with Student's t interval of the mean of their logarithms."""
    return t_mean(np.log(ratios)).mapped(math.exp)
