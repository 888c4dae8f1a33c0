"""Train retrofits of an original stage by stage, and measure each after every stage.

The folder of a recovery holds `recipe.yaml` (with every default); for each retrofit a folder with `before.json`,
`stage-1/`, `stage-2/`, … (`log.jsonl`, `stage.json`, `losses.json`, `model/`) and finally `model/`; `original/`, the
same for the trained original; and finally `record.json` with its page.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from crosslayer.models.load import load_model, public_name
from crosslayer.output.folder import held, write_whole
from crosslayer.output.progress import progress
from crosslayer.verbs.heal.measure import Evaluator, Measurement
from crosslayer.verbs.heal.recipe import HealRecipe, embedded_source, load_heal_recipe
from crosslayer.verbs.heal.record import State, Variant
from crosslayer.verbs.heal.result import Recovery
from crosslayer.verbs.heal.retrofits import Retrofit, check_original, open_retrofits, save_healed
from crosslayer.verbs.heal.rows import RecoveryRows, read_rows
from crosslayer.verbs.heal.stages import MODEL, Outcome, Stage, check_parameters, compensations, finished
from crosslayer.verbs.heal.summary import Summary, shown_order
from crosslayer.verbs.heal.trainer import Teacher
from crosslayer.verbs.heal.windows import EvaluationWindows, evaluation_windows

RECIPE, HEALED, ORIGINAL = "recipe.yaml", "heal.json", "original"
BEFORE, LOSSES = "before.json", "losses.json"


def heal(
    retrofits: Sequence[str | Path],
    recipe: HealRecipe | str | Path,
    out: str | Path,
    *,
    original: str | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
) -> Recovery:
    """Train retrofits until they recover, and measure them after every stage.

    The reference is the original, trained with the last stage's settings without early stop.

    If the loss of a model becomes NaN or infinite, its training stops and the result says so; the others continue.

    Args:
        retrofits: folders written by `crosslayer retrofit`, all of the same original.
        recipe: a YAML file, or the name of a shipped recipe, such as heal-smoke. In Python also what
            `load_heal_recipe` returns.
        out: output folder (stages, models, report.html, record.json); it must not exist unless `resume` is set.
        original: the original model; default: the one in the retrofits' reports.
        settings: override a recipe key, repeatable: stages.0.schedule.steps=20. In Python only with a recipe that is a
            file.
        resume: continue in the output folder of the same recipe and retrofits; finished stages are not repeated.

    Returns:
        the record; the healed models are in `out / NAME / "model"`.

    Raises:
        ValueError: recipe, retrofits or text are invalid, or the folder cannot be used.
        TrainingStopped: a checkpoint cannot be written.

    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("heal runs in a single process, got WORLD_SIZE > 1; start it without torchrun")
    if not isinstance(recipe, HealRecipe):
        recipe = load_heal_recipe(recipe, settings)
    elif settings:
        raise ValueError("settings need a recipe that is a file; pass them to load_heal_recipe instead")
    target = Path(out).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"`out` must be a folder, {target.name!r} is a file")
    check_parameters(recipe.stages)
    opened, name = open_retrofits(retrofits, original)
    with held(target):
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        digests = {retrofit.name: retrofit.digest() for retrofit in opened}
        files = {RECIPE: text, HEALED: json.dumps(digests, indent=1)}
        _check_folder(target, files, resume)
        job = _ready(recipe, opened, name, target)
        target.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            write_whole(target / file, content)
        result = job.heal()
        result.save_within(target)
    return result


def _check_folder(folder: Path, files: dict[str, str], resume: bool) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not resume:
        raise ValueError(f"the folder {folder.name!r} exists; choose another, or set `resume` to continue in it")
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            raise ValueError(
                f"the folder {folder.name!r} belongs to another recipe or to other retrofits; `resume` needs the same"
            )


