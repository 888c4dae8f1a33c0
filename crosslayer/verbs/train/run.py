"""A training run from its recipe to a folder: data, first weights, steps, validation, model and page.

The folder holds `recipe.yaml` (with every default), `log.jsonl` and checkpoints while the run goes on; at its end
`model/`, and `record.json` with its page last.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from crosslayer.verbs.train.arguments import training_arguments
from crosslayer.verbs.train.attention import check_attention, set_attention
from crosslayer.verbs.train.checkpoints import checkpoints
from crosslayer.verbs.train.facts import matrix_flops, trained_model
from crosslayer.verbs.train.initialise import initialise
from crosslayer.verbs.train.interrupting import resumable
from crosslayer.verbs.train.looks import looks_in, windows_of_each
from crosslayer.verbs.train.mixture import FixedRows, Mixture, validation_windows
from crosslayer.verbs.train.recipe import Recipe, load_recipe
from crosslayer.verbs.train.record import TrainedDomain, TrainedModel, Validation, curve_of, training_seconds
from crosslayer.verbs.train.result import TrainingRun
from crosslayer.verbs.train.resuming import step_sequences
from crosslayer.verbs.train.room import check_room
from crosslayer.verbs.train.texts import Domain, DomainShards
from crosslayer.verbs.train.timed import SaveByTime
from crosslayer.verbs.train.tokenizers import kept_tokenizer
from crosslayer.verbs.train.trainer import CrossLayerTrainer

RECIPE = "recipe.yaml"
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    progress: Meter = Silent,
) -> TrainingRun:
    """Train a model by a recipe, from scratch or on from a model; exit status 1 says that it ended too soon.

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
    with held(target) if is_first() else contextlib.nullcontext():
        _prepare(target, recipe, resume)
        with resumable(target):
            return _Run(recipe, target, progress).train(resume)


class _Costs(NamedTuple):
    model: TrainedModel
    peak_bytes: int | None
    matrix_flops: float


