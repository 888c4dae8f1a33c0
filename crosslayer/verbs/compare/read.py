"""Reads finished training runs, which may come from anyone, and sorts them into settings and variants.

A setting is a recipe but for name, seed and method. Of a run only `record.json` is read, and `grid.json` of the
comparison that trained it: a budget of time or FLOPs gives each variant a schedule of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from crosslayer.output.record import read_record
from crosslayer.output.result import load_as
from crosslayer.verbs.compare.budget import State, read_state
from crosslayer.verbs.compare.grid import label_of
from crosslayer.verbs.compare.record import (
    MISSING,
    Budget,
    ComparedRun,
    Setting,
    SnapshotMeans,
    Trace,
    Variant,
    mean_of_known,
)
from crosslayer.verbs.train.record import Snapshot
from crosslayer.verbs.train.result import TrainingRun

RECORD, RUNS = "record.json", "runs"
OWN = ("name.", "seed.", "model.method.")  # keys of a recipe in which runs of a setting differ
STEPS = ("schedule.steps", "schedule.tokens")  # what a budget of time or FLOPs decides variant by variant


@dataclass(frozen=True)
class Placed:
    """A run, the name of its folder, and its setting."""

    run: TrainingRun
    name: str
    setting: Setting


@dataclass(frozen=True)
class Sorted:
    """Runs with the settings and variants that they belong to."""

    settings: tuple[Setting, ...]
    variants: tuple[Variant, ...]
    domains: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    budget: Budget | None = None
    extends: tuple[tuple[int, ...], ...] = ()  # seeds of each page that was seen before

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds, in their order."""
        return tuple(sorted({run.seed for run in self.runs}))


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return the folders of runs: those named, and the finished ones in folders of runs, sorted by name."""
    folders: list[Path] = []
    for path in map(Path, paths):
        within = path / RUNS if (path / RUNS).is_dir() else path
        inner = sorted(file.parent for file in within.glob(f"*/{RECORD}")) if within.is_dir() else []
        if within == path and (path / RECORD).is_file():
            inner = [path]
        if not inner:
            raise ValueError(f"{path.name!r} holds no finished run; name a folder that `crosslayer train` wrote")
        folders += inner
    return folders


def load_run(folder: Path) -> TrainingRun:
    """Return the run of a folder."""
    try:
        schema = str(read_record(folder).get("schema"))
        if not schema.startswith("crosslayer/train/"):
            raise ValueError(f"record.json is {schema[:60]!r}, no training run's")
        run = load_as([TrainingRun], folder)
        for word in (run.name, run.model.dtype, *(domain.name for domain in run.domains)):
            if not word.isprintable():
                raise ValueError(f"{word!r} cannot be printed")
        label_of(run.model.methods)
        data = run.recipe.get("data")
        length = data.get("length") if isinstance(data, dict) else None
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError("its recipe has no data.length")
        for steps in (
            run.curve.steps,
            [entry.step for entry in run.validation],
            [snapshot.step for snapshot in run.snapshots],
        ):
            if any(later <= step for step, later in pairwise((0, *steps))):
                raise ValueError("its steps do not rise from 1 on")
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from None
    return run


def sort_runs(folders: Sequence[Path]) -> Sorted:
    """Read the runs of folders and tell settings and variants by their recipes."""
    states = [_state(folder) for folder in folders]
    budgets = [None if state is None else state.budget for state in states]
    runs = [load_run(folder) for folder in folders]
    recipes = [_recipe(run, budget) for run, budget in zip(runs, budgets, strict=True)]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    differing = [key for key in keys if _count(recipes, [key]) > 1]
    telling: list[str] = []  # keys that tell settings apart, if those that a recipe has further above do not
    for key in differing:
        if _count(recipes, [*telling, key]) > _count(recipes, telling):
            telling.append(key)
    placed = []
    for folder, run, recipe in zip(folders, runs, recipes, strict=True):
        values = {key: recipe.get(key, MISSING) for key in differing}
        placed.append(Placed(run, folder.name, Setting.of(values, telling)))
    result = assemble(placed)
    before = [state.before(result.seeds) for state in states if state is not None]
    return replace(result, budget=_agreed(budgets), extends=max(before, key=len, default=()))


def _state(folder: Path) -> State | None:
    """Return what the comparison that trained a run keeps beside it, None where the run was trained alone."""
    runs = folder.resolve().parent
    return read_state(runs.parent) if runs.name == RUNS else None


def _recipe(run: TrainingRun, budget: Budget | None) -> dict[str, Any]:
    """Return what runs of a setting share of a recipe; of a budget that decided the steps, itself instead of these."""
    recipe = {key: value for key, value in _flat(run.recipe).items() if not f"{key}.".startswith(OWN)}
    if budget is None or budget.kind == "tokens":
        return recipe
    return {**{key: value for key, value in recipe.items() if key not in STEPS}, "budget": budget.text}


def _count(recipes: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    return len({json.dumps([recipe.get(key, MISSING) for key in keys]) for recipe in recipes})


def _agreed(budgets: Sequence[Budget | None]) -> Budget | None:
    """Return the budget that all runs had; times of a step are those of a single comparison."""
    first = budgets[0]
    if first is None or any(other is None or other.asked != first.asked for other in budgets):
        return None
    return first if all(other == first for other in budgets) else first.asked


def assemble(placed: Sequence[Placed]) -> Sorted:
    """Return runs as they are compared."""
    variants: dict[str, Variant] = {}
    first: dict[str, Placed] = {}
    taken: dict[tuple[str, str, int], Placed] = {}
    for part in placed:
        label, methods = label_of(part.run.model.methods), part.run.model.methods
        variants.setdefault(label, Variant(label=label, methods=methods))
        same = taken.setdefault((part.setting.label, label, part.run.seed), part)
        if same is not part:
            raise ValueError(f"{same.name} and {part.name} are both {label} with seed {part.run.seed}; leave one out")
        _check_pair(first.setdefault(part.setting.label, part), part)
    settings = tuple(part.setting for part in first.values())
    domains = tuple(domain.name for domain in placed[0].run.domains)
    return Sorted(settings, tuple(variants.values()), domains, tuple(map(_compared, placed)))


def _check_pair(first: Placed, other: Placed) -> None:
    """Refuse two runs of a setting with different text, to read or to be judged by, or other amounts of it in a step.

    A budget alone may change the steps.
    """
    both = f"{first.name} and {other.name} have the same recipe but read"
    texts = [
        {domain.name: (domain.fingerprint, domain.validation_tokens) for domain in part.run.domains}
        for part in (first, other)
    ]
    for name in {**texts[0], **texts[1]}:
        if texts[0].get(name) != texts[1].get(name):
            raise ValueError(f"{both} different text in the domain {name!r}; runs are compared on the same text only")
    if first.run.tokens * other.run.steps != other.run.tokens * first.run.steps:
        sides = [part.run.tokens / part.run.steps for part in (first, other)]
        raise ValueError(
            f"{both} {sides[0]:,.0f} and {sides[1]:,.0f} tokens a step, as with another number of processes; train one "
            "of them anew"
        )


def _compared(part: Placed) -> ComparedRun:
    run = part.run
    shares = np.array([domain.share for domain in run.domains])  # (D,)
    speeds = [speed for speed in run.curve.tokens_per_second if speed > 0]
    return ComparedRun(
        setting=part.setting.label,
        variant=label_of(run.model.methods),
        seed=run.seed,
        name=run.name,
        parameters=run.model.parameters,
        flops_per_token=run.model.flops_per_token,
        steps=run.steps,
        tokens=run.tokens,
        length=run.recipe["data"]["length"],
        seconds=run.seconds,
        step_seconds=run.tokens / run.steps / float(np.median(speeds)) if speeds else None,
        peak_bytes=run.peak_bytes,
        kv_bytes_per_token=run.model.kv_bytes_per_token,
        kv_read_bytes_per_token=run.model.kv_read_bytes_per_token,
        dtype=run.model.dtype,
        machine=run.environment.machine,
        final_loss=run.final_loss,
        losses=run.validation[-1].losses,
        curve=Trace(steps=tuple(run.curve.steps), losses=tuple(run.curve.losses)),
        validation=Trace(
            steps=tuple(entry.step for entry in run.validation),
            losses=tuple((run.validation_losses @ shares).tolist()),
        ),
        snapshots=tuple(map(_snapshot_means, run.snapshots)),
    )


def _snapshot_means(snapshot: Snapshot) -> SnapshotMeans:
    norms = [norm for norm in snapshot.stream_norm if norm is not None]
    growth = norms[-1] / norms[0] if norms and norms[0] > 0 else None
    shares, rates = mean_of_known(snapshot.first_token_share), mean_of_known(snapshot.sink_rate)
    return SnapshotMeans(step=snapshot.step, first_token_share=shares, sink_rate=rates, stream_growth=growth)


def _flat(values: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Return the values of mappings in mappings by dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{place}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat
