"""Compares finished runs, or first trains the runs of a recipe one after another.

With a recipe the folder holds `grid.json` (the runs that diverged), `runs/` with a
folder for each run, and at the end `record.json` with its page.
"""

import gc
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from crosslayer import _start
from crosslayer.output.folder import check_target, locked_folder, write_whole
from crosslayer.output.progress import prefixed
from crosslayer.output.record import validation_message
from crosslayer.stats.times import FEWEST
from crosslayer.training.recipe import Recipe, load_recipe
from crosslayer.training.trainer import TrainingStopped
from crosslayer.verbs.compare.clock import MODEL, step_times
from crosslayer.verbs.compare.grid import (
    STATE,
    Grid,
    State,
    Stopped,
    pick_baseline,
    read_grid,
)
from crosslayer.verbs.compare.outcomes import laws, outcomes
from crosslayer.verbs.compare.read import (
    RECORD,
    RUNS,
    NamedRun,
    group_runs,
    load_run,
    read_runs,
    variant_of_run,
)
from crosslayer.verbs.compare.result import Comparison
from crosslayer.verbs.train.result import TrainingRun
from crosslayer.verbs.train.run import train

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
    baseline: str | None = None,
    smooth: int | None = None,
    step_rounds: int = 0,
    resume: bool = False,
    force: bool = False,
) -> Comparison:
    """Compare training runs, or train them first, paired by seed.

    Args:
        runs: folders of training runs, or folders that contain them.
        out: folder for report.html, record.json, and the runs of a recipe. Required with a recipe.
        recipe: train the runs from this recipe instead of reading finished ones.
        methods: variants to compare, such as 'vanilla, NAME, {name: NAME, option: 2}, [NAME, NAME]'. In Python also a
            list of these; "vanilla" or None means no method, an inner list combines several. An entry or a part of one
            may be {num_key_value_heads: 1}: grouped-query attention, with 1 multi-query attention; or
            {learning_rate: 1e-3}: the variant's own rate.
        seeds: number of seeds per variant, starting at the recipe's seed; default: 3, the fewest that give intervals.
        vary: a recipe key and its values, repeatable: model.size=tiny,mini. Variants are compared in every
            combination.
        settings: override a key of the recipe, repeatable: train.learning_rate=3e-4.
        baseline: variant to compare with; default: vanilla, or the first variant.
        smooth: steps over which curves are smoothed; default: 1/20 of a run.
        step_rounds: steps for which training of each variant and the baseline is timed, in turn, at least 5; 0: none.
        resume: keep the finished runs in the folder and train the missing ones.
        force: replace the folder of an earlier comparison, but never a folder with trained runs.

    Raises:
        ValueError: a run, a recipe or an option is wrong, or runs cannot be compared.
        TrainingStopped: a checkpoint cannot be written. A run whose loss is not finite is excluded instead.
    """
    if smooth is not None and smooth < 1:
        raise ValueError(f"`smooth` must be at least 1 step, got {smooth}")
    if step_rounds != 0 and step_rounds < FEWEST:
        raise ValueError(f"`step_rounds` must be 0 or at least {FEWEST}, got {step_rounds}")
    if recipe is None:
        if not runs:
            raise ValueError("nothing to compare: pass folders of training runs, or `recipe`")
        options = {"methods": methods, "seeds": seeds, "vary": vary or None, "settings": settings or None}
        for key, value in {**options, "resume": resume or None}.items():
            if value is not None:
                raise ValueError(f"`{key}` needs `recipe`: it applies to runs that are trained, not to finished ones")
        if out is not None:
            check_target(Path(out), force)
        finished = read_runs(runs)
        names = {entry.run.name for entry in finished}
        name = names.pop() if len(names) == 1 else f"{len(finished)} runs"
        comparison = _comparison(finished, name, baseline, smooth, step_rounds)
        if out is not None:
            comparison.save(out, force)
        return comparison

    # a recipe, whose runs are trained
    if force:
        raise ValueError("`force` would delete trained runs; use `resume`, or another folder")
    if runs:
        raise ValueError("`recipe` trains new runs; pass either a recipe or finished runs, not both")
    if methods is None or out is None:
        raise ValueError(f"`recipe` needs {'`methods`' if methods is None else '`out`'} too")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "compare trains in a single process; train each run with `crosslayer train` under torchrun, then compare"
        )
    grid = read_grid(recipe, methods, SEEDS if seeds is None else seeds, vary or (), settings)
    baseline = pick_baseline([variant.label for variant in grid.variants], baseline)
    grid.planned_runs()  # checks all recipes before the folder is created
    folder = Path(out).expanduser().resolve()
    name = load_recipe(recipe, settings).name
    with locked_folder(folder):
        job = _Job(grid, folder, _opened(folder, resume))
        result = _comparison(job.train(baseline), name, baseline, smooth, step_rounds, job.state)
        result.save_within(folder)
    return result


