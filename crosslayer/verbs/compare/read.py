"""Reads finished training runs, which may come from anyone, and sorts them into settings and arms.

A setting is a recipe but for name, seed and method. Of a run only `record.json` is read, and `grid.json` of the
comparison that trained it: a budget of time or FLOPs gives each arm a schedule of its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from crosslayer.output.record import read_record
from crosslayer.output.result import load_as
from crosslayer.verbs.compare.arms import label_of
from crosslayer.verbs.compare.record import Arm, Budget, ComparedRun, Glance, Setting, Trace
from crosslayer.verbs.compare.state import State, read_state
from crosslayer.verbs.train.record import Look
from crosslayer.verbs.train.result import TrainingRun

RECORD, RUNS = "record.json", "runs"
OWN = (("name",), ("seed",), ("model", "method"))  # keys of a recipe in which runs of a setting differ
STEPS = ("schedule.steps", "schedule.tokens")  # what a budget of time or FLOPs decides arm by arm
MISSING = "not set"


@dataclass(frozen=True)
class Sorted:
    """Runs with the settings and arms that they belong to."""

    settings: tuple[Setting, ...]
    arms: tuple[Arm, ...]
    domains: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    budget: Budget | None = None
    extends: tuple[tuple[int, ...], ...] = ()  # seeds of each page that was seen before

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds, in their order."""
        return tuple(sorted({run.seed for run in self.runs}))