def _ready(recipe: HealRecipe, retrofits: Sequence[Retrofit], original: str, folder: Path) -> "_Job":
    """Load the original and tokenize all text."""
    evaluation = evaluation_windows(recipe, retrofits)
    with progress(f"loading {public_name(original)}", 0):
        model, tokenizer = load_model(original, dtype=torch.float32)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"training needs a fast tokenizer (tokenizer.json), {original!r} has none")
    check_original(public_name(original), model, retrofits)
    with progress("tokenizing the text", 0):
        windows = evaluation.windows(recipe, tokenizer)
    rows = read_rows(recipe, tokenizer)
    for number, stage in enumerate(recipe.stages):
        try:
            Stage(recipe, stage, rows).arguments(folder)
        except ValueError as error:
            raise ValueError(f"stages.{number}: {error}") from None
    evaluator = Evaluator(model, tokenizer if recipe.eval.needles else None, windows, rows.held_out())
    return _Job(recipe, retrofits, folder, original, model, rows, evaluator, evaluation)


@dataclass(frozen=True)
class _Step:
    """A model before training or after a stage: the stage's outcome, the model's folder, and its measurements."""

    outcome: Outcome
    model: Path
    measured: Measurement


@dataclass(frozen=True)
class _Job:
    recipe: HealRecipe
    retrofits: Sequence[Retrofit]
    folder: Path
    original: str
    model: PreTrainedModel  # the original
    rows: RecoveryRows
    evaluator: Evaluator
    evaluation: EvaluationWindows

    def heal(self) -> Recovery:
        """Train and measure everything that is not finished yet."""
        files = {retrofit.name: self.folder / retrofit.name / BEFORE for retrofit in self.retrofits}
        before = self.evaluator.measure({files[retrofit.name]: retrofit.folder for retrofit in self.retrofits})
        histories = {
            retrofit.name: [_Step(Outcome(), retrofit.folder, before[files[retrofit.name]])]
            for retrofit in self.retrofits
        }
        file, losses = self.folder / ORIGINAL / BEFORE, next(iter(before.values())).losses
        histories[ORIGINAL] = [_Step(Outcome(), Path(self.original), self.evaluator.measure_original(file, losses))]
        for number in range(1, len(self.recipe.stages) + 1):
            self._stage(number, histories)
        for retrofit in self.retrofits:
            target, source = self.folder / retrofit.name / MODEL, histories[retrofit.name][-1].model
            if not target.exists():
                with progress(f"writing {retrofit.name}/{MODEL}", 0):
                    save_healed(source, retrofit, target, trained=source != retrofit.folder)
        return self._result(histories)

    def _stage(self, number: int, histories: dict[str, list[_Step]]) -> None:
        """Train and measure a stage of every model (the last one of the original too), and add it to the histories."""
        outcomes = {
            retrofit.name: self._train(retrofit, number, histories[retrofit.name]) for retrofit in self.retrofits
        }
        folders = {name: self.folder / name / f"stage-{number}" for name in outcomes}
        if number == len(self.recipe.stages) and self.recipe.trains_original:
            outcomes[ORIGINAL], folders[ORIGINAL] = self._train_original(), self.folder / ORIGINAL
        trained = [folders[name] for name, outcome in outcomes.items() if outcome.run is not None]
        measured = self.evaluator.measure({folder / LOSSES: folder / MODEL for folder in trained})
        for name, outcome in outcomes.items():
            folder, step = folders[name], replace(histories[name][-1], outcome=outcome)
            if folder in trained:
                step = _Step(outcome, folder / MODEL, measured[folder / LOSSES])
            histories[name].append(step)

    def _train(self, retrofit: Retrofit, number: int, steps: Sequence[_Step]) -> Outcome:
        """Train a stage of a retrofit, unless it is finished or has nothing to train."""
        folder, stage = self.folder / retrofit.name / f"stage-{number}", self.recipe.stages[number - 1]
        done = finished(folder)
        if done is not None:
            return done
        for earlier, step in enumerate(steps):
            if step.outcome.stopped is not None:
                return Outcome(skipped=f"stage {earlier} stopped")
        with progress(f"{retrofit.name}, stage {number} of {len(self.recipe.stages)}", 0):
            model, _ = load_model(str(steps[-1].model), dtype=torch.float32)
        if stage.parameters == "compensation" and not compensations(model):
            return Outcome(skipped="there is no W_c")
        teacher = None
        if self.recipe.objective.loss == "distill":
            teacher = Teacher(self.model, retrofit.layers(model), self.recipe.objective.hidden)
        return Stage(self.recipe, stage, self.rows).train(model, folder, teacher)

    def _train_original(self) -> Outcome:
        """Train a copy of the original with the last stage's settings, without early stop."""
        folder = self.folder / ORIGINAL
        done = finished(folder)
        if done is not None:
            return done
        with progress("original, last stage", 0):
            model, _ = load_model(self.original, dtype=torch.float32)
        stage = self.recipe.stages[-1].model_copy(update={"stop": None})
        return Stage(self.recipe, stage, self.rows).train(model, folder)

    def _result(self, histories: dict[str, list[_Step]]) -> Recovery:
        untrained, trained = histories[ORIGINAL][0].measured, histories[ORIGINAL][-1]  # the same if it was not trained
        evaluated = set(untrained.losses.domains)
        calibrated = {name for retrofit in self.retrofits for name in retrofit.report.fitted} & evaluated
        trained_on = {domain.name for domain in self.recipe.data.domains if embedded_source(domain)} & evaluated
        seen = frozenset(calibrated | trained_on)
        ours = {retrofit.name: histories[retrofit.name] for retrofit in self.retrofits}
        order = shown_order([steps[0].measured.losses for steps in ours.values()], seen)
        summary = Summary(order, seen, trained.measured.losses, self.evaluation.seed)
        reference = (
            None
            if trained.outcome.run is None
            else _state("trained", trained.measured, summary, outcome=trained.outcome)
        )
        return Recovery(  # pyright: ignore[reportCallIssue]
            name=self.recipe.name,
            original=public_name(self.original),
            recipe=self.recipe.model_dump(mode="json"),
            objective=self.recipe.objective.loss,
            reference="original" if reference is None else "trained original",
            variants=tuple(_variant(retrofit, ours[retrofit.name], summary) for retrofit in self.retrofits),
            order=summary.order({name: steps[-1].measured.losses for name, steps in ours.items()}),
            untrained_original=_state("before", untrained, summary),
            trained_original=reference,
            original_stopped=trained.outcome.stopped,
            left_out=self.rows.left_out(),
            windows=len(untrained.losses.kl),
            length=self.evaluation.length,
            overlapping=tuple(sorted(calibrated & trained_on)),
        )


def _variant(retrofit: Retrofit, steps: Sequence[_Step], summary: Summary) -> Variant:
    first = earlier = steps[0].measured
    states = [_state("before", first, summary, None, first)]
    for number, step in enumerate(steps[1:], 1):
        states.append(_state(f"stage {number}", step.measured, summary, earlier, first, step.outcome))
        earlier = step.measured
    report = retrofit.report
    return Variant(
        name=retrofit.name,
        title=report.title,
        cache_share=report.cache.share,
        fit=report.calibration.fit,
        states=tuple(states),
    )


def _state(
    name: str,
    now: Measurement,
    summary: Summary,
    earlier: Measurement | None = None,
    first: Measurement | None = None,
    outcome: Outcome | None = None,
) -> State:
    before, start = (None if other is None else other.losses for other in (earlier, first))
    domains, everything = summary.results(now.losses, before, start)
    fields = vars(outcome or Outcome())
    return State(name=name, domains=domains, all=everything, held_out=now.held_out, needles=now.needles, **fields)
