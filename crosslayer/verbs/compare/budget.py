"""A referee's budget: the same time, FLOPs or tokens for every run, as steps of each variant; and what keeps it.

    time:  steps = ⌊seconds / measured seconds a step⌋
    FLOPs: steps = ⌊FLOPs / (FLOPs of a token · tokens of a step)⌋

A run that is cut off has not let its learning rate fall; each variant has a schedule over the steps that fit. A folder
of trained runs keeps in `grid.json` beside them the budget, its steps, and the runs that diverged.
"""

import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from crosslayer.output.record import Frozen, validation_message
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
    "eval.snapshots=0",
)
KINDS = ("time", "flops", "tokens")
STATE = "grid.json"
LARGEST = 2**24  # bytes of it; a thousand runs have a tenth of that
Short = Callable[[str, Path], TrainingRun]  # trains a variant by its key for `SHORT` into a folder


class Stopped(Frozen):
    """A run that diverged: how, and by which recipe (its SHA-256), so that another one is trained."""

    what: str
    recipe: str


class State(Frozen):
    """What a folder of runs keeps beside them, so that they can be resumed and read."""

    schema_: Literal["crosslayer/grid/1"] = Field(
        "crosslayer/grid/1", validation_alias="schema", serialization_alias="schema"
    )
    budget: Budget | None = None
    steps: dict[str, int] = Field({}, description="of every variant in every setting, where the budget decides them")
    stopped: dict[str, Stopped] = Field({}, description="runs that diverged, by their names")
    judged: tuple[tuple[int, ...], ...] = Field((), description="seeds of each page that could give verdicts")

    def before(self, seeds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the seeds of each page that came before the page of these seeds, and to which they add."""
        before = self.judged[: self.judged.index(seeds)] if seeds in self.judged else self.judged
        return tuple(fewer for fewer in before if set(fewer) < set(seeds))


def read_state(folder: Path) -> State | None:
    """Return what a folder keeps beside its runs; None where it keeps nothing."""
    path = folder / STATE
    if not path.is_file():
        return None
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{STATE} has more than {LARGEST:,} bytes, which no comparison writes")
    try:
        return State.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{STATE}: {validation_message(error)}") from None


def read_budget(text: str) -> Budget:
    """Read "time=60" (seconds), "flops=1e14" or "tokens=1e6"."""
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
    """Return the budget with what was measured, and the steps of every variant.

    Variants run in turns, in an order that alternates, so that all meet the same moments of the machine; a time is the
    median over rounds of the median over steps.
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
    """Return the median time of a short run's steps, the first left out."""
    tokens = run.tokens / run.steps
    return statistics.median(tokens / speed for speed in run.curve.tokens_per_second[WARM:])


def whole_steps(amount: float, cost: float, name: str) -> int:
    """Return how many steps of a cost fit into an amount."""
    if amount < cost:
        raise ValueError(f"`budget` is too small for a step of {name}, which takes {cost:.3g} of {amount:.3g}")
    return math.floor(amount / cost)
