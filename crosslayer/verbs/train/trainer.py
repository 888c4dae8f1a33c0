"""The trainer: transformers' own, with what a fair comparison needs of it.

What differs from `Trainer`: weight decay leaves norms, vectors and what methods mix with alone; checkpoints are staged;
a loss that is not finite ends the run; a validation loss is the mean over tokens, exact for any batch and any number of
ranks; tokens a second are measured, and every measurement goes to `log.jsonl`; the model's `use_cache` stays as it is.

Shapes: B batch, T tokens, V vocabulary, N validation windows.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from crosslayer._start import EndedTooSoon
from crosslayer.output.folder import disk_error, set_modes
from crosslayer.output.progress import Meter, Silent
from crosslayer.verbs.train.arguments import step_sequences
from crosslayer.verbs.train.attention import document_borders
from crosslayer.verbs.train.callbacks import Interruption, Log
from crosslayer.verbs.train.checkpoints import KEPT, PARTIAL, Kept, Resumed, last_good, publish, stage
from crosslayer.verbs.train.costs import without_logits
from crosslayer.verbs.train.mixture import ORDER
from crosslayer.verbs.train.optimizers import mixing_parameters, optimizer_of
from crosslayer.verbs.train.recipe import OptimizerPart
from crosslayer.verbs.train.snapshots import as_number, layer_norms, snapshot

PICKLED = "training_args.bin"  # which Trainer adds to a model


class TrainingStopped(EndedTooSoon):
    """A run ended before its last step, through no fault of its settings that could be seen beforehand.

    `step` was not completed, or its checkpoint could not be written; `checkpoint` is the last good one, if any.
    """

    def __init__(self, what: str, step: int, checkpoint: Path | None):
        last = "there is no checkpoint yet" if checkpoint is None else f"the last good checkpoint is {checkpoint.name}"
        super().__init__(f"{what}; {last}")
        self.step, self.checkpoint = step, checkpoint


class CrossLayerTrainer(Trainer):
    """Trains any causal language model on packed sequences.

    `window_losses` has the mean loss of every validation window (N,) of the newest evaluation, by the names that the
    log has for them ("eval_loss", "eval_web_loss"); `interruption` says whether Ctrl-C was pressed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | Mapping[str, Dataset],
        tokenizer: PreTrainedTokenizerBase | None = None,
        meter: Meter = Silent,
        depth_norms: bool = False,
        looked_at: Tensor | None = None,
        optimizer: OptimizerPart | None = None,
    ):
        """Prepare a run of a model with its first values; `args` are as `training_arguments` makes them.

        Items of data are `input_ids`, `position_ids` and `labels` (T,): to train on, as many as all steps read, in that
        order; to judge by, also domain by domain. With `depth_norms` each layer's gradient norm before clipping is
        logged, as `grad_norm_layer_0` and so on; over `looked_at`, token ids (N, T), each evaluation measures sinks and
        norms of every layer.
        """
        needed = args.max_steps * step_sequences(args)
        items = len(train_dataset)  # type: ignore[arg-type]
        if items < needed:
            raise ValueError(f"the training data have {items:,} items, and {args.max_steps:,} steps read {needed:,}")
        self.window_losses: dict[str, np.ndarray] = {}
        self.interruption, self._log = Interruption(), Log(meter)
        self._resumed: Resumed | None = None
        self._staging, self._micro_batch = False, 0
        self._clock: tuple[float, int] | None = None  # when the newest training loss was logged, and the tokens by then
        self._looked_at, self._optimizer, self._wants_norms, self._norms = looked_at, optimizer, depth_norms, {}
        use_cache = model.config.use_cache
        super().__init__(
            model,
            args,
            default_data_collator,
            train_dataset,
            eval_dataset if not isinstance(eval_dataset, Mapping) else dict(eval_dataset),
            tokenizer,
            compute_metrics=_over_tokens,
            callbacks=[self._log, self.interruption],
        )
        model.config.use_cache = use_cache  # the inputs turn the cache off, so the model needs no such setting
        if args.fsdp and not self.is_fsdp_enabled:
            raise ValueError("train.fsdp has no effect on this machine, whose ranks have no accelerators; leave it out")
        if args.fsdp and looked_at is not None:
            raise ValueError("eval.snapshots needs the whole model in each process; leave it out, or train.fsdp")
        self.remove_callback(PrinterCallback)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the last step; if asked, from the last good checkpoint of the run's folder on, if there is one.

        At Ctrl-C (KeyboardInterrupt) a single process has finished the step under way and saved it.
        """
        assert trial is None and ignore_keys_for_eval is None and not isinstance(resume_from_checkpoint, str)
        checkpoint = last_good(self._folder) if resume_from_checkpoint else None
        self._resumed = None if checkpoint is None else Resumed.read(checkpoint, self.args)
        set_seed(self.args.seed)
        self._micro_batch, self._clock = 0, None
        try:
            with self.interruption.handled(self.args):
                return super().train(None if checkpoint is None else str(checkpoint))
        except ImportError as error:
            raise ValueError(f"train: {' '.join(str(error).split())}") from error
        except Exception as error:  # a broken checkpoint makes many kinds, up to the first step of the optimizer
            ours = isinstance(error, TrainingStopped | MemoryError | torch.OutOfMemoryError)
            if ours or self._resumed is None or self.state.global_step > self._resumed.step:
                raise
            raise self._resumed.explain(error) from error
        finally:
            self._log.close()

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return what weight decay acts on: maps and embeddings.

        Not: norms, biases and other vectors, and the parameters that a method's mixing modules hold themselves
        (queries over depth, gains, mixing weights). A map within such a module is a map.
        """
        decayed = set(super().get_decay_parameter_names(model)) - mixing_parameters(model)
        return [name for name, parameter in model.named_parameters() if name in decayed and parameter.ndim > 1]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return Trainer's optimizer, or what the recipe says of it; errors as `optimizer_of`."""
        chosen = self._optimizer
        if self.optimizer is None and chosen is not None and (chosen.name or chosen.rates):
            whole: Any = self.accelerator.unwrap_model(self.model if model is None else model)
            decayed = set(self.get_decay_parameter_names(whole))
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
            self.optimizer = optimizer_of(whole, chosen, self.args, decayed, kind, options)
        return super().create_optimizer(model)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss; without a cache, since positions that restart separate documents only then."""
        skipping = without_logits(self.model.config, self.args, inputs["input_ids"].numel())  # type: ignore[union-attr]
        given = {**inputs, **skipping, "use_cache": False}
        return super().compute_loss(model, given, return_outputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs on their device, with the borders of documents where attention must be told them."""
        prepared = super()._prepare_inputs(inputs)
        return {**prepared, **document_borders(self.model, prepared["position_ids"])}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of a batch and count its tokens."""
        if self._clock is None:
            self._clock = time.perf_counter(), self.state.num_input_tokens_seen
            if self._resumed is not None:  # the next loss that is logged is the mean since the entry before
                self._tr_loss += self._resumed.kept.loss
                self._globalstep_last_logged = self._resumed.kept.logged
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._check_finite("loss", loss.item(), self._micro_batch, self._micro_batch)
        self.state.num_input_tokens_seen += inputs["input_ids"].numel() * self.args.world_size
        self._micro_batch = 0 if self.accelerator.sync_gradients else self._micro_batch + 1
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the whole gradient; before a step that is logged, measure each layer's too."""
        norm = as_number(super()._get_grad_norm(model, grad_norm))
        if not self.args.fp16:  # which leaves such a step out, and lowers its scale
            self._check_finite("gradient's norm", norm, 0, self.args.gradient_accumulation_steps - 1)
        if self._wants_norms and (self.state.global_step + 1) % self.state.logging_steps == 0:
            limit = self.args.max_grad_norm
            clipped = max(1.0, (norm + 1e-6) / limit) if limit > 0 else 1.0  # by what it has been divided
            norms = layer_norms(self.accelerator.unwrap_model(model))
            self._norms = {f"grad_norm_layer_{layer}": clipped * value for layer, value in norms.items()}
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with training losses the tokens so far and the tokens a second since the last time."""
        if "loss" in logs:
            assert self._clock is not None
            now, tokens = time.perf_counter(), self.state.num_input_tokens_seen
            logs["tokens"] = tokens
            logs["tokens_per_second"] = (tokens - self._clock[1]) / (now - self._clock[0])
            self._clock = now, tokens
            logs |= self._norms
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as Trainer does, and look at the layers; the time does not count among the training's."""
        with self._untimed():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            if eval_dataset is None and self._looked_at is not None:  # Trainer comes back for each domain
                self.log(snapshot(self.accelerator.unwrap_model(self.model), self._looked_at))
        return metrics

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Do not count the time of the block among the training's."""
        started, clock = time.perf_counter(), self._clock
        yield
        if clock is not None:
            self._clock = clock[0] + time.perf_counter() - started, clock[1]

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate on a data set, and keep the loss of every window."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        sums, counts = np.asarray(output.predictions), np.asarray(output.label_ids)  # (N,) each
        self.window_losses[f"{metric_key_prefix}_loss"] = sums / counts
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the batch's loss, and of each window (B,) the sum of its losses and how many tokens it predicts."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        counts = labels[:, 1:].ne(-100).sum(dim=1)
        skipping = without_logits(self.model.config, self.args, labels.numel())  # type: ignore[union-attr]
        with torch.no_grad(), self.compute_loss_context_manager():
            if skipping and len(labels) == 1:
                text_alone = {"output_router_logits": False, "num_items_in_batch": 1}  # the sum, without routers' loss
                sums = model(**inputs, **skipping, **text_alone, use_cache=False).loss[None]
            else:
                rest = {name: value for name, value in inputs.items() if name != "labels"}
                logits = model(**rest, use_cache=False).logits  # (B, T, V)
                wide = torch.promote_types(logits.dtype, torch.float32)
                rows = [
                    functional.cross_entropy(row[:-1].to(wide), own[1:], reduction="sum")
                    for row, own in zip(logits, labels, strict=True)
                ]
                sums = torch.stack(rows)
        return sums.sum() / counts.sum(), sums, counts

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint beside its place, and put it there when it is whole."""
        with self._untimed():
            try:
                if self.args.should_save:
                    stage(self._folder)
                self.accelerator.wait_for_everyone()
                self._staging = True
                loss = self.accelerator.reduce(self._tr_loss, "mean").item()  # type: ignore[union-attr]
                kept = Kept(
                    sequences=step_sequences(self.args), loss=loss, logged=self._globalstep_last_logged, order=ORDER
                )
                self.state.stateful_callbacks[KEPT] = kept.model_dump()  # type: ignore[call-overload, index]
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    publish(self._folder, self.state.global_step, self.args.save_total_limit)
                self.accelerator.wait_for_everyone()
            except (OSError, SafetensorError, RuntimeError) as error:
                shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
                step, fault = self.state.global_step, disk_error(error) or error
                what = f"the checkpoint of step {step} could not be written into {str(self._folder)!r}: {fault}"
                raise TrainingStopped(what, step, last_good(self._folder)) from error
            finally:
                self._staging = False

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse weights where Trainer would warn and train on with the first ones."""
        assert self._resumed is not None and self.model is not None
        self._resumed.check_weights(self.model, load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both, and refuse states of another shape, and a schedule of another step."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._resumed is not None:
            self._resumed.check_optimizer(self.optimizer.state)  # type: ignore[union-attr]
            self._resumed.check_schedule(self.lr_scheduler.last_epoch, exact=not self.args.fp16)  # type: ignore[union-attr]

    def _get_output_dir(self, trial: Any) -> str:
        """Return where Trainer writes checkpoints: into the staging folder, while it saves."""
        return str(self._folder / PARTIAL if self._staging else self._folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as transformers loads it, on every kind of machine; all ranks call it.

        Trainer leaves a model out whose shards its checkpoints hold; here only checkpoints do.
        """
        if self.is_fsdp_enabled and not _internal_call:
            self._save(output_dir, self.accelerator.get_state_dict(self.model))
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save model and tokenizer, without the arguments, which would be a pickle."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self._folder)
            (folder / PICKLED).unlink(missing_ok=True)
            set_modes(folder)

    @property
    def _folder(self) -> Path:
        assert self.args.output_dir is not None
        return Path(self.args.output_dir)

    def _check_finite(self, what: str, value: float, first: int, last: int) -> None:
        """Stop where a value is not finite that comes of the step's micro-batches `first` to `last`."""
        if math.isfinite(value):
            return
        step, size = self.state.global_step, self.args.train_batch_size
        batches = [step * self.args.gradient_accumulation_steps + number for number in (first, last)]
        items = [(batch * self.args.world_size + self.args.process_index) * size for batch in batches]
        raise TrainingStopped(
            f"the {what} is {value} at step {step + 1}, in items {items[0]} to {items[1] + size - 1} of the training "
            "data; a lower learning_rate or max_grad_norm may help",
            step + 1,
            last_good(self._folder),
        )


def _over_tokens(windows: EvalPrediction) -> dict[str, float]:
    return {"loss": float(np.sum(windows.predictions, dtype=np.float64) / np.sum(windows.label_ids))}
