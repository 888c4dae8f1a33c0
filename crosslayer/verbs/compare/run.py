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
from crosslayer.verbs.compare.arms import label_of, pick_baseline
from crosslayer.verbs.compare.budget import SHORT, measured, read_budget
from crosslayer.verbs.compare.grid import SCHEDULE, Cell, Grid, read_grid
from crosslayer.verbs.compare.laws import laws, trends
from crosslayer.verbs.compare.outcomes import outcomes
from crosslayer.verbs.compare.read import RECORD, RUNS, Placed, Sorted, assemble, load_run, run_folders, sort_runs
from crosslayer.verbs.compare.record import Budget
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.compare.state import STATE, State, Stopped, read_state
from crosslayer.verbs.train.recipe import load_recipe
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
    """Compare training runs seed by seed, or train them by a recipe first; exit status 1: a disk was full.

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
    options = {"methods": methods, "seeds": seeds, "vary": vary or None, "budget": budget, "settings": settings or None}
    if recipe is None:
        _check_reading(runs, {**options, "resume": resume or None})
        if out is not None:
            check_target(Path(out), force)
        sorted_runs = sort_runs(run_folders(runs or ()))
        names = {run.name for run in sorted_runs.runs}
        name = names.pop() if len(names) == 1 else f"{len(sorted_runs.runs)} runs"
        comparison = _comparison(sorted_runs, _Words(name, baseline, smooth))
        if out is not None:
            comparison.save(out, force)
        return comparison
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
    grid = read_grid(recipe, methods, SEEDS if seeds is None else seeds, vary or (), settings)
    job = _Job(grid, Path(out).expanduser().resolve(), None if budget is None else read_budget(budget), progress)
    words = _Words(load_recipe(recipe, settings).name, baseline, smooth)
    return job.run(words, resume)


def _check_reading(runs: Sequence[str | Path] | None, options: dict[str, Any]) -> None:
    if not runs:
        raise ValueError("there is nothing to compare; give folders of training runs, or a recipe")
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}` is for a recipe whose runs are trained; leave it out, or give a recipe")


@dataclass(frozen=True)
class _Words:
    """How a comparison is called, and how it is asked for."""

    name: str
    baseline: str | None
    smooth: int | None


@dataclass
class _Job:
    """Runs to be trained in a folder."""

    grid: Grid
    folder: Path
    budget: Budget | None
    progress: Meter

    def run(self, words: _Words, resume: bool) -> Comparison:
        labels = [label_of(arm) for arm in self.grid.arms]
        words = replace(words, baseline=pick_baseline(labels, words.baseline))
        self._check_vary()
        cells = self.grid.cells()
        with held(self.folder):
            state = self._scheduled(self._state(resume), cells)
            self._keep(state)
            cells = self.grid.cells(state.steps or None)
            placed, state = self._train_all(cells, state)
            _check_ended(placed, words.baseline, state)
            settings = {cell.setting.label: cell.setting for cell in cells}
            result = _comparison(assemble(list(settings.values()), placed), words, state)
            self._keep(_judged(state, result))  # before there is a page to be seen
            result.save_within(self.folder)
        return result

    def _check_vary(self) -> None:
        """Refuse to vary what the budget decides; tokens are set for all runs."""
        schedules = [key for key, _ in self.grid.varied if key in (f"{SCHEDULE}steps", f"{SCHEDULE}tokens")]
        if self.budget is not None and schedules:
            raise ValueError(f"`budget` decides {schedules[0]}; leave one of the two out")
        if self.budget is not None and self.budget.kind == "tokens":
            tokens = f"{SCHEDULE}tokens={round(self.budget.amount)}"
            self.grid = replace(self.grid, settings=(*self.grid.settings, f"{SCHEDULE}steps=null", tokens))

    def _state(self, resume: bool) -> State:
        """Return what the folder keeps, or a new state for a new folder.

        Raises:
            ValueError: the folder is of something else.

        """
        name = self.folder.name
        if self.folder.is_file():
            raise ValueError(f"the folder {name!r} is a file; name another")
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return State(budget=self.budget)  # pyright: ignore[reportCallIssue]
        if not resume:
            raise ValueError(f"the folder {name!r} exists; give another name, or `resume` to go on with its runs")
        state = read_state(self.folder)
        if state is None:
            raise ValueError(f"the folder {name!r} is of no comparison that can be resumed; name another")
        kept, asked = _asked(state.budget), _asked(self.budget)
        if kept != asked:
            raise ValueError(f"the folder {name!r} has runs with {kept}, not with {asked}; name another")
        return state

    def _scheduled(self, state: State, cells: Sequence[Cell]) -> State:
        """Measure what the steps of each arm take, where a budget asks for it and it is not known yet."""
        first = {cell.key: cell for cell in cells if cell.seed == cells[0].seed}
        if state.budget is None or state.budget.kind == "tokens" or state.steps.keys() == first.keys():
            return state
        if state.steps:
            raise ValueError(f"the folder {self.folder.name!r} has a budget for other arms; name another")
        arms = [label_of(arm) for arm in self.grid.arms]

        def short(key: str, place: Path) -> TrainingRun:
            cell = first[key]
            with self.progress(f"measuring a step of {key}", 0):
                return train(self.grid.recipe(cell.setting, arms.index(cell.arm), SHORT), place)

        budget, steps = measured(state.budget, [*first], short, self.folder / ".measured")
        return state.model_copy(update={"budget": budget, "steps": steps})

    def _train_all(self, cells: Sequence[Cell], state: State) -> tuple[list[Placed], State]:
        """Train what is not there yet; runs that diverge are noted in the state, and are not trained twice."""
        placed: list[Placed] = []
        for number, cell in enumerate(cells, 1):
            before = state.stopped.get(cell.name)
            if before is not None and before.recipe == _digest(cell):
                continue
            if before is not None:
                state = self._forget(cell, state)
            try:
                run = self._train(cell, f"run {number} of {len(cells)}, {cell.name}")
                placed.append(Placed(run, str(self.folder / RUNS / cell.name), cell.setting.label))
            except TrainingStopped as stop:
                if stop.__cause__ is not None:  # a checkpoint that could not be written: a full disk
                    raise
                what = Stopped(what=str(stop), recipe=_digest(cell))
                state = state.model_copy(update={"stopped": {**state.stopped, cell.name: what}})
                self._keep(state)
            gc.collect()  # a trainer refers to itself, and would hold its model's memory
        names = {cell.name for cell in cells}
        stopped = {name: what for name, what in state.stopped.items() if name in names}
        return placed, state.model_copy(update={"stopped": stopped})

    def _forget(self, cell: Cell, state: State) -> State:
        place = self.folder / RUNS / cell.name
        if not (place / RECORD).is_file():
            shutil.rmtree(place, ignore_errors=True)
        stopped = {name: what for name, what in state.stopped.items() if name != cell.name}
        state = state.model_copy(update={"stopped": stopped})
        self._keep(state)
        return state

    def _train(self, cell: Cell, name: str) -> TrainingRun:
        """Return a finished run of the very recipe, or train it to its end."""
        place = self.folder / RUNS / cell.name
        if not (place / RECORD).is_file():
            train(cell.recipe, place, resume=True, progress=lambda what, total: self.progress(f"{name}: {what}", total))
        run = load_run(place)
        if run.recipe != cell.recipe.model_dump(mode="json"):
            raise ValueError(f"{RUNS}/{cell.name} is of another recipe; name another folder, or remove that run")
        return run

    def _keep(self, state: State) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / STATE, state.model_dump_json(by_alias=True, indent=1))


def _judged(state: State, result: Comparison) -> State:
    """Note the seeds of a page that could give verdicts, for the pages after it."""
    seeds = tuple(sorted({run.seed for run in result.runs}))
    known = any(set(seeds) <= set(judged) for judged in state.judged)
    if known or all(outcome.adjusted is None for outcome in result.outcomes):
        return state
    return state.model_copy(update={"judged": (*state.judged, seeds)})


def _digest(cell: Cell) -> str:
    return hashlib.sha256(cell.recipe.model_dump_json().encode()).hexdigest()


def _check_ended(placed: Sequence[Placed], baseline: str | None, state: State) -> None:
    """Refuse to compare where the baseline, or all others, have diverged; say which runs, and why."""
    ended = {label_of(part.run.model.methods) for part in placed}
    if baseline not in ended or len(ended) < 2:
        each = "; ".join(f"{name}: {part.what}" for name, part in state.stopped.items())
        raise ValueError(f"there is nothing to compare with {baseline}, since these runs stopped: {each}")


def _asked(budget: Budget | None) -> str:
    return "no budget" if budget is None else f"{budget.kind}={budget.amount:g}"


def _comparison(runs: Sorted, words: _Words, state: State | None = None) -> Comparison:
    if state is not None:
        runs = replace(runs, extends=state.before(runs.seeds))
    baseline = pick_baseline([arm.label for arm in runs.arms], words.baseline)
    results = outcomes(runs, baseline, words.smooth)
    lines, no_laws = laws(runs, baseline)
    return Comparison(  # pyright: ignore[reportCallIssue]
        name=words.name,
        baseline=baseline,
        smooth=words.smooth,
        budget=runs.budget if state is None else state.budget,
        settings=runs.settings,
        extends=runs.extends,
        arms=runs.arms,
        domains=runs.domains,
        runs=runs.runs,
        stopped={} if state is None else {name: part.what for name, part in state.stopped.items()},
        outcomes=results,
        laws=lines,
        no_laws=no_laws,
        trends=trends(runs, results),
    )
