"""A training run, from its recipe to a folder.

During the run the folder holds `recipe.yaml` (with every default), `log.jsonl` and checkpoints; at the end also
`model/`, and last `record.json` with its page.
"""

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from crosslayer.environment import quiet_transformers
from crosslayer.machine import matrix_flops, peak_memory
from crosslayer.output.folder import locked_folder
from crosslayer.training.arguments import step_sequences
from crosslayer.training.attention import check_attention
from crosslayer.training.callbacks import resumable
from crosslayer.training.costs import check_memory, trained_model
from crosslayer.training.initialise import initial_model, new_model
from crosslayer.training.recipe import Recipe, begin_run, check_run, given_recipe
from crosslayer.training.record import curve_of, snapshots_in, training_seconds, validations_in
from crosslayer.training.rows import read_rows
from crosslayer.training.snapshots import depth_mixing_of, snapshot
from crosslayer.training.stages import stage_arguments, stage_trainer
from crosslayer.training.tokenizers import recipe_tokenizer
from crosslayer.verbs.diagnose.sequence import measure_sequence
from crosslayer.verbs.train.result import TrainingRun


def train(
    recipe: Recipe | str | Path, out: str | Path, *, settings: Sequence[str] = (), resume: bool = False
) -> TrainingRun:
    """Train a model from a recipe, from scratch or from an existing model.

    Under `torchrun` or `accelerate launch`, every process runs this command; the first one writes.

    Args:
        recipe: a YAML file, or the name of a shipped recipe, such as smoke. In Python also what `load_recipe` returns.
        out: folder for checkpoints, log, model, report.html and record.json; it must not exist unless `resume` is set.
        settings: override a key of the recipe, repeatable: train.learning_rate=3e-4.
        resume: continue from the last complete checkpoint of the same recipe; without one, start from the beginning.
            With another number of processes, set `gradient_accumulation_steps` or `per_device_train_batch_size` so that
            a step reads as many sequences as before.

    Returns:
        the run's record; the model is saved in `out / "model"`.

    Raises:
        ValueError: the recipe is wrong, its text cannot be read, or the folder cannot be used.
        TrainingStopped: the loss is not finite, or a checkpoint cannot be written.
    """
    recipe = given_recipe(recipe, settings, stages=False)
    target = Path(out).expanduser().resolve()
    # of the run's processes the one that locks the folder and writes
    first = os.environ.get("RANK", "0") == "0"
    with locked_folder(target) if first else contextlib.nullcontext(), resumable(target):
        if first:
            check_run(target, recipe, resume)
            begin_run(target, recipe)
        arguments = stage_arguments(recipe, recipe.parts[0], target)
        assert recipe.model is not None, "a recipe without stages has one"
        check_attention(recipe.model.attention, arguments.device)
        tokenizer = recipe_tokenizer(recipe.tokenizer or "bytes", [part.text() for part in recipe.data.domains])
        # too large a model is refused before any text is read
        if recipe.model.start is None:
            with torch.device("meta"):
                empty = new_model(recipe.model, recipe.data.length, tokenizer)
            check_memory(empty, arguments, recipe.data.length)
        rows = read_rows(recipe, tokenizer)
        domains = rows.trained(arguments.max_steps * step_sequences(arguments))
        probed = rows.probed(recipe.eval.snapshots)
        probe = None
        if probed is not None:
            probe = partial(snapshot, windows=probed, measure=lambda model, ids: measure_sequence(model, ids).measures)
        # of the machine, beside which the run's own FLOP/s stand
        dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
        speed = matrix_flops(arguments.device, dtype) * arguments.world_size
        with quiet_transformers(), peak_memory(arguments.device) as peak:
            model = initial_model(recipe, tokenizer, arguments)
            properties = trained_model(model, recipe.data.length)
            trainer = stage_trainer(recipe, rows, model, arguments, probe=probe)
            trainer.train(resume_from_checkpoint=resume)
            # the last step was not evaluated, or the run had already finished
            if arguments.max_steps % (arguments.eval_steps or 1) or not trainer.window_losses:
                trainer.evaluate()
            trainer.save_model(str(target / "model"))
        history: list[dict[str, Any]] = trainer.state.log_history
        result = TrainingRun(
            name=recipe.name,
            seed=recipe.seed,
            recipe=recipe.model_dump(mode="json"),
            model=properties,
            domains=domains,
            curve=curve_of(history),
            validation=validations_in(history, rows.held_out),
            windows={name: trainer.window_losses[f"eval_{name}_loss"].tolist() for name in rows.held_out},
            snapshots=snapshots_in(history),
            steps=trainer.state.max_steps,
            tokens=trainer.state.num_input_tokens_seen,
            seconds=training_seconds(history),
            peak_bytes=peak.bytes,
            matrix_flops=speed,
            depth_mixing=depth_mixing_of(trainer.accelerator.unwrap_model(trainer.model), probed),  # type: ignore[bad-argument-type]
        )
        if trainer.is_world_process_zero():
            result.save_within(target)
    return result
