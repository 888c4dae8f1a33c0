"""A training run from its recipe to a folder: data, first weights, steps, validation, model and page.

The folder holds `recipe.yaml` (with every default), `log.jsonl` and checkpoints while the run goes on; at its end
`model/`, and `record.json` with its page last.
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
from crosslayer.models.embedded import cache_folder
from crosslayer.models.load import load_model
from crosslayer.output.folder import held, write_whole
from crosslayer.output.progress import Meter, Silent
from crosslayer.verbs.bench.memory import peak_memory
from crosslayer.verbs.train.arguments import BATCH, batch_sequences, step_sequences, training_arguments
from crosslayer.verbs.train.attention import check_attention, set_attention
from crosslayer.verbs.train.callbacks import SaveByTime, resumable
from crosslayer.verbs.train.checkpoints import checkpoints
from crosslayer.verbs.train.costs import check_room, matrix_flops, trained_model
from crosslayer.verbs.train.initialise import initialise
from crosslayer.verbs.train.mixture import ORDER, FixedRows, Mixture, spread
from crosslayer.verbs.train.recipe import Recipe, load_recipe
from crosslayer.verbs.train.record import TrainedDomain, Validation, curve_of, training_seconds
from crosslayer.verbs.train.result import TrainingRun
from crosslayer.verbs.train.snapshots import snapshots_in, windows_of_each
from crosslayer.verbs.train.texts import Domain, DomainShards
from crosslayer.verbs.train.tokenizers import kept_tokenizer
from crosslayer.verbs.train.trainer import CrossLayerTrainer

RECIPE = "recipe.yaml"


def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    progress: Meter = Silent,
) -> TrainingRun:
    """Train a model by a recipe, from scratch or on from a model.

    Under `torchrun` or `accelerate launch` every process calls it; the first writes.

    Args:
        recipe: a recipe: a YAML file, such as recipes/smoke.yaml. In Python also what `load_recipe` returns.
        out: folder of the run: checkpoints, log, model, report.html, record.json; it must not exist unless `resume` is
            set.
        settings: on top of the recipe, repeatable: train.learning_rate=3e-4. In Python only beside a recipe that is a
            file.
        resume: go on from the last whole checkpoint of the same recipe; without any, begin anew. The number of
            processes may be another one, where `gradient_accumulation_steps` or `per_device_train_batch_size` keeps the
            sequences of a step.
        progress: in Python, shows what is being done.

    Returns:
        the run's record; the model lies in `out / "model"`.

    Raises:
        ValueError: the recipe is wrong, its text cannot be read, or the folder cannot be taken.
        TrainingStopped: the loss is not finite, or a checkpoint cannot be written.

    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, settings)
    elif settings:
        raise ValueError("settings are for a recipe that is a file; change the loaded one by load_recipe")
    target = Path(out).expanduser().resolve()
    first = os.environ.get("RANK", "0") == "0"  # of the run's processes: the one that takes the folder, and writes
    with held(target) if first else contextlib.nullcontext():
        if first:
            _prepare(target, recipe, resume)
        with resumable(target):
            return _train(recipe, target, resume, progress)