@dataclass
class _Run:
    recipe: Recipe
    folder: Path
    progress: Meter

    def train(self, resume: bool) -> TrainingRun:
        recipe = self.recipe
        on_gpu = torch.accelerator.is_available() and not recipe.train.get("use_cpu", False)
        check_attention(recipe.model.attention, torch.device("cuda" if on_gpu else "cpu"))
        sequences = _sequences(recipe.train)
        steps = recipe.schedule.total_steps(sequences * recipe.data.length)
        schedule = recipe.schedule.course(steps, min(recipe.eval.every, steps))
        arguments = training_arguments(self.folder, recipe.seed, schedule, recipe.train)
        assert step_sequences(arguments) == sequences
        tokenizer, shards = self._texts(arguments)
        weights = {domain.name: domain.weight for domain in recipe.data.domains}
        training = {name: parts.training for name, parts in shards.items()}
        mixture = Mixture(training, weights, recipe.data.length, recipe.seed, steps * sequences)
        length, count = recipe.data.length, recipe.eval.windows
        held_out = {name: validation_windows(parts.validation, length, count, name) for name, parts in shards.items()}
        looked_at = windows_of_each(list(held_out.values()), recipe.eval.looks)
        speed = _matrix_flops(arguments)
        with quiet_transformers(), peak_memory(arguments.device) as peak:
            model = _first_model(recipe, tokenizer)
            self._check_room(model, arguments)
            facts = trained_model(model, recipe.data.length)
            set_attention(model, recipe.model.attention, arguments)
            trainer = CrossLayerTrainer(
                model,
                arguments,
                mixture,
                held_out,
                tokenizer,
                self.progress,
                recipe.eval.depth_norms,
                looked_at,
                recipe.optimizer,
            )
            if recipe.save_minutes:
                trainer.add_callback(SaveByTime(recipe.save_minutes))
            trainer.train(resume_from_checkpoint=resume)
            if not _evaluated(trainer.state.log_history, steps) or not trainer.window_losses:
                trainer.evaluate()  # the last step is no multiple of eval.every, or the run had ended before
            trainer.save_model(str(self.folder / "model"))
        result = self._result(trainer, _Costs(facts, peak.bytes, speed), mixture, held_out)
        if trainer.is_world_process_zero():
            result.save_within(self.folder)
        return result

    def _check_room(self, model: PreTrainedModel, arguments: TrainingArguments) -> None:
        muon = self.recipe.optimizer.name == "muon"
        check_room(model, model.config, arguments, self.recipe.data.length, muon)

    def _texts(self, arguments: TrainingArguments) -> tuple[PreTrainedTokenizerFast, dict[str, DomainShards]]:
        """Return the tokenizer, and the tokens of every domain, out of the cache where they are there.

        In between, once its vocabulary is known, a new model that cannot fit is refused.
        """
        parts = self.recipe.data.domains
        domains = [Domain(part.name, part.training_source(), part.validation_source()) for part in parts]

        def documents() -> Iterator[str]:
            for domain in domains:
                yield from domain.training()

        place = cache_folder() / "tokens"
        with self.progress("reading the tokenizer", 0):
            digest = "/".join(f"{domain.name}: {domain.digest()}" for domain in domains)
            tokenizer = kept_tokenizer(self.recipe.tokenizer, documents, place, digest)
        if self.recipe.model.start is None:
            config = _config(self.recipe, tokenizer)
            with torch.device("meta"):
                self._check_room(CrossLayerForCausalLM(config), arguments)
        return tokenizer, {domain.name: domain.shards(tokenizer, place, self.progress) for domain in domains}

    def _result(
        self, trainer: CrossLayerTrainer, costs: _Costs, mixture: Mixture, held_out: dict[str, FixedRows]
    ) -> TrainingRun:
        history = trainer.state.log_history
        names = list(held_out)
        total = sum(mixture.units)
        passes = mixture.passes()
        domains = [
            TrainedDomain(
                name=name,
                share=units / total,
                tokens=mixture.domains[name].tokens,
                documents=mixture.domains[name].documents,
                validation_tokens=len(held_out[name]) * mixture.length,
                passes=passes[name],
                fingerprint=mixture.domains[name].fingerprint,
            )
            for name, units in zip(names, mixture.units, strict=True)
        ]
        return TrainingRun(  # pyright: ignore[reportCallIssue]
            name=self.recipe.name,
            seed=self.recipe.seed,
            recipe=self.recipe.model_dump(mode="json"),
            model=costs.model,
            domains=tuple(domains),
            curve=curve_of(history),
            validation=tuple(
                Validation(step=step, losses=entry) for step, entry in _validation_losses(history, names).items()
            ),
            windows={name: trainer.window_losses[f"eval_{name}_loss"].tolist() for name in names},
            looks=looks_in(history),
            steps=trainer.state.max_steps,
            tokens=trainer.state.num_input_tokens_seen,
            seconds=training_seconds(history),
            peak_bytes=costs.peak_bytes,
            matrix_flops=costs.matrix_flops,
        )


def _matrix_flops(arguments: TrainingArguments) -> float:
    """Return how fast all processes together multiply matrices in the run's dtype."""
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
    return matrix_flops(arguments.device, dtype) * arguments.world_size


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


def _sequences(train: dict[str, Any]) -> int:
    """Return how many sequences a step reads, over all processes and the batches that it accumulates."""
    batch, batches = train.get("per_device_train_batch_size", 8), train.get("gradient_accumulation_steps", 1)
    return batch * batches * int(os.environ.get("WORLD_SIZE", "1"))


def _validation_losses(history: list[dict[str, Any]], names: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return the losses of every domain by the step after which they were measured."""
    losses: dict[int, dict[str, float]] = {}
    for entry in history:
        for name in names:
            if f"eval_{name}_loss" in entry:
                losses.setdefault(entry["step"], {})[name] = entry[f"eval_{name}_loss"]
    return losses


def _evaluated(history: list[dict[str, Any]], step: int) -> bool:
    return any(entry["step"] == step and any(key.startswith("eval_") for key in entry) for entry in history)


def _prepare(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Take a new folder, or one of the same recipe.

    Raises:
        ValueError: the folder is of something else.

    """
    if not is_first():  # the first process may have written into it already
        return
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
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
        write_whole(written, text)


def _is_of(written: Path, recipe: Recipe) -> bool:
    """Return whether a file is of a recipe, but for what makes up a batch: checkpoints say whether that is the same."""
    try:
        there = load_recipe(written)
    except ValueError:
        return False
    trained = [{key: value for key, value in one.train.items() if key not in BATCH} for one in (there, recipe)]
    return trained[0] == trained[1] and there == recipe.model_copy(update={"train": there.train})


def is_first() -> bool:
    """Return whether this is the first of the run's processes, the one that writes and prints."""
    return os.environ.get("RANK", "0") == "0"
