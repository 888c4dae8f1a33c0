"""A budget: the same time, FLOPs or tokens for every run, converted to steps for each variant, and `grid.json`.

    time:  steps = ⌊seconds / measured seconds a step⌋
    FLOPs: steps = ⌊FLOPs / (FLOPs per token · tokens per step)⌋

Each variant has a learning rate schedule over the steps that fit, since a run that is cut off would end at a high
learning rate. `grid.json` in the folder of a comparison holds the budget, the steps, and the runs that diverged.
"""

import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from crosslayer.output.record import Frozen, validation_message
from crosslayer.training.recipe_file import nearest
from crosslayer.verbs.compare.result import Budget
from crosslayer.verbs.train.result import TrainingRun

ROUNDS, WARM, TIMED = 3, 2, 8  # rounds over all variants; steps of each run that warm up, and that are timed
SHORT = (  # overrides of a recipe for the short run that is measured
    f"schedule.steps={WARM + TIMED}",
    "schedule.tokens=null",
    "schedule.warmup=0",
    "train.logging_steps=1",
    "train.report_to=none",
    "eval.every=0",
    "eval.windows=1",
    "eval.snapshots=0",
)
UNITS = ("time", "flops", "tokens")
STATE = "grid.json"
LARGEST = 2**24  # bytes of it; a thousand runs need a tenth of that
Short = Callable[[str, Path], TrainingRun]  # trains a variant, by its key, with the overrides `SHORT` into a folder


class Stopped(Frozen):
    """A run that diverged: the message, and the SHA-256 of its recipe, so that a changed recipe is trained again."""

    what: str
    recipe: str


class State(Frozen):
    """What `grid.json` holds, so that runs can be resumed and read."""

    schema_: Literal["crosslayer/grid/2"] = Field(
        "crosslayer/grid/2", validation_alias="schema", serialization_alias="schema"
    )
    budget: Budget | None = None
    steps: dict[str, int] = Field({}, description="of each variant and configuration, if a budget sets them")
    stopped: dict[str, Stopped] = Field({}, description="runs that diverged, by name")


def read_state(folder: Path) -> State | None:
    """Return what `grid.json` of a folder holds; None if there is none."""
    path = folder / STATE
    if not path.is_file():
        return None
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{STATE} must have at most {LARGEST:,} bytes, got {path.stat().st_size:,}")
    try:
        return State.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{STATE}: {validation_message(error)}") from None


def read_budget(text: str) -> Budget:
    """Read "time=60" (seconds), "flops=1e14" or "tokens=1e6"."""
    unit, _, number = text.partition("=")
    if unit not in UNITS:
        raise ValueError(
            f"`budget` must be time=SECONDS, flops=NUMBER or tokens=NUMBER, got {text!r}; {nearest(unit, UNITS)}"
        )
    try:
        amount = float(number)
    except ValueError:
        amount = math.nan
    if not (math.isfinite(amount) and amount > 0):
        raise ValueError(f"`budget` must be a number above 0, got {text!r}; for example {unit}=60")
    return Budget(kind=unit, amount=amount, step_seconds={})


def measured(budget: Budget, keys: Sequence[str], short: Short, folder: Path) -> tuple[Budget, dict[str, int]]:
    """Return the budget with the measured times per step, and the number of steps of each variant.

    Short runs of the variants alternate, in an order that reverses each round, so that all see the same state of the
    machine. The time per step is the median over rounds of the median over steps.
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
    costs = {key: statistics.median(map(_step_seconds, own)) for key, own in runs.items()}
    steps = {key: whole_steps(budget.amount, cost, key) for key, cost in costs.items()}
    return budget.model_copy(update={"step_seconds": costs}), steps


def _step_seconds(run: TrainingRun) -> float:
    """Return the median time of a short run's steps in seconds, without the warm-up."""
    tokens = run.tokens / run.steps
    return statistics.median(tokens / speed for speed in run.curve.tokens_per_second[WARM:])


def whole_steps(amount: float, cost: float, name: str) -> int:
    """Return how many steps of this cost fit into the amount."""
    if amount < cost:
        raise ValueError(f"`budget` must allow at least one step: a step of {name} needs {cost:.3g}, got {amount:.3g}")
    return math.floor(amount / cost)
