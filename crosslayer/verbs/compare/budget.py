"""A referee's budget: the same time, FLOPs or tokens for every run, as steps of each arm.

    time:  steps = ⌊seconds / measured seconds a step⌋
    FLOPs: steps = ⌊FLOPs / (FLOPs of a token · tokens of a step)⌋

A run that is cut off has not let its learning rate fall; so each arm has a schedule over the steps that fit.
"""

import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from crosslayer.verbs.compare.record import Budget
from crosslayer.verbs.train.recipe_file import nearest
from crosslayer.verbs.train.result import TrainingRun

ROUNDS, WARM, TIMED = 3, 2, 8  # in turns; steps of each that are not timed, and that are
SHORT = (  # what is set for a run that is measured
    f"schedule.steps={WARM + TIMED}",
    "schedule.tokens=null",
    "schedule.warmup=0",
    "train.logging_steps=1",
    "train.report_to=none",
    "eval.every=0",
    "eval.windows=1",
    "eval.looks=0",
)
KINDS = ("time", "flops", "tokens")
Short = Callable[[str, Path], TrainingRun]  # trains an arm by its key for `SHORT` into a folder


def read_budget(text: str) -> Budget:
    """Read "time=60" (seconds), "flops=1e14" or "tokens=1e6".

    Raises:
        ValueError: it is something else.

    """
    kind, _, number = text.partition("=")
    if kind not in KINDS:
        raise ValueError(f"`budget` is {text!r}; write for example time=60, in seconds: {nearest(kind, KINDS)}")
    try:
        amount = float(number)
    except ValueError:
        amount = math.nan
    if not (math.isfinite(amount) and amount > 0):
        raise ValueError(f"`budget` is {text!r}; write a number above 0, for example {kind}=60")
    return Budget(kind=kind, amount=amount, step_seconds={})


def measured(budget: Budget, keys: Sequence[str], short: Short, folder: Path) -> tuple[Budget, dict[str, int]]:
    """Return the budget with what was measured, and the steps of every arm.

    Arms run in turns, in an order that alternates, so that all meet the same moments of the machine; a time is the
    median over rounds of the median over steps.

    Raises:
        ValueError: not a step fits.

    """
    rounds = ROUNDS if budget.kind == "time" else 1
    runs: dict[str, list[TrainingRun]] = {key: [] for key in keys}
    for number in range(rounds):
        for key in keys if number % 2 == 0 else reversed(keys):
            shutil.rmtree(folder, ignore_errors=True)
            runs[key].append(short(key, folder))
    shutil.rmtree(folder, ignore_errors=True)
    if budget.kind == "flops":
        costs = {key: own[0].model.flops_per_token * own[0].tokens / own[0].steps for key, own in runs.items()}
        return budget, {key: whole_steps(budget.amount, cost, key) for key, cost in costs.items()}
    seconds = {key: statistics.median(map(step_seconds, own)) for key, own in runs.items()}
    steps = {key: whole_steps(budget.amount, cost, key) for key, cost in seconds.items()}
    return budget.model_copy(update={"step_seconds": seconds}), steps


def step_seconds(run: TrainingRun) -> float:
    """Return the median time of a short run's steps, the first left out."""
    tokens = run.tokens / run.steps
    return statistics.median(tokens / speed for speed in run.curve.tokens_per_second[WARM:])


def whole_steps(amount: float, cost: float, name: str) -> int:
    """Return how many steps of a cost fit into an amount.

    Raises:
        ValueError: not one does.

    """
    if amount < cost:
        raise ValueError(f"`budget` is too small for a step of {name}, which takes {cost:.3g} of {amount:.3g}")
    return math.floor(amount / cost)
