"""Trains a stage in a folder of its own, from which it goes on bit by bit where it was interrupted.

The folder holds `log.jsonl` and checkpoints while it trains; at its end `model/`, and last `stage.json`, which says
that the stage is whole. Then the checkpoints go.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from crosslayer.environment import quiet_transformers
from crosslayer.output.folder import set_modes, write_whole
from crosslayer.output.progress import Meter
from crosslayer.verbs.heal.early_stop import EarlyStop
from crosslayer.verbs.heal.parameters import merged, trained_parameters, unfreeze
from crosslayer.verbs.heal.recipe import HealRecipe, StagePart
from crosslayer.verbs.heal.record import StageRun
from crosslayer.verbs.heal.rows import RecoveryRows
from crosslayer.verbs.heal.trainer import DistillTrainer, Teacher
from crosslayer.verbs.train.arguments import training_arguments
from crosslayer.verbs.train.attention import set_attention
from crosslayer.verbs.train.checkpoints import PARTIAL, checkpoints
from crosslayer.verbs.train.interrupting import Interruption, resumable
from crosslayer.verbs.train.record import curve_of, training_seconds
from crosslayer.verbs.train.trainer import CrossLayerTrainer, TrainingStopped

DONE, MODEL = "stage.json", "model"
STOPPED = "stopped.txt"
LOGGED = {"logging_steps": 1}  # a stage is short, and its end may depend on every loss


@dataclass(frozen=True)
class Outcome:
    """How a stage went: what it trained, or why it trained nothing, or why it ended for good before it was whole."""

    run: StageRun | None = None
    skipped: str | None = None
    stopped: str | None = None


@dataclass(frozen=True)
class Stage:
    """A stage of a recovery, for any of its models."""

    recipe: HealRecipe
    part: StagePart
    rows: RecoveryRows
    meter: Meter

    def train(self, model: PreTrainedModel, folder: Path, teacher: Teacher | None = None) -> Outcome:
        """Train a model, in place, and save it; where the folder holds a whole checkpoint, go on from there.

        Where the loss is not finite, return what happened, which the folder keeps too.

        Args:
            model: in float32.
            folder: of the stage.
            teacher: of a stage that is distilled.

        Raises:
            TrainingStopped: a checkpoint cannot be written.

        """
        part, folder = self.part, folder.resolve()
        set_seed(self.recipe.seed)  # of an adapter's first values
        trained = unfreeze(model, part.parameters, part.lora)
        with quiet_transformers():
            trainer = self._trainer(trained, folder, teacher)
            try:
                with resumable(folder):
                    trainer.train(resume_from_checkpoint=True)
            except TrainingStopped as stop:
                if stop.__cause__ is not None:  # a checkpoint that could not be written: a full disk
                    raise
                write_whole(folder / STOPPED, str(stop))
                return Outcome(stopped=str(stop))
            run = self._run(trainer, trained_parameters(trained))
            self._finish(merged(trained, part.parameters), folder, run)
        return Outcome(run)

    def arguments(self, folder: Path) -> TrainingArguments:
        """Return Trainer's arguments.

        Raises:
            ValueError: they contradict each other.

        """
        steps, schedule = self._steps(), self.part.schedule
        return training_arguments(folder, self.recipe.seed, schedule.course(steps), self._settings())

    def _settings(self) -> dict[str, Any]:
        return {**LOGGED, **self.recipe.train, **self.part.train}

    def _sequences(self) -> int:
        settings = self._settings()
        return settings.get("per_device_train_batch_size", 8) * settings.get("gradient_accumulation_steps", 1)

    def _steps(self) -> int:
        return self.part.schedule.total_steps(self._sequences() * self.recipe.data.length)

    def _trainer(self, model: PreTrainedModel, folder: Path, teacher: Teacher | None) -> CrossLayerTrainer:
        part, arguments = self.part, self.arguments(folder)
        data = self.rows.training(self._steps() * self._sequences())
        for each in (model,) if teacher is None else (model, teacher.model):
            set_attention(each, None, arguments)
        kind = CrossLayerTrainer if teacher is None else DistillTrainer
        trainer = kind(model, arguments, data, {}, self.rows.tokenizer, self.meter)
        if isinstance(trainer, DistillTrainer):
            assert teacher is not None
            teacher.model.to(arguments.device)  # type: ignore[arg-type]
            trainer.teacher = teacher
        trainer.add_callback(_LastStep(trainer.interruption))
        if part.stop is not None:
            trainer.add_callback(EarlyStop(part.stop.smoothing, part.stop.patience, part.stop.least))
        return trainer

    def _run(self, trainer: CrossLayerTrainer, trained: int) -> StageRun:
        history, state = trainer.state.log_history, trainer.state
        return StageRun(
            parameters=self.part.parameters,
            trained=trained,
            steps=state.global_step,
            planned=state.max_steps,
            tokens=state.num_input_tokens_seen,
            seconds=training_seconds(history),
            curve=curve_of(history),
        )

    def _finish(self, model: PreTrainedModel, folder: Path, run: StageRun) -> None:
        """Write the model and then the run, and remove what was needed on the way."""
        partial = folder / f".{MODEL}"
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        self.rows.tokenizer.save_pretrained(partial)
        set_modes(partial)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        partial.rename(folder / MODEL)
        write_whole(folder / DONE, run.model_dump_json(indent=1))
        for path in (folder / PARTIAL, *checkpoints(folder).values()):
            shutil.rmtree(path, ignore_errors=True)


class _LastStep(TrainerCallback):
    """Leaves checkpoint and evaluation of the last step out: the model itself is written next, and then measured.

    Interrupted in that step, nothing is written next, so the checkpoint stays.
    """

    def __init__(self, interruption: Interruption):
        self.interruption = interruption

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take back what Trainer has decided."""
        if state.global_step >= state.max_steps:
            control.should_save, control.should_evaluate = self.interruption.pressed, False


def finished(folder: Path) -> Outcome | None:
    """Return how a stage went, or why it stopped; None where its folder is not whole.

    Raises:
        ValueError: its record is damaged.

    """
    if (folder / STOPPED).is_file():
        return Outcome(stopped=(folder / STOPPED).read_text(encoding="utf-8"))
    path = folder / DONE
    if not path.is_file():
        return None
    try:
        return Outcome(StageRun.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(
            f"{DONE} of {folder.parent.name}/{folder.name} is damaged ({place}); remove that folder to train it anew"
        ) from None
