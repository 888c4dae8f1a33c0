"""Training by a recipe: the trainer of a stage, and a stage from its start to its model.

A stage trains W_c only, all parameters, or LoRA adapters that are merged when it ends. Its folder holds `log.jsonl` and
checkpoints, from which an interrupted stage resumes bit for bit, then `model/`, and finally `stage.json`, which marks
the stage as finished; the checkpoints are then removed.
"""

import math
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel, TrainingArguments, set_seed

from crosslayer.core.method import Compensation
from crosslayer.environment import quiet_transformers
from crosslayer.output.folder import whole_folder, write_whole
from crosslayer.output.record import validation_message
from crosslayer.training.arguments import BATCH, step_sequences, training_arguments
from crosslayer.training.attention import set_attention
from crosslayer.training.callbacks import EarlyStop, LastStep, resumable
from crosslayer.training.checkpoints import PARTIAL, checkpoints
from crosslayer.training.distillation import Teacher
from crosslayer.training.recipe import Recipe
from crosslayer.training.recipe_parts import LoraPart, StagePart
from crosslayer.training.record import Outcome, StageRun, curve_of, training_seconds
from crosslayer.training.rows import Rows
from crosslayer.training.trainer import CrossLayerTrainer, TrainingStopped

DONE, MODEL = "stage.json", "model"
# of recipes with stages; early stopping uses every loss
LOGGING = {"logging_steps": 1}


def stage_arguments(recipe: Recipe, part: StagePart, folder: Path) -> TrainingArguments:
    """Return the arguments of Trainer for a stage, over all processes that `torchrun` started."""
    settings = {**(LOGGING if recipe.stages else {}), **recipe.train, **part.train}
    # the number of steps is an argument itself, so the sequences per step are needed before there are arguments
    per_process = math.prod(settings.get(key, default) for key, default in BATCH.items())
    sequences = per_process * int(os.environ.get("WORLD_SIZE", "1"))
    steps = part.schedule.total_steps(sequences * recipe.data.length)
    schedule = part.schedule.schedule_arguments(steps, min(recipe.eval.every, steps))
    arguments = training_arguments(folder, recipe.seed, schedule, settings)
    assert step_sequences(arguments) == sequences
    return arguments


def stage_trainer(
    recipe: Recipe,
    rows: Rows,
    model: PreTrainedModel,
    arguments: TrainingArguments,
    teacher: Teacher | None = None,
    probe: Callable[[PreTrainedModel], dict[str, float]] | None = None,
) -> CrossLayerTrainer:
    """Return the trainer of a stage; all stages start with the same rows. Arguments as `CrossLayerTrainer`.

    Without stages, the held-out rows are evaluated during training.
    """
    # a retrofit keeps the default of its model
    implementation = None if recipe.model is None else recipe.model.attention
    for each in (model,) if teacher is None else (model, teacher.model):
        set_attention(each, implementation, arguments)
    if teacher is not None:
        teacher.model.to(arguments.device)  # type: ignore[arg-type]
    data = rows.training(arguments.max_steps * step_sequences(arguments))
    held_out = {} if recipe.stages else rows.held_out
    return CrossLayerTrainer(model, arguments, data, held_out, rows.tokenizer, teacher, probe)


def run_stage(
    recipe: Recipe, part: StagePart, rows: Rows, model: PreTrainedModel, folder: Path, teacher: Teacher | None = None
) -> Outcome:
    """Train a float32 model in place and save it; resume from the folder's latest complete checkpoint, if any.

    If the loss becomes NaN or infinite, that is the outcome. It is kept in the folder.

    Raises:
        TrainingStopped: a checkpoint cannot be written, as on a full disk.
    """
    set_seed(recipe.seed)  # for the initial values of adapters
    trained: Any = unfreeze(model, part.parameters, part.lora)
    with quiet_transformers(), ExitStack() as afterwards:
        # the teacher is the original that the judge measures next, with its own attention
        if teacher is not None and teacher.model.config._attn_implementation is not None:
            afterwards.callback(teacher.model.set_attn_implementation, teacher.model.config._attn_implementation)
        trainer = stage_trainer(recipe, rows, trained, stage_arguments(recipe, part, folder), teacher)
        trainer.add_callback(LastStep(trainer.interruption))
        if part.stop is not None:
            trainer.add_callback(EarlyStop(part.stop.smoothing, part.stop.patience, part.stop.least))

        try:
            with resumable(folder):
                trainer.train(resume_from_checkpoint=True)
        except TrainingStopped as stop:
            # with a cause, a checkpoint could not be written, which the next attempt may do; else the loss diverged
            if stop.__cause__ is not None:
                raise
            outcome = Outcome(stopped=str(stop))
        else:
            state = trainer.state
            run = StageRun(
                parameters=part.parameters,
                trained=sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad),  # type: ignore[bad-argument-type]
                steps=state.global_step,
                planned=state.max_steps,
                tokens=state.num_input_tokens_seen,
                seconds=training_seconds(state.log_history),
                curve=curve_of(state.log_history),
            )
            outcome = Outcome(run=run)
            # safe_merge: adapters that are not finite must not spoil the weights in silence
            whole = trained.merge_and_unload(safe_merge=True) if part.parameters == "lora" else trained
            shutil.rmtree(folder / MODEL, ignore_errors=True)
            with whole_folder(folder / MODEL) as partial:
                whole.save_pretrained(partial)
                rows.tokenizer.save_pretrained(partial)

    # the model, then the mark, then the checkpoints: whatever is interrupted, the stage is finished or can be resumed
    write_whole(folder / DONE, outcome.model_dump_json(indent=1))
    for path in (folder / PARTIAL, *checkpoints(folder).values()) if outcome.run is not None else ():
        shutil.rmtree(path, ignore_errors=True)
    return outcome


def finished(folder: Path) -> Outcome | None:
    """Return the outcome of a stage that has ended; None otherwise."""
    path = folder / DONE
    if not path.is_file():
        return None
    problem = "it is empty"
    try:
        outcome = Outcome.model_validate_json(path.read_bytes())
    except ValidationError as error:
        outcome = Outcome()
        problem = validation_message(error)
    if outcome == Outcome():
        stage = f"{folder.parent.name}/{folder.name}"
        raise ValueError(f"{DONE} of {stage} is damaged ({problem}); remove that folder to retrain")
    return outcome


def compensations(model: nn.Module) -> list[Compensation]:
    """Return every W_c of a model, from the first layer."""
    return [module for module in model.modules() if isinstance(module, Compensation)]


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
        # peft uses a name that transformers renamed
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, options)  # type: ignore[return-value]