def _train(recipe: Recipe, folder: Path, resume: bool, progress: Meter) -> TrainingRun:
    length = recipe.data.length
    on_gpu = torch.accelerator.is_available() and not recipe.train.get("use_cpu", False)
    check_attention(recipe.model.attention, torch.device("cuda" if on_gpu else "cpu"))
    sequences = batch_sequences(recipe.train) * int(os.environ.get("WORLD_SIZE", "1"))  # of a step, over all processes
    steps = recipe.schedule.total_steps(sequences * length)
    course = recipe.schedule.course(steps, min(recipe.eval.every, steps))
    arguments = training_arguments(folder, recipe.seed, course, recipe.train)
    assert step_sequences(arguments) == sequences
    tokenizer, shards = _texts(recipe, arguments, progress)
    weights = {domain.name: domain.weight for domain in recipe.data.domains}
    training = {name: parts.training for name, parts in shards.items()}
    mixture = Mixture(training, weights, length, recipe.seed, steps * sequences)
    held_out = {
        name: spread(FixedRows(parts.validation, length, name), recipe.eval.windows) for name, parts in shards.items()
    }
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
    speed = matrix_flops(arguments.device, dtype) * arguments.world_size
    with quiet_transformers(), peak_memory(arguments.device) as peak:
        model = _first_model(recipe, tokenizer)
        check_room(model, recipe, arguments)
        facts = trained_model(model, length)
        set_attention(model, recipe.model.attention, arguments)
        trainer = CrossLayerTrainer(
            model,
            arguments,
            mixture,
            held_out,
            tokenizer,
            progress,
            recipe.eval.depth_norms,
            windows_of_each(list(held_out.values()), recipe.eval.snapshots),
            recipe.optimizer,
        )
        if recipe.save_minutes:
            trainer.add_callback(SaveByTime(recipe.save_minutes))
        trainer.train(resume_from_checkpoint=resume)
        if steps % course["eval_steps"] or not trainer.window_losses:
            trainer.evaluate()  # the last step is no multiple of eval.every, or the run had ended before
        trainer.save_model(str(folder / "model"))
    result = _result(recipe, trainer, mixture, model=facts, peak_bytes=peak.bytes, matrix_flops=speed)
    if trainer.is_world_process_zero():
        result.save_within(folder)
    return result


def _texts(
    recipe: Recipe, arguments: TrainingArguments, progress: Meter
) -> tuple[PreTrainedTokenizerFast, dict[str, DomainShards]]:
    """Return the tokenizer, and the tokens of every domain, out of the cache where they are there.

    In between, once its vocabulary is known, a new model that cannot fit is refused.
    """
    domains = [Domain(part.name, part.training_source(), part.validation_source()) for part in recipe.data.domains]
    place = cache_folder() / "tokens"
    with progress("reading the tokenizer", 0):
        digest = "/".join(f"{domain.name}: {domain.digest()}" for domain in domains)
        tokenizer = kept_tokenizer(
            recipe.tokenizer, lambda: (text for domain in domains for text in domain.training()), place, digest
        )
    if recipe.model.start is None:
        with torch.device("meta"):
            model = CrossLayerForCausalLM(_config(recipe, tokenizer))
        check_room(model, recipe, arguments)
    return tokenizer, {domain.name: domain.shards(tokenizer, place, progress) for domain in domains}


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
        steps=trainer.state.max_steps,
        tokens=trainer.state.num_input_tokens_seen,
        seconds=training_seconds(history),
        **costs,
    )


def _first_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    if recipe.model.start is not None:
        model, _ = load_model(recipe.model.start, dtype=torch.float32)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # type: ignore[operator, union-attr]
            raise ValueError(
                f"the tokenizer {recipe.tokenizer!r} has {len(tokenizer):,} tokens, more than the embeddings of "
                f"{recipe.model.start!r}; leave `tokenizer` out to take the model's own"
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
    """Take a new folder, or one of the same recipe."""
    written = folder / RECIPE
    if folder.exists() and any(folder.iterdir()):
        if not resume:
            raise ValueError(f"the folder {folder.name!r} exists; give another name, or `resume` to go on with its run")
        if not _is_of(written, recipe):
            raise ValueError(
                f"the folder {folder.name!r} is of another recipe, or of none; `resume` goes on with the same one only"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if not checkpoints(folder):  # else the file says how they were trained
        write_whole(written, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _is_of(written: Path, recipe: Recipe) -> bool:
    """Return whether a file is of a recipe, but for what makes up a batch: checkpoints say whether that is the same."""
    try:
        there = load_recipe(written)
    except ValueError:
        return False
    trained = [{key: value for key, value in one.train.items() if key not in BATCH} for one in (there, recipe)]
    return trained[0] == trained[1] and there == recipe.model_copy(update={"train": there.train})
