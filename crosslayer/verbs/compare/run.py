"""A comparison from runs that are there, or from a recipe whose runs are trained one after another.

With a recipe the folder holds `grid.json` (the budget, what was measured for it, runs that diverged), `runs/` with a
folder for each run, and at the end `record.json` with its page.
"""

import gc
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosslayer.output.folder import check_target, held, write_whole
from crosslayer.output.progress import Meter, Silent
from crosslayer.verbs.compare.budget import SHORT, STATE, State, Stopped, measured, read_budget, read_state
from crosslayer.verbs.compare.grid import Cell, Grid, label_of, pick_baseline, read_grid
from crosslayer.verbs.compare.laws import laws, trends
from crosslayer.verbs.compare.outcomes import outcomes
from crosslayer.verbs.compare.read import RECORD, RUNS, Placed, Sorted, assemble, load_run, run_folders, sort_runs
from crosslayer.verbs.compare.record import Budget
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.train.recipe import Recipe, load_recipe
from crosslayer.verbs.train.result import TrainingRun
from crosslayer.verbs.train.run import train
from crosslayer.verbs.train.trainer import TrainingStopped

SEEDS = 3


def compare(
    runs: Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    methods: str | Sequence[Any] | None = None,
    seeds: int | None = None,
    vary: Sequence[str] | None = None,
    settings: Sequence[str] = (),
    budget: str | None = None,
    baseline: str | None = None,
    smooth: int | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Meter = Silent,
) -> Comparison:
    """Compare training runs seed by seed, or train them by a recipe first.

    Args:
        runs: folders of training runs, or folders that hold such.
        out: folder of report.html and record.json; with a recipe, of the runs too. Without it nothing of finished runs
            is written.
        recipe: instead of runs: train them by this recipe.
        methods: what is compared: 'vanilla, NAME, {name: NAME, option: 2}, [NAME, NAME]'. In Python also a list of
            methods as a recipe has them; "vanilla" or None is none, an inner list several together.
        seeds: runs of each, from the recipe's seed on; default 3, and intervals need them.
        vary: settings to compare in, repeatable: model.size=tiny,mini; every combination is one.
        settings: on top of the recipe, repeatable: train.learning_rate=3e-4. In Python only beside a recipe that is a
            file.
        budget: the same for every run: time=60 (seconds of training steps), flops=1e14 or tokens=1e6.
        baseline: with what is compared; default vanilla, or the first.
        smooth: steps over which curves are smoothed; default a twentieth of a run.
        resume: keep the finished runs in the folder, and go on with the others.
        force: replace an existing folder of a comparison; never of trained runs.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: a run, a recipe or an option is wrong, or runs cannot be paired.
        TrainingStopped: a checkpoint cannot be written; a run whose loss is not finite is left out instead.

    """
    if smooth is not None and smooth < 1:
        raise ValueError(f"`smooth` is {smooth}; it must be at least 1 step")
    if recipe is None:
        options = {"methods": methods, "seeds": seeds, "vary": vary or None, "budget": budget}
        _check_reading(runs, {**options, "settings": settings or None, "resume": resume or None})
        if out is not None:
            check_target(Path(out), force)
        found = sort_runs(run_folders(runs or ()))
        names = {run.name for run in found.runs}
        name = names.pop() if len(names) == 1 else f"{len(found.runs)} runs"
        comparison = _comparison(found, name, baseline, smooth)
        if out is not None:
            comparison.save(out, force)
        return comparison
    _check_training(runs, methods, out, force)
    grid = read_grid(recipe, methods or (), SEEDS if seeds is None else seeds, vary or (), settings)
    baseline = pick_baseline([label_of(variant) for variant in grid.variants], baseline)
    asked = None if budget is None else read_budget(budget)
    grid = grid.within(asked)
    grid.cells()  # says what is wrong with a recipe before there is a folder
    folder, name = Path(out or "").expanduser().resolve(), load_recipe(recipe, settings).name
    with held(folder):
        job = _Job(grid, folder, progress, _opened(folder, asked, resume))
        result = _comparison(job.train(baseline), name, baseline, smooth, job.state)
        job.remember(result)  # before there is a page to be seen
        result.save_within(folder)
    return result


