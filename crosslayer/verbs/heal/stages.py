"""Train a stage in its own folder, from which an interrupted stage resumes bit for bit.

The folder holds `log.jsonl` and checkpoints during training, then `model/`, and finally `stage.json`, which marks the
stage as finished; the checkpoints are then removed. A stage trains W_c only, all parameters, or LoRA adapters that are
merged when it ends.
"""

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
from crosslayer.extras import check_extra
from crosslayer.output.folder import set_modes, write_whole
from crosslayer.output.record import validation_message
from crosslayer.training.arguments import batch_sequences, training_arguments
from crosslayer.training.attention import set_attention
from crosslayer.training.callbacks import Interruption, resumable
from crosslayer.training.checkpoints import PARTIAL, checkpoints
from crosslayer.training.record import curve_of, training_seconds
from crosslayer.verbs.heal.early_stop import EarlyStop
from crosslayer.verbs.heal.recipe import HealRecipe, LoraPart, StagePart
from crosslayer.verbs.heal.record import StageRun
from crosslayer.verbs.heal.rows import RecoveryRows
from crosslayer.verbs.heal.trainer import DistillTrainer, Teacher
from crosslayer.verbs.train.trainer import CrossLayerTrainer, TrainingStopped

DONE, MODEL = "stage.json", "model"
STOPPED = "stopped.txt"
LOGGING = {"logging_steps": 1}  # early stopping uses every loss


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stage: its training run, or why it was skipped, or why it stopped before its end."""

    run: StageRun | None = None
    skipped: str | None = None
    stopped: str | None = None


@dataclass(frozen=True)
class Stage:
    """A stage of a recovery, for each of its models."""

    recipe: HealRecipe
    part: StagePart
    rows: RecoveryRows

    def train(self, model: PreTrainedModel, folder: Path, teacher: Teacher | None = None) -> Outcome:
        """Train a float32 model in place and save it; resume from the folder's latest complete checkpoint, if any.

        If the loss becomes NaN or infinite, return and store that outcome. A teacher is for distillation.
        """
        part, folder = self.part, folder.resolve()
        set_seed(self.recipe.seed)  # for the initial values of adapters
        trained = unfreeze(model, part.parameters, part.lora)
        with quiet_transformers():
            trainer = self._trainer(trained, folder, teacher)
            try:
                with resumable(folder):
                    trainer.train(resume_from_checkpoint=True)
            except TrainingStopped as stop:
                if stop.__cause__ is not None:  # a checkpoint that could not be written, as on a full disk
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
        """Return the arguments of Trainer."""
        return training_arguments(folder, self.recipe.seed, self.part.schedule.course(self._steps), self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {**LOGGING, **self.recipe.train, **self.part.train}

    @property
    def _steps(self) -> int:
        return self.part.schedule.total_steps(batch_sequences(self._settings) * self.recipe.data.length)

    def _trainer(self, model: PreTrainedModel, folder: Path, teacher: Teacher | None) -> CrossLayerTrainer:
        part, arguments = self.part, self.arguments(folder)
        data = self.rows.training(self._steps * batch_sequences(self._settings))
        for each in (model,) if teacher is None else (model, teacher.model):
            set_attention(each, None, arguments)
        trainer_class = CrossLayerTrainer if teacher is None else DistillTrainer
        trainer = trainer_class(model, arguments, data, {}, self.rows.tokenizer)
        if isinstance(trainer, DistillTrainer):
            assert teacher is not None
            teacher.model.to(arguments.device)  # type: ignore[arg-type]
            trainer.teacher = teacher
        trainer.add_callback(_LastStep(trainer.interruption))
        if part.stop is not None:
            trainer.add_callback(EarlyStop(part.stop.smoothing, part.stop.patience, part.stop.least))
        return trainer

    def _finish(self, model: PreTrainedModel, folder: Path, run: StageRun) -> None:
        """Write the model and then the run, and remove checkpoints."""
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
    """Skips checkpoint and evaluation of the last step, since the model itself is written and measured next.

    If the run is interrupted in that step, the checkpoint is kept.
    """

    def __init__(self, interruption: Interruption):
        self.interruption = interruption

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Override the decisions of Trainer."""
        if state.global_step >= state.max_steps:
            control.should_save, control.should_evaluate = self.interruption.pressed, False


def finished(folder: Path) -> Outcome | None:
    """Return the outcome of a stage that has ended; None otherwise."""
    if (folder / STOPPED).is_file():
        return Outcome(stopped=(folder / STOPPED).read_text(encoding="utf-8"))
    path = folder / DONE
    if not path.is_file():
        return None
    try:
        return Outcome(StageRun.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        stage = f"{folder.parent.name}/{folder.name}"
        raise ValueError(
            f"{DONE} of {stage} is damaged ({validation_message(error)}); remove that folder to retrain"
        ) from None


def compensations(model: nn.Module) -> list[Compensation]:
    """Return every W_c of a model, from the first layer."""
    return [module for module in model.modules() if isinstance(module, Compensation)]


def check_parameters(stages: Sequence[StagePart]) -> None:
    """Raise if a stage needs a package that is not installed."""
    if any(stage.parameters == "lora" for stage in stages):
        check_extra("heal", "parameters: lora", "peft")


def unfreeze(model: PreTrainedModel, parameters: str, lora: LoraPart | None = None) -> PreTrainedModel:
    """Enable gradients for a stage's parameters only, and return the model, with adapters for "lora".

    Every linear layer but the head gets an adapter; a linear layer that several layers share has one shared adapter.
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
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a name that transformers renamed
        return get_peft_model(model, options)  # type: ignore[return-value]


def merged(model: PreTrainedModel, parameters: str) -> PreTrainedModel:
    """Return the model after a stage, with adapters merged into its weights."""
    wrapped: Any = model
    return wrapped.merge_and_unload(safe_merge=True) if parameters == "lora" else model