def _opened(folder: Path, resume: bool) -> State:
    """Return the state in `grid.json` of a folder, or a new one for a new folder."""
    name = folder.name
    if folder.is_file():
        raise ValueError(f"the folder {name!r} is a file; use another name")
    if not folder.exists() or not any(folder.iterdir()):
        return State()
    if not resume:
        raise ValueError(f"the folder {name!r} exists; use another name, or `resume` to continue its runs")
    if not (folder / STATE).is_file():
        raise ValueError(f"the folder {name!r} holds no comparison to resume; use another name")
    try:
        return State.model_validate_json((folder / STATE).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{STATE}: {validation_message(error)}") from None


@dataclass
class _Job:
    """The runs to train in a folder, and the state of its `grid.json`."""

    grid: Grid
    folder: Path
    state: State

    def train(self, baseline: str) -> list[NamedRun]:
        """Train the missing runs; runs that diverge are recorded and not trained again."""
        planned = self.grid.planned_runs()
        names = {entry.recipe.name for entry in planned}
        self._keep(stopped={name: what for name, what in self.state.stopped.items() if name in names})
        named: list[NamedRun] = []
        for index, entry in enumerate(planned, 1):
            digest = hashlib.sha256(entry.recipe.model_dump_json().encode()).hexdigest()
            name = entry.recipe.name
            before = self.state.stopped.get(name)
            if before is not None and before.recipe == digest:
                continue
            # It diverged with another recipe. Its checkpoints are of that recipe, so the run begins again.
            if before is not None:
                if not (self.folder / RUNS / name / RECORD).is_file():
                    shutil.rmtree(self.folder / RUNS / name, ignore_errors=True)
                self._keep(stopped={key: stop for key, stop in self.state.stopped.items() if key != name})
            try:
                run = self._train(entry.recipe, f"run {index} of {len(planned)}, {name}")
                named.append(NamedRun(run, self.folder / RUNS / name, entry.configuration))
            except TrainingStopped as stop:
                # A cause means that a checkpoint could not be written (a full disk), which is no fault of the variant.
                if stop.__cause__ is not None:
                    raise
                what = Stopped(what=str(stop), recipe=digest)
                self._keep(stopped={**self.state.stopped, name: what})
        finished = {variant_of_run(entry.run).label for entry in named}
        if baseline not in finished or len(finished) < 2:
            each = "; ".join(f"{name}: {stop.what}" for name, stop in self.state.stopped.items())
            raise ValueError(f"nothing to compare with {baseline}, because these runs stopped: {each}")
        return named

    def _train(self, recipe: Recipe, shown: str) -> TrainingRun:
        """Return the run of a recipe, trained to its end if it is not finished."""
        folder, typed = self.folder / RUNS / recipe.name, _start.typed
        if not (folder / RECORD).is_file():
            try:
                # the next command of its page names the run's own folder
                if typed and "out" in typed:
                    _start.typed = {"out": f"{typed['out']}/{RUNS}/{recipe.name}"}
                with prefixed(shown):
                    train(recipe, folder, resume=True)
            finally:
                _start.typed = typed
                gc.collect()  # a trainer refers to itself and would keep its model in memory
        run = load_run(folder)
        if run.recipe != recipe.model_dump(mode="json"):
            raise ValueError(f"the recipe of {RUNS}/{recipe.name} differs; use another folder, or remove that run")
        return run

    def _keep(self, **changes: Any) -> None:
        self.state = self.state.model_copy(update=changes)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / STATE, self.state.model_dump_json(by_alias=True, indent=1))


def _comparison(
    named: Sequence[NamedRun],
    name: str,
    baseline: str | None,
    smooth: int | None,
    step_rounds: int,
    state: State | None = None,
) -> Comparison:
    runs = group_runs(named)
    baseline = pick_baseline([variant.label for variant in runs.variants], baseline)
    # Timing needs a run with its model: such runs come last, so they replace runs of which only the record is left.
    models_last = sorted(named, key=lambda entry: (entry.folder / MODEL).is_file())
    one_of_each = {(entry.configuration.label, variant_of_run(entry.run).label): entry for entry in models_last}
    times = step_times(one_of_each, baseline, step_rounds) if step_rounds else {}
    lines, no_laws = laws(runs, baseline)
    return Comparison(
        name=name,
        baseline=baseline,
        smooth=smooth,
        **vars(runs),
        stopped={} if state is None else {run: stop.what for run, stop in state.stopped.items()},
        outcomes=outcomes(runs, baseline, smooth, times),
        laws=lines,
        no_laws=no_laws,
    )
