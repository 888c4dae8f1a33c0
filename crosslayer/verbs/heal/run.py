"""Trains retrofits of an original stage by stage, measures each after every stage, and puts it all on a page.

The folder of a recovery holds `recipe.yaml` (with every default); for each retrofit a folder with `before.json`,
`stage-1/`, `stage-2/`, … (`log.jsonl`, `stage.json`, `losses.json`, `model/`) and at its end `model/`; `original/`, the
same for the trained original; and last `record.json` with its page.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from crosslayer.models.load import load_model, public_name
from crosslayer.output.folder import held, write_whole
from crosslayer.output.progress import Meter, Silent
from crosslayer.verbs.heal.measure import Judge, Measurement
from crosslayer.verbs.heal.models import save_healed
from crosslayer.verbs.heal.parameters import check_parameters, compensations
from crosslayer.verbs.heal.recipe import HealRecipe, embedded_source, load_heal_recipe
from crosslayer.verbs.heal.record import Arm, State
from crosslayer.verbs.heal.result import Recovery
from crosslayer.verbs.heal.retrofits import Retrofit, check_original, open_retrofits
from crosslayer.verbs.heal.rows import RecoveryRows, read_rows
from crosslayer.verbs.heal.stages import MODEL, Outcome, Stage, finished
from crosslayer.verbs.heal.summary import Summary, shown_order
from crosslayer.verbs.heal.trainer import Teacher
from crosslayer.verbs.heal.windows import Judging, judging

RECIPE, HEALED = "recipe.yaml", "heal.json"
BEFORE, LOSSES = "before.json", "losses.json"
NO_COMPENSATION = "there is no W_c"


def heal(
    retrofits: Sequence[str | Path],
    recipe: HealRecipe | str | Path,
    out: str | Path,
    *,
    original: str | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
    progress: Meter = Silent,
) -> Recovery:
    """Train retrofits until they recover, and measure them after every stage; exit status 1: it ended too soon.

    Beside them stands the original, trained as the last stage says, to its last step.

    A model whose loss is not finite stops there, which the result says; the others go on.

    Args:
        retrofits: folders of `crosslayer retrofit`, all of the same original.
        recipe: a recipe: a YAML file, such as recipes/heal-smoke.yaml. In Python also what `load_heal_recipe` returns.
        out: folder of the result: stages, models, report.html, record.json; it must not exist unless `resume` is set.
        original: the model that they come from; default: what their receipts say.
        settings: on top of the recipe, repeatable: stages.0.schedule.steps=20. In Python only beside a recipe that is a
            file.
        resume: go on in the folder of the same recipe and retrofits; what is whole is not done again.
        progress: in Python, shows what is being done.

    Returns:
        the record; the healed models lie in `out / NAME / "model"`.

    Raises:
        ValueError: recipe, retrofits or text are wrong, or the folder cannot be taken.
        TrainingStopped: a checkpoint cannot be written.

    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("heal runs in a single process; start it without torchrun")
    if not isinstance(recipe, HealRecipe):
        recipe = load_heal_recipe(recipe, settings)
    elif settings:
        raise ValueError("settings are for a recipe that is a file; change the loaded one by load_heal_recipe")
    target = Path(out).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"the folder {target.name!r} is a file; name another")
    check_parameters(recipe.stages)
    opened, name = open_retrofits(retrofits, original)
    with held(target):
        files = _files(recipe, opened)
        _check_folder(target, files, resume)
        job = _Job.ready(recipe, opened, name, target, progress)
        target.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            write_whole(target / file, content)
        result = job.heal()
        result.save_within(target)
    return result


