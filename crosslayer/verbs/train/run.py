"""A training run, from its recipe to a folder.

During the run the folder holds `recipe.yaml` (with every default), `log.jsonl` and checkpoints; at the end also
`model/`, and last `record.json` with its page.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.environment import quiet_transformers
from crosslayer.machine import peak_memory
from crosslayer.models.embedded import cache_folder
from crosslayer.models.load import load_model
from crosslayer.output.folder import held, write_whole
from crosslayer.output.progress import progress
from crosslayer.training.arguments import BATCH, batch_sequences, step_sequences, training_arguments
from crosslayer.training.attention import check_attention, set_attention
from crosslayer.training.callbacks import SaveByTime, resumable
from crosslayer.training.checkpoints import checkpoints
from crosslayer.training.mixture import ORDER, FixedRows, Mixture, spread
from crosslayer.training.recipe import Recipe, load_recipe
from crosslayer.training.record import TrainedDomain, Validation, curve_of, training_seconds
from crosslayer.training.texts import Domain, DomainShards
from crosslayer.training.tokenizers import kept_tokenizer
from crosslayer.verbs.train.costs import check_memory, matrix_flops, trained_model
from crosslayer.verbs.train.initialise import initialise
from crosslayer.verbs.train.result import TrainingRun
from crosslayer.verbs.train.snapshots import depth_mixing_of, snapshots_in, windows_of_each
from crosslayer.verbs.train.trainer import CrossLayerTrainer

RECIPE = "recipe.yaml"


def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
) -> TrainingRun:
    """Train a model from a recipe, from scratch or from an existing model.

    Under `torchrun` or `accelerate launch` every process calls it; the first one writes.

    Args:
        recipe: a YAML file, or the name of a shipped recipe, such as smoke. In Python also what `load_recipe` returns.
        out: folder for checkpoints, log, model, report.html and record.json; it must not exist unless `resume` is set.
        settings: override a key of the recipe, repeatable: train.learning_rate=3e-4.
        resume: continue from the last complete checkpoint of the same recipe, or start if there is none. The number of
            processes may change if `gradient_accumulation_steps` or `per_device_train_batch_size` keeps the batch size.

    Returns:
        the run's record; the model is saved in `out / "model"`.

    Raises:
        ValueError: the recipe is wrong, its text cannot be read, or the folder cannot be used.
        TrainingStopped: the loss is not finite, or a checkpoint cannot be written.

    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, settings)
    elif settings:
        raise ValueError("`settings` needs a recipe file, got a loaded recipe; pass the settings to load_recipe")
    target = Path(out).expanduser().resolve()
    first = os.environ.get("RANK", "0") == "0"  # of the run's processes: the one that locks the folder and writes
    with held(target) if first else contextlib.nullcontext():
        if first:
            _prepare(target, recipe, resume)
        with resumable(target):
            return _train(recipe, target, resume)


def _train(recipe: Recipe, folder: Path, resume: bool) -> TrainingRun:
    length = recipe.data.length
    on_gpu = torch.accelerator.is_available() and not recipe.train.get("use_cpu", False)
    check_attention(recipe.model.attention, torch.device("cuda" if on_gpu else "cpu"))
    sequences = batch_sequences(recipe.train) * int(os.environ.get("WORLD_SIZE", "1"))  # per step, over all processes
    steps = recipe.schedule.total_steps(sequences * length)
    course = recipe.schedule.course(steps, min(recipe.eval.every, steps))
    arguments = training_arguments(folder, recipe.seed, course, recipe.train)
    assert step_sequences(arguments) == sequences
    tokenizer, shards = _texts(recipe, arguments)
    weights = {domain.name: domain.weight for domain in recipe.data.domains}
    training = {name: splits.training for name, splits in shards.items()}
    mixture = Mixture(training, weights, length, recipe.seed, steps * sequences)
    held_out = {
        name: spread(FixedRows(splits.validation, length, name), recipe.eval.windows) for name, splits in shards.items()
    }
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
    speed = matrix_flops(arguments.device, dtype) * arguments.world_size
    with quiet_transformers(), peak_memory(arguments.device) as peak:
        model = _initial_model(recipe, tokenizer)
        check_memory(model, recipe, arguments)
        properties = trained_model(model, length)
        set_attention(model, recipe.model.attention, arguments)
        trainer = CrossLayerTrainer(
            model,
            arguments,
            mixture,
            held_out,
            tokenizer,
            windows_of_each(list(held_out.values()), recipe.eval.snapshots),
            recipe.optimizer,
        )
        if recipe.save_minutes:
            trainer.add_callback(SaveByTime(recipe.save_minutes))
        trainer.train(resume_from_checkpoint=resume)
        if steps % course["eval_steps"] or not trainer.window_losses:
            trainer.evaluate()  # the last step was not evaluated, or the run had already finished
        trainer.save_model(str(folder / "model"))
    result = _result(recipe, trainer, mixture, model=properties, peak_bytes=peak.bytes, matrix_flops=speed)
    if trainer.is_world_process_zero():
        result.save_within(folder)
    return result


def _texts(recipe: Recipe, arguments: TrainingArguments) -> tuple[PreTrainedTokenizerFast, dict[str, DomainShards]]:
    """Return the tokenizer and the tokens of every domain, from the cache if they are there.

    A new model that cannot fit into memory is refused as soon as its vocabulary is known, before tokenising.
    """
    domains = [
        Domain(domain.name, domain.training_source(), domain.validation_source()) for domain in recipe.data.domains
    ]
    cache = cache_folder() / "tokens"
    with progress("reading the tokenizer", 0):
        digest = "/".join(f"{domain.name}: {domain.digest()}" for domain in domains)
        tokenizer = kept_tokenizer(
            recipe.tokenizer, lambda: (text for domain in domains for text in domain.training()), cache, digest
        )
    if recipe.model.start is None:
        with torch.device("meta"):
            model = CrossLayerForCausalLM(_config(recipe, tokenizer))
        check_memory(model, recipe, arguments)
    return tokenizer, {domain.name: domain.shards(tokenizer, cache) for domain in domains}


def _result(recipe: Recipe, trainer: CrossLayerTrainer, mixture: Mixture, **costs: Any) -> TrainingRun:
    history: list[dict[str, Any]] = trainer.state.log_history
    passes, windows = mixture.passes(), {name: trainer.window_losses[f"eval_{name}_loss"] for name in mixture.domains}
    validation: dict[int, dict[str, float]] = {}  # step → loss of every domain
    for entry in history:
        for name in mixture.domains:
            if f"eval_{name}_loss" in entry:
                validation.setdefault(entry["step"], {})[name] = entry[f"eval_{name}_loss"]
    return TrainingRun(
        name=recipe.name,
        seed=recipe.seed,
        recipe=recipe.model_dump(mode="json"),
        domains=tuple(
            TrainedDomain(
                name=name,
                share=units / sum(mixture.units),
                tokens=shards.tokens,
                documents=shards.documents,
                validation_tokens=len(windows[name]) * mixture.length,
                passes=passes[name],
                fingerprint=f"{shards.fingerprint}-{ORDER}",
            )
            for (name, shards), units in zip(mixture.domains.items(), mixture.units, strict=True)
        ),
        curve=curve_of(history),
        validation=tuple(Validation(step=step, losses=losses) for step, losses in validation.items()),
        windows={name: losses.tolist() for name, losses in windows.items()},
        snapshots=snapshots_in(history),
        depth_mixing=depth_mixing_of(trainer.accelerator.unwrap_model(trainer.model), trainer.probed),
        steps=trainer.state.max_steps,
        tokens=trainer.state.num_input_tokens_seen,
        seconds=training_seconds(history),
        **costs,
    )


def _initial_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    if recipe.model.start is not None:
        model, _ = load_model(recipe.model.start, dtype=torch.float32)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # type: ignore[operator, union-attr]
            raise ValueError(
                f"tokenizer: {recipe.tokenizer!r} has {len(tokenizer):,} tokens, more than {recipe.model.start!r} has "
                "embeddings; remove it to use the model's own"
            )
        return model
    model = CrossLayerForCausalLM(_config(recipe, tokenizer))
    initialise(model, recipe.seed)
    return model


def _config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> CrossLayerConfig:
    return recipe.model.config(
        recipe.data.length,
        len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,  # type: ignore[arg-type]
        eos_token_id=tokenizer.eos_token_id,  # type: ignore[arg-type]
        pad_token_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
    )


def _prepare(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Prepare a new folder, or one with the same recipe."""
    written = folder / RECIPE
    if folder.exists() and any(folder.iterdir()):
        if not resume:
            raise ValueError(f"the folder {folder.name!r} exists; use another name, or `resume` to continue its run")
        if not _is_of(written, recipe):
            raise ValueError(
                f"the folder {folder.name!r} has another recipe, or none; `resume` continues the same recipe only"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if not checkpoints(folder):  # otherwise the file has the recipe of the checkpoints
        write_whole(written, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _is_of(written: Path, recipe: Recipe) -> bool:
    """Return whether a file has this recipe, except for the batch size, which is compared with the checkpoints'."""
    try:
        existing = load_recipe(written)
    except ValueError:
        return False
    trained = [{key: value for key, value in one.train.items() if key not in BATCH} for one in (existing, recipe)]
    return trained[0] == trained[1] and existing == recipe.model_copy(update={"train": existing.train})