def _check_reading(runs: Sequence[str | Path] | None, options: dict[str, Any]) -> None:
    if not runs:
        raise ValueError("there is nothing to compare; give folders of training runs, or a recipe")
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}` is for a recipe whose runs are trained; leave it out, or give a recipe")


def _check_training(runs: Any, methods: Any, out: Any, force: bool) -> None:
    if force:
        raise ValueError("`force` would remove trained runs; use `resume`, or name another folder")
    if runs:
        raise ValueError("there are runs and a recipe; give one of the two")
    if methods is None or out is None:
        raise ValueError(f"a recipe needs {'`methods`' if methods is None else '`out`'}, what is compared and where")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "several processes: train each run by `crosslayer train` under torchrun, then compare the runs"
        )


def _opened(folder: Path, budget: Budget | None, resume: bool) -> State:
    """Return what a folder keeps, or a new state for a new folder."""
    name = folder.name
    if folder.is_file():
        raise ValueError(f"the folder {name!r} is a file; name another")
    if not folder.exists() or not any(folder.iterdir()):
        return State(budget=budget)  # pyright: ignore[reportCallIssue]
    if not resume:
        raise ValueError(f"the folder {name!r} exists; give another name, or `resume` to go on with its runs")
    state = read_state(folder)
    if state is None:
        raise ValueError(f"the folder {name!r} is of no comparison that can be resumed; name another")
    kept, asked = (None if part is None else part.asked for part in (state.budget, budget))
    if kept != asked:
        words = ["no budget" if part is None else part.text for part in (kept, asked)]
        raise ValueError(f"the folder {name!r} has runs with {words[0]}, not with {words[1]}; name another")
    return state


@dataclass
class _Job:
    """Runs to be trained in a folder, and what it keeps beside them."""

    grid: Grid
    folder: Path
    progress: Meter
    state: State

    def train(self, baseline: str) -> Sorted:
        """Train what is not there yet; runs that diverge are noted, and are not trained twice."""
        self._schedule()
        cells = self.grid.cells(self.state.steps or None)
        names = {cell.recipe.name for cell in cells}
        self._keep(stopped={name: what for name, what in self.state.stopped.items() if name in names})
        placed: list[Placed] = []
        for number, cell in enumerate(cells, 1):
            digest = hashlib.sha256(cell.recipe.model_dump_json().encode()).hexdigest()
            name = cell.recipe.name
            before = self.state.stopped.get(name)
            if before is not None and before.recipe == digest:
                continue
            if before is not None:  # by another recipe
                if not (self.folder / RUNS / name / RECORD).is_file():
                    shutil.rmtree(self.folder / RUNS / name, ignore_errors=True)
                self._keep(stopped={other: what for other, what in self.state.stopped.items() if other != name})
            try:
                run = self._train(cell.recipe, f"run {number} of {len(cells)}, {name}")
                placed.append(Placed(run, name, cell.setting))
            except TrainingStopped as stop:
                if stop.__cause__ is not None:  # a checkpoint that could not be written: a full disk
                    raise
                what = Stopped(what=str(stop), recipe=digest)
                self._keep(stopped={**self.state.stopped, name: what})
        ended = {label_of(part.run.model.methods) for part in placed}
        if baseline not in ended or len(ended) < 2:
            each = "; ".join(f"{name}: {part.what}" for name, part in self.state.stopped.items())
            raise ValueError(f"there is nothing to compare with {baseline}, since these runs stopped: {each}")
        runs = assemble(placed)
        return replace(runs, budget=self.state.budget, extends=self.state.before(runs.seeds))

    def remember(self, result: Comparison) -> None:
        """Note the seeds of a page that could give verdicts, for the pages after it."""
        seeds = tuple(sorted({run.seed for run in result.runs}))
        known = any(set(seeds) <= set(judged) for judged in self.state.judged)
        if not known and any(outcome.adjusted is not None for outcome in result.outcomes):
            self._keep(judged=(*self.state.judged, seeds))

    def _schedule(self) -> None:
        """Measure what the steps of each variant take, where a budget asks for it and it is not known yet."""
        budget = self.state.budget
        if budget is None or budget.kind == "tokens":
            return
        first: dict[str, Cell] = {}
        for cell in self.grid.cells():
            first.setdefault(cell.key, cell)
        if self.state.steps.keys() == first.keys():
            return
        if self.state.steps:
            raise ValueError(f"the folder {self.folder.name!r} has a budget for other variants; name another")

        def short(key: str, place: Path) -> TrainingRun:
            with self.progress(f"measuring a step of {key}", 0):
                return train(self.grid.recipe(first[key].setting, first[key].methods, SHORT), place)

        budget, steps = measured(budget, [*first], short, self.folder / ".measured")
        self._keep(budget=budget, steps=steps)

    def _train(self, recipe: Recipe, shown: str) -> TrainingRun:
        """Return a finished run of the very recipe, or train it to its end."""
        place = self.folder / RUNS / recipe.name
        if not (place / RECORD).is_file():
            try:
                train(recipe, place, resume=True, progress=lambda *task: self.progress(f"{shown}: {task[0]}", task[1]))
            finally:
                gc.collect()  # a trainer refers to itself, and would hold its model's memory
        run = load_run(place)
        if run.recipe != recipe.model_dump(mode="json"):
            raise ValueError(f"{RUNS}/{recipe.name} is of another recipe; name another folder, or remove that run")
        return run

    def _keep(self, **changes: Any) -> None:
        self.state = self.state.model_copy(update=changes)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / STATE, self.state.model_dump_json(by_alias=True, indent=1))


def _comparison(
    runs: Sorted, name: str, baseline: str | None, smooth: int | None, state: State | None = None
) -> Comparison:
    baseline = pick_baseline([variant.label for variant in runs.variants], baseline)
    results = outcomes(runs, baseline, smooth)
    lines, no_laws = laws(runs, baseline)
    return Comparison(  # pyright: ignore[reportCallIssue]
        name=name,
        baseline=baseline,
        smooth=smooth,
        **vars(runs),
        stopped={} if state is None else {run: part.what for run, part in state.stopped.items()},
        outcomes=results,
        laws=lines,
        no_laws=no_laws,
        trends=trends(runs, results),
    )