@dataclass
class _Job:
    recipe: HealRecipe
    retrofits: list[Retrofit]
    folder: Path
    original: str
    model: PreTrainedModel  # the original
    rows: RecoveryRows
    judge: Judge
    judging: Judging
    progress: Meter
    runs: dict[Path, Outcome] = field(default_factory=dict)  # of a stage's folder

    @classmethod
    def ready(
        cls, recipe: HealRecipe, retrofits: list[Retrofit], original: str, folder: Path, progress: Meter
    ) -> "_Job":
        """Load the original, and cut all text into tokens."""
        how = judging(recipe, retrofits)
        with progress(f"loading {public_name(original)}", 0):
            model, tokenizer = load_model(original, dtype=torch.float32)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"the tokenizer of {original!r} is no fast one (tokenizer.json); training needs such")
        check_original(public_name(original), model, retrofits)
        with progress("cutting the text into tokens", 0):
            windows = how.windows(recipe, tokenizer)
        rows = read_rows(recipe, tokenizer, progress)
        for number, part in enumerate(recipe.stages):
            try:
                Stage(recipe, part, rows, progress).arguments(folder)
            except ValueError as error:
                raise ValueError(f"stages.{number}: {error}") from None
        judge = Judge(model, tokenizer if recipe.eval.needles else None, windows, rows.held_out(), progress)
        return cls(recipe, retrofits, folder, original, model, rows, judge, how, progress)

    def heal(self) -> Recovery:
        """Train and measure everything that is not done yet."""
        measured = self.judge.measure({self._before(retrofit): retrofit.folder for retrofit in self.retrofits})
        known = measured[self._before(self.retrofits[0])].losses
        measured[self._original / BEFORE] = self.judge.measure_original(self._original / BEFORE, known)
        for number in range(1, len(self.recipe.stages) + 1):
            for retrofit in self.retrofits:
                self._train(retrofit, number)
            if number == len(self.recipe.stages) and self.recipe.trains_original:
                self._train_original()
            measured |= self.judge.measure(self._trained(number))
        for retrofit in self.retrofits:
            self._finish(retrofit)
        return self._result(measured)

    @property
    def _original(self) -> Path:
        return self.folder / "original"

    def _before(self, retrofit: Retrofit) -> Path:
        return self.folder / retrofit.name / BEFORE

    def _stage(self, retrofit: Retrofit, number: int) -> Path:
        """Return the folder of a stage, which is counted from 1."""
        return self.folder / retrofit.name / f"stage-{number}"

    def _entered(self, retrofit: Retrofit, number: int) -> Path:
        for earlier in range(number - 1, 0, -1):
            if self.runs[self._stage(retrofit, earlier)].run is not None:
                return self._stage(retrofit, earlier) / MODEL
        return retrofit.folder

    def _train(self, retrofit: Retrofit, number: int) -> None:
        """Train a stage of a retrofit, unless it is whole already, or has nothing to train."""
        folder, part = self._stage(retrofit, number), self.recipe.stages[number - 1]
        done = finished(folder)
        if done is not None:
            self.runs[folder] = done
            return
        for earlier in range(1, number):
            if self.runs[self._stage(retrofit, earlier)].stopped is not None:
                self.runs[folder] = Outcome(skipped=f"stage {earlier} stopped")
                return
        with self.progress(f"{retrofit.name}, stage {number} of {len(self.recipe.stages)}", 0):
            model, _ = load_model(str(self._entered(retrofit, number)), dtype=torch.float32)
        if part.parameters == "compensation" and not compensations(model):
            self.runs[folder] = Outcome(skipped=NO_COMPENSATION)
            return
        teacher = None
        if self.recipe.objective.loss == "distill":
            teacher = Teacher(self.model, retrofit.layers(model), self.recipe.objective.hidden)
        self.runs[folder] = Stage(self.recipe, part, self.rows, self.progress).train(model, folder, teacher)

    def _train_original(self) -> None:
        """Train the original as the last stage says, to its last step; the one in memory stays as it is."""
        folder = self._original
        done = finished(folder)
        if done is None:
            with self.progress("the original, as the last stage", 0):
                model, _ = load_model(self.original, dtype=torch.float32)
            part = self.recipe.stages[-1].model_copy(update={"stop": None})
            done = Stage(self.recipe, part, self.rows, self.progress).train(model, folder)
        self.runs[folder] = done

    def _trained(self, number: int) -> dict[Path, Path]:
        """Return the models to measure after a stage, by the file that keeps their losses."""
        folders = [self._stage(retrofit, number) for retrofit in self.retrofits]
        if number == len(self.recipe.stages) and self.recipe.trains_original:
            folders.append(self._original)
        return {folder / LOSSES: folder / MODEL for folder in folders if self.runs[folder].run is not None}

    def _finish(self, retrofit: Retrofit) -> None:
        """Put the healed model where it can be opened, unless it is there."""
        target = self.folder / retrofit.name / MODEL
        if not target.exists():
            with self.progress(f"writing {retrofit.name}/{MODEL}", 0):
                source = self._entered(retrofit, len(self.recipe.stages) + 1)
                save_healed(source, retrofit, target, trained=source != retrofit.folder)

    def _result(self, measured: dict[Path, Measurement]) -> Recovery:
        before = measured[self._before(self.retrofits[0])].losses
        judged = set(before.domains)
        seen = {name for retrofit in self.retrofits for name in retrofit.receipt.texts.fitted}
        trained_on = {part.name for part in self.recipe.data.domains if embedded_source(part)}
        overlapping = sorted(seen & trained_on & judged)
        seen = frozenset((seen | trained_on) & judged)
        trained, outcome = measured.get(self._original / LOSSES), self.runs.get(self._original)
        reference = before.before if trained is None else trained.losses.after
        order = shown_order([measured[self._before(retrofit)].losses for retrofit in self.retrofits], seen)
        summary = Summary(order, seen, reference, trained is not None, self.judging.seed)
        return Recovery(  # pyright: ignore[reportCallIssue]
            name=self.recipe.name,
            original=public_name(self.original),
            recipe=self.recipe.model_dump(mode="json"),
            objective=self.recipe.objective.loss,
            reference="original" if trained is None else "trained original",
            arms=tuple(self._arm(retrofit, measured, summary) for retrofit in self.retrofits),
            order=summary.order({retrofit.name: self._last(retrofit, measured).losses for retrofit in self.retrofits}),
            untrained_original=_state("before", measured[self._original / BEFORE], summary),
            trained_original=None if trained is None else self._trained_state(trained, summary),
            original_stopped=None if outcome is None else outcome.stopped,
            left_out=self.rows.left_out(),
            windows=len(before.before),
            length=self.judging.length,
            overlapping=tuple(overlapping),
        )

    def _arm(self, retrofit: Retrofit, measured: dict[Path, Measurement], summary: Summary) -> Arm:
        first = earlier = measured[self._before(retrofit)]
        states = [_state("before", first, summary, None, first)]
        for number in range(1, len(self.recipe.stages) + 1):
            folder = self._stage(retrofit, number)
            how, now = self.runs[folder], measured.get(folder / LOSSES, earlier)
            state = _state(f"stage {number}", now, summary, earlier, first)
            states.append(state.model_copy(update=vars(how)))
            earlier = now
        receipt = retrofit.receipt
        return Arm(
            name=retrofit.name,
            title=receipt.title,
            cache_share=receipt.cache.share,
            fit=receipt.calibration.fit,
            states=tuple(states),
        )

    def _last(self, retrofit: Retrofit, measured: dict[Path, Measurement]) -> Measurement:
        """Return what was measured after the last stage that trained a retrofit, or before any."""
        for number in range(len(self.recipe.stages), 0, -1):
            path = self._stage(retrofit, number) / LOSSES
            if path in measured:
                return measured[path]
        return measured[self._before(retrofit)]

    def _trained_state(self, trained: Measurement, summary: Summary) -> State:
        return _state("trained", trained, summary).model_copy(update={"run": self.runs[self._original].run})


def _state(
    name: str,
    now: Measurement,
    summary: Summary,
    earlier: Measurement | None = None,
    first: Measurement | None = None,
) -> State:
    before, start = (None if other is None else other.losses for other in (earlier, first))
    domains, everything = summary.standings(now.losses, before, start)
    return State(name=name, domains=domains, all=everything, held_out=now.held_out, needles=now.needles)


def _files(recipe: HealRecipe, retrofits: list[Retrofit]) -> dict[str, str]:
    """Return the files that say what a folder is of: the recipe, and the retrofits by digests."""
    receipts = {retrofit.name: retrofit.digest() for retrofit in retrofits}
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return {RECIPE: text, HEALED: json.dumps(receipts, indent=1)}


def _check_folder(folder: Path, files: dict[str, str], resume: bool) -> None:
    """Refuse a folder of something else.

    Raises:
        ValueError: there are files in it, and no `resume`, or they are of another recipe or of other retrofits.

    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not resume:
        raise ValueError(f"the folder {folder.name!r} exists; give another name, or `resume` to go on with it")
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            raise ValueError(
                f"the folder {folder.name!r} is of another recipe or of other retrofits; `resume` goes on with the same"
            )
