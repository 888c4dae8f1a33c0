"""Trains a stage in a folder of its own, from which it goes on bit by bit where it was interrupted.

The folder holds `log.jsonl` and checkpoints while it trains; at its end `model/`, and last `stage.json`, which says
that the stage is whole. Then the checkpoints go. A stage trains W_c alone, all parameters, or adapters of low rank that
are merged when it ends.
"""

import importlib.util
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from crosslayer.core.method import Compensation
from crosslayer.environment import quiet_transformers
from crosslayer.output.folder import set_modes, write_whole
from crosslayer.output.progress import Meter
from crosslayer.output.record import validation_message
from crosslayer.verbs.heal.early_stop import EarlyStop
from crosslayer.verbs.heal.recipe import HealRecipe, LoraPart, StagePart
from crosslayer.verbs.heal.record import StageRun
from crosslayer.verbs.heal.rows import RecoveryRows
from crosslayer.verbs.heal.trainer import DistillTrainer, Teacher
from crosslayer.verbs.train.arguments import batch_sequences, training_arguments
from crosslayer.verbs.train.attention import set_attention
from crosslayer.verbs.train.callbacks import Interruption, resumable
from crosslayer.verbs.train.checkpoints import PARTIAL, checkpoints
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
        """Train a model of float32, in place, and save it; where the folder holds a whole checkpoint, go on from there.

        Where the loss is not finite, return what happened, which the folder keeps too. A teacher is for distillation.
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
            history, state = trainer.state.log_history, trainer.state
            run = StageRun(
                parameters=part.parameters,
                trained=sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad),
                steps=state.global_step,
                planned=state.max_steps,
                tokens=state.num_input_tokens_seen,
                seconds=training_seconds(history),
                curve=curve_of(history),
            )
            self._finish(merged(trained, part.parameters), folder, run)
        return Outcome(run)

    def arguments(self, folder: Path) -> TrainingArguments:
        """Return Trainer's arguments."""
        return training_arguments(folder, self.recipe.seed, self.part.schedule.course(self._steps), self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {**LOGGED, **self.recipe.train, **self.part.train}

    @property
    def _steps(self) -> int:
        return self.part.schedule.total_steps(batch_sequences(self._settings) * self.recipe.data.length)

    def _trainer(self, model: PreTrainedModel, folder: Path, teacher: Teacher | None) -> CrossLayerTrainer:
        part, arguments = self.part, self.arguments(folder)
        data = self.rows.training(self._steps * batch_sequences(self._settings))
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
    """Return how a stage went, or why it stopped; None where its folder is not whole."""
    if (folder / STOPPED).is_file():
        return Outcome(stopped=(folder / STOPPED).read_text(encoding="utf-8"))
    path = folder / DONE
    if not path.is_file():
        return None
    try:
        return Outcome(StageRun.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        what = f"{DONE} of {folder.parent.name}/{folder.name} is damaged ({validation_message(error)})"
        raise ValueError(f"{what}; remove that folder to train it anew") from None


def compensations(model: nn.Module) -> list[Compensation]:
    """Return every W_c of a model, from below."""
    return [module for module in model.modules() if isinstance(module, Compensation)]


def check_parameters(stages: Sequence[StagePart]) -> None:
    """Refuse stages whose parameters need what is not installed."""
    if any(stage.parameters == "lora" for stage in stages) and importlib.util.find_spec("peft") is None:
        raise ValueError("stages with parameters: lora need peft: pip install 'crosslayer[heal]'")


def unfreeze(model: PreTrainedModel, parameters: str, lora: LoraPart | None = None) -> PreTrainedModel:
    """Let a stage's parameters alone have gradients, and return what trains: the model, or the model with adapters.

    Adapters stand at every linear map but the head; a map that several layers share gets one, which they share.
    """
    if parameters != "lora":
        model.requires_grad_(parameters == "all")
        for module in compensations(model):
            module.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model

    part = lora or LoraPart()
    options = LoraConfig(
        r=part.rank,
        lora_alpha=part.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",  # type: ignore[arg-type]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers has changed
        return get_peft_model(model, options)  # type: ignore[return-value]


def merged(model: PreTrainedModel, parameters: str) -> PreTrainedModel:
    """Return the model after a stage, adapters added into the weights that they adapt."""
    wrapped: Any = model
    return wrapped.merge_and_unload(safe_merge=True) if parameters == "lora" else model