@dataclass(frozen=True)
class Placed:
    """A run, and where it belongs."""

    run: TrainingRun
    where: str
    setting: str


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return the folders of runs: those named, and the finished ones in folders of runs, in the order of their names.

    Raises:
        ValueError: a folder holds no run.

    """
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
    """Return the run of a folder.

    Raises:
        ValueError: it is no record of a training run, or a damaged one.

    """
    try:
        schema = str(read_record(folder).get("schema"))
        if not schema.startswith("crosslayer/training/"):
            raise ValueError(f"record.json is {schema[:60]!r}, no training run's")
        run = load_as([TrainingRun], folder)
        words = [run.name, run.model.dtype, *(domain.name for domain in run.domains)]
        strange = [word for word in words if not word.isprintable()]
        if strange:
            raise ValueError(f"{strange[0]!r} cannot be printed")
        label_of(run.model.methods)
        length = _at(run.recipe, ("data", "length"))
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError("its recipe has no data.length")
        for steps in (run.curve.steps, [entry.step for entry in run.validation], [look.step for look in run.looks]):
            if any(later <= step for step, later in pairwise((0, *steps))):
                raise ValueError("its steps do not rise from 1 on")
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from None
    return run


def sort_runs(folders: Sequence[Path]) -> Sorted:
    """Read the runs of folders and tell settings and arms by their recipes.

    Raises:
        ValueError: as `load_run`, `read_state` and `assemble`.

    """
    states = {str(folder): _state(folder) for folder in folders}
    budgets = {where: None if state is None else state.budget for where, state in states.items()}
    runs = {str(folder): load_run(folder) for folder in folders}
    common = {where: _decided(_flat(_shared(run)), budgets[where]) for where, run in runs.items()}
    keys = list(dict.fromkeys(key for flat in common.values() for key in flat))
    differing = [key for key in keys if len({json.dumps(flat.get(key, MISSING)) for flat in common.values()}) > 1]
    telling = _telling(differing, list(common.values()))
    settings: dict[str, Setting] = {}
    placed = []
    for where, run in runs.items():
        values = {key: common[where].get(key, MISSING) for key in differing}
        setting = setting_of(values, telling)
        settings[setting.label] = setting
        placed.append(Placed(run, where, setting.label))
    result = replace(assemble(list(settings.values()), placed), budget=_agreed(list(budgets.values())))
    before = [state.before(result.seeds) for state in states.values() if state is not None]
    return replace(result, extends=max(before, key=len, default=()))


def _state(folder: Path) -> State | None:
    """Return what the comparison that trained a run keeps beside it, None where the run was trained alone."""
    runs = folder.resolve().parent
    return read_state(runs.parent) if runs.name == RUNS else None


def _decided(recipe: dict[str, Any], budget: Budget | None) -> dict[str, Any]:
    """Return a recipe with a budget of time or FLOPs instead of the steps that it decided."""
    if budget is None or budget.kind == "tokens":
        return recipe
    kept = {key: value for key, value in recipe.items() if key not in STEPS}
    return {**kept, "budget": f"{budget.kind}={budget.amount:g}"}


def _agreed(budgets: Sequence[Budget | None]) -> Budget | None:
    """Return the budget that all runs had; times of a step are those of a single comparison."""
    first = budgets[0]
    if first is None or any(other is None or _amount(other) != _amount(first) for other in budgets):
        return None
    return first if all(other == first for other in budgets) else first.model_copy(update={"step_seconds": {}})


def _amount(budget: Budget) -> tuple[str, float]:
    return budget.kind, budget.amount


def setting_of(values: dict[str, Any], telling: Sequence[str] | None = None) -> Setting:
    """Return the setting in which keys of a recipe have such values; its label has those that tell it from others."""
    shown = values if telling is None else {key: values[key] for key in telling}
    label = ", ".join(f"{key}={_word(value)}" for key, value in shown.items())
    return Setting(label=label, values=values)


def _telling(keys: Sequence[str], recipes: Sequence[dict[str, Any]]) -> list[str]:
    """Return keys that tell settings apart: each only if those before it, which a recipe has further above, do not."""
    telling: list[str] = []
    groups = 1
    for key in keys:
        more = [*telling, key]
        count = len({json.dumps([recipe.get(name, MISSING) for name in more]) for recipe in recipes})
        if count > groups:
            telling, groups = more, count
    return telling


def _word(value: Any) -> str:
    return json.dumps(value).strip('"')


def assemble(settings: Sequence[Setting], placed: Sequence[Placed]) -> Sorted:
    """Return runs as they are compared.

    Raises:
        ValueError: two are the same, or runs of a setting have read different text or other amounts of it in a step.

    """
    arms: dict[str, Arm] = {}
    first: dict[str, Placed] = {}
    taken: dict[tuple[str, str, int], Placed] = {}
    for part in placed:
        methods = part.run.model.methods
        arm = arms.setdefault(label_of(methods), Arm(label=label_of(methods), methods=methods))
        key = (part.setting, arm.label, part.run.seed)
        if key in taken:
            raise ValueError(
                f"{Path(taken[key].where).name} and {Path(part.where).name} are both {arm.label} with seed "
                f"{part.run.seed}; leave one out"
            )
        taken[key] = part
        _check_text(first.setdefault(part.setting, part), part)
        _check_tokens(first[part.setting], part)
    names = tuple(domain.name for domain in placed[0].run.domains)
    runs = tuple(_compared(part) for part in placed)
    return Sorted(tuple(settings), tuple(arms.values()), names, runs)


def _check_text(first: Placed, other: Placed) -> None:
    """Refuse two runs of a setting that did not read, or are not judged by, the same text."""
    texts = [{domain.name: domain for domain in part.run.domains} for part in (first, other)]
    for name in {**texts[0], **texts[1]}:
        sides = [text.get(name) for text in texts]
        facts = [None if side is None else (side.fingerprint, side.validation_tokens) for side in sides]
        if facts[0] != facts[1]:
            raise ValueError(
                f"{Path(first.where).name} and {Path(other.where).name} have the same recipe but read different text "
                f"in the domain {name!r}; runs are compared on the same text only"
            )


def _check_tokens(first: Placed, other: Placed) -> None:
    """Refuse two runs of a setting whose steps read different amounts of text; a budget alone may change the steps."""
    sides = [part.run.tokens / part.run.steps for part in (first, other)]
    if first.run.tokens * other.run.steps != other.run.tokens * first.run.steps:
        raise ValueError(
            f"{Path(first.where).name} and {Path(other.where).name} have the same recipe but read {sides[0]:,.0f} and "
            f"{sides[1]:,.0f} tokens a step, as with another number of processes; train one of them anew"
        )


def _compared(part: Placed) -> ComparedRun:
    run = part.run
    shares = np.array([domain.share for domain in run.domains])  # (D,)
    return ComparedRun(
        setting=part.setting,
        arm=label_of(run.model.methods),
        seed=run.seed,
        name=run.name,
        parameters=run.model.parameters,
        flops_per_token=run.model.flops_per_token,
        steps=run.steps,
        tokens=run.tokens,
        length=_at(run.recipe, ("data", "length")),
        seconds=run.seconds,
        step_seconds=_step_seconds(run),
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
        glances=tuple(map(_glance, run.looks)),
    )


def _step_seconds(run: TrainingRun) -> float | None:
    """Return the median time of a step over what was logged, which a pause of the machine hardly moves."""
    speeds = [speed for speed in run.curve.tokens_per_second if speed > 0]
    return run.tokens / run.steps / float(np.median(speeds)) if speeds else None


def _glance(look: Look) -> Glance:
    norms = [norm for norm in look.stream_norm if norm is not None]
    growth = norms[-1] / norms[0] if norms and norms[0] > 0 else None
    shares, rates = _mean(look.first_token_share), _mean(look.sink_rate)
    return Glance(step=look.step, first_token_share=shares, sink_rate=rates, stream_growth=growth)


def _mean(layers: Sequence[float | None]) -> float | None:
    values = [value for value in layers if value is not None]
    return float(np.mean(values)) if values else None


def _shared(run: TrainingRun) -> dict[str, Any]:
    """Return a run's recipe without what runs of a setting differ in."""
    recipe = json.loads(json.dumps(run.recipe))
    for *above, key in OWN:
        parent = _at(recipe, tuple(above))
        if isinstance(parent, dict):
            parent.pop(key, None)
    return recipe


def _at(values: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _flat(values: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Return the values of mappings in mappings by dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{place}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat
