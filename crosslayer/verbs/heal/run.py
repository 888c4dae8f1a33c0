"""Train retrofits of an original stage by stage, and measure each after every stage.

The folder of a recovery holds `recipe.yaml` (with every default); for each retrofit a folder with `before.json`,
`stage-1/`, `stage-2/`, … (`log.jsonl`, `stage.json`, `losses.json`, `model/`) and finally `model/`; `original/`, with
the last stage of the original; and finally `record.json` with its page.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from crosslayer.extras import check_extra
from crosslayer.judge.announce import announce
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.damage import Losses
from crosslayer.judge.report import Row
from crosslayer.judge.rows import retrieval_rows, window_rows
from crosslayer.models.load import load_model, public_name
from crosslayer.output.folder import locked_folder
from crosslayer.output.progress import progress
from crosslayer.training.arguments import step_sequences
from crosslayer.training.distillation import Teacher
from crosslayer.training.recipe import Recipe, begin_run, check_run, given_recipe
from crosslayer.training.recipe_parts import StagePart
from crosslayer.training.record import Outcome
from crosslayer.training.rows import ExampleRows, Rows, read_rows
from crosslayer.training.stages import MODEL, compensations, finished, run_stage, stage_arguments
from crosslayer.verbs.heal.questions import Answers, Questions, evaluation_windows
from crosslayer.verbs.heal.result import ORIGINAL, Recovery, State, Variant
from crosslayer.verbs.heal.retrofits import Retrofit, check_original, open_retrofits, save_healed
from crosslayer.verbs.heal.summary import ranked, shown_order, state_rows

HEALED, BEFORE, LOSSES = "heal.json", "before.json", "losses.json"
UNTRAINED, TRAINED = "before", "trained"  # names of states


def heal(
    retrofits: Sequence[str | Path],
    recipe: Recipe | str | Path = "heal-distill",
    out: str | Path = "healed",
    *,
    original: str | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
) -> Recovery:
    """Train retrofits to recover quality, and measure them after every stage.

    The reference is the original, trained with the last stage's settings, without early stopping.

    If a model's loss becomes NaN or infinite, its training stops, with a note in the result; the others continue.

    Args:
        retrofits: folders written by `crosslayer retrofit`, all of the same original.
        recipe: a YAML file with stages, or the name of a shipped recipe, such as heal-smoke. In Python also what
            `load_recipe` returns.
        out: output folder (stages, models, report.html, record.json); it must not exist unless `resume` is set.
        original: the original model; default: the one that the retrofits' reports name.
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
    recipe = given_recipe(recipe, settings, stages=True)
    if any(stage.parameters == "lora" for stage in recipe.stages):
        check_extra("heal", "parameters: lora", "peft")
    opened, name = open_retrofits(retrofits, original)
    target = Path(out).expanduser().resolve()
    # A resumed run continues only with the same retrofits.
    digests = {HEALED: json.dumps({retrofit.name: retrofit.digest() for retrofit in opened}, indent=1)}
    with locked_folder(target):
        check_run(target, recipe, resume, digests)
        with progress(f"loading {public_name(name)}", 0):
            model, tokenizer = load_model(name, dtype=torch.float32)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"training needs a fast tokenizer (tokenizer.json), but {name!r} has none")
        check_original(public_name(name), model, opened)
        with progress("tokenizing the text", 0):
            windows = evaluation_windows(recipe, opened, tokenizer)
        rows = read_rows(recipe, tokenizer)
        trained = []  # tokens of each stage
        for index, part in enumerate(recipe.stages):
            try:
                arguments = stage_arguments(recipe, part, target)
            except ValueError as error:
                raise ValueError(f"stages.{index}: {error}") from None
            trained.append(arguments.max_steps * step_sequences(arguments) * recipe.data.length)
        questions = Questions(model, tokenizer, windows, rows.held_out, recipe.judge.needles)
        # A run that continues has finished some of the work.
        if not (target / opened[0].name).exists():
            # A training step takes three passes, and the teacher of a distillation one more; each state is read twice,
            # by the original and by the model.
            passes = 3 + (recipe.objective == "distill")
            asked = 2 * windows.ids.numel() * (len(trained) + 1)
            tokens = len(opened) * (passes * sum(trained) + asked) + 3 * trained[-1] * recipe.trains_original
            announce(model, windows.ids, tokens)
        # After all that can be refused, so that a refusal leaves no folder.
        begin_run(target, recipe, digests)
        result = _Job(recipe, opened, target, name, rows, questions).heal()
        result.save_within(target)
    return result


class _Step(NamedTuple):
    """A model before training or after a stage: the stage's outcome, the model's folder, and its measurements."""

    name: str  # before, stage 1, …
    outcome: Outcome
    model: Path | None  # None: the original
    answers: Answers


@dataclass(frozen=True)
class _Job:
    """Retrofits, text and folder of a recovery; stages and answers that are in the folder are not repeated."""

    recipe: Recipe
    retrofits: Sequence[Retrofit]
    folder: Path
    original: str
    rows: Rows
    questions: Questions

    def heal(self) -> Recovery:
        """Train and measure everything that is not finished yet."""
        healed = {each.name: self._steps(each.name, self.recipe.stages, each) for each in self.retrofits}
        for retrofit in self.retrofits:
            source, target = healed[retrofit.name][-1].model, self.folder / retrofit.name / MODEL
            if source is not None and not target.exists():
                with progress(f"writing {retrofit.name}/{MODEL}", 0):
                    save_healed(source, retrofit, target, trained=source != retrofit.folder)
        # Without an early stop, so that the reference has at least the steps of each retrofit's last stage.
        last = self.recipe.stages[-1].model_copy(update={"stop": None})
        return self._result(healed, self._steps(ORIGINAL, [last] if self.recipe.trains_original else []))

    def _steps(self, name: str, parts: Sequence[StagePart], retrofit: Retrofit | None = None) -> list[_Step]:
        """Return a retrofit, or the original, before training and after each stage."""
        folder = self.folder / name
        start = None if retrofit is None else retrofit.folder
        steps = [_Step(UNTRAINED, Outcome(), start, self.questions.ask(Candidate(name, start), folder / BEFORE))]
        for stage, part in enumerate(parts, 1):
            of_stage = folder / f"stage-{stage}"
            outcome = finished(of_stage) or self._train(part, steps, of_stage, retrofit)
            # A stage that was skipped or has stopped leaves the model, and so its answers, as they were.
            step = steps[-1]._replace(name=f"stage {stage}", outcome=outcome)
            if outcome.run is not None:
                answers = self.questions.ask(Candidate(f"{name}, {step.name}", of_stage / MODEL), of_stage / LOSSES)
                step = step._replace(model=of_stage / MODEL, answers=answers)
            steps.append(step)
        return steps

    def _train(self, part: StagePart, steps: Sequence[_Step], folder: Path, retrofit: Retrofit | None) -> Outcome:
        """Train a stage, unless an earlier one has stopped or there is nothing to train."""
        for step in steps:
            if step.outcome.stopped is not None:
                return Outcome(skipped=f"{step.name} stopped")
        with progress(f"{folder.parent.name}, stage {len(steps)}", 0):
            model, _ = load_model(str(steps[-1].model or self.original), dtype=torch.float32)
        if part.parameters == "compensation" and not compensations(model):
            return Outcome(skipped="there is no W_c")
        teacher = None
        if retrofit is not None and self.recipe.objective == "distill":
            teacher = Teacher(self.questions.original)
        return run_stage(self.recipe, part, self.rows, model, folder, teacher)

    def _result(self, healed: dict[str, list[_Step]], original: list[_Step]) -> Recovery:
        """Return the record: the states of all models, their rows, and the domains in the order of the page."""
        windows = self.questions.windows
        evaluated = set(windows.domains)
        calibrated = {name for retrofit in self.retrofits for name in retrofit.report.fitted} & evaluated
        trained_on = {domain.name for domain in self.recipe.data.domains if domain.source is None} & evaluated
        seen = frozenset(calibrated | trained_on)
        domains = shown_order([steps[0].answers.losses for steps in healed.values()], seen)
        trained = original[-1]._replace(name=TRAINED) if original[-1].outcome.run is not None else None
        order, rows = self._rows(healed, original[0], trained, domains)
        variants = []
        for retrofit in self.retrofits:
            report = retrofit.report
            variants.append(
                Variant(
                    name=retrofit.name,
                    title=report.title,
                    cache_share=report.cache.share,
                    fit=report.calibration.fit,
                    states=tuple(map(_state, healed[retrofit.name])),
                )
            )
        return Recovery(
            name=self.recipe.name,
            original=public_name(self.original),
            recipe=self.recipe.model_dump(mode="json"),
            objective=self.recipe.objective,
            reference="original" if trained is None else "trained original",
            rows=tuple(rows),
            domains=tuple(domains),
            seen=tuple(domain for domain in domains if domain in seen),
            variants=tuple(variants),
            order=order,
            untrained_original=_state(original[0]),
            trained_original=None if trained is None else _state(trained),
            original_stopped=original[-1].outcome.stopped,
            left_out={name: rows.left_out for name, rows in self.rows.domains.items() if isinstance(rows, ExampleRows)},
            windows=len(windows),
            length=windows.ids.shape[1],
            overlapping=tuple(sorted(calibrated & trained_on)),
        )

    def _rows(
        self, healed: dict[str, list[_Step]], original: _Step, trained: _Step | None, domains: Sequence[str]
    ) -> tuple[dict[str, tuple[str, ...]], list[Row]]:
        """Return the ranking of the retrofits by domain, and the rows of all states."""
        seed = self.retrofits[0].report.settings.seed
        samples, found = self.questions.samples, original.answers.found
        reference = None if trained is None else trained.answers.losses
        rows: list[Row] = []
        ends: dict[str, Losses] = {}
        for name, steps in healed.items():
            losses = [step.answers.losses for step in steps]
            for stage, step in enumerate(steps):
                candidate = f"{name}, {step.name}"
                rows += state_rows(candidate, losses[: stage + 1], reference, seed)
                rows += retrieval_rows(candidate, samples, step.answers.found, found)
            ends[f"{name}, {steps[-1].name}"] = losses[-1]
        if trained is not None:
            rows += window_rows(f"{ORIGINAL}, {trained.name}", trained.answers.losses, seed)
            rows += retrieval_rows(f"{ORIGINAL}, {trained.name}", samples, trained.answers.found, found)
        ranks, differences = ranked(ends, domains, seed)
        names = dict(zip(ends, healed, strict=True))
        order = {domain: tuple(names[candidate] for candidate in of_domain) for domain, of_domain in ranks.items()}
        return order, [*rows, *differences]


def _state(step: _Step) -> State:
    """Return a state for the record, without the answers, which are rows there."""
    return State(name=step.name, held_out=step.answers.held_out, **dict(step.outcome))
