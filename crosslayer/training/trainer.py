"""The trainer: transformers' own, changed so that runs are comparable and can be resumed exactly.

Differences from `Trainer`: no weight decay on norms, vectors and the mixing weights of methods; staged checkpoints; a
loss that is not finite ends the run; the validation loss is the mean over tokens, exact for any batch size and number
of ranks; tokens per second are measured; everything is logged in `log.jsonl`; the model's `use_cache` does not change.

Shapes: B batch, T tokens, V vocabulary, N validation windows.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from crosslayer._start import EndedTooSoon
from crosslayer.core.method import HeadMixer, Residual, StateReader
from crosslayer.output.folder import disk_error, set_modes
from crosslayer.training.arguments import step_sequences
from crosslayer.training.attention import FLASH
from crosslayer.training.callbacks import Interruption, Log
from crosslayer.training.checkpoints import ENTRY, PARTIAL, Resumed, RunEntry, last_good, publish, refused, stage
from crosslayer.training.costs import without_logits
from crosslayer.training.distillation import Teacher
from crosslayer.training.rows import IGNORED, ORDER

# states of torch's optimizers that have the shape of their parameter
SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")
# characters of another library's message, which may have pages; a refusal is one line
LONGEST = 160


class TrainingStopped(EndedTooSoon):
    """A run ended before its last step, for a reason that could not be checked beforehand.

    `step` was not completed, or its checkpoint could not be written; `checkpoint` is the last good one, if any.
    """

    def __init__(self, message: str, step: int, checkpoint: Path | None):
        last = "there is no checkpoint yet" if checkpoint is None else f"the last good checkpoint is {checkpoint.name}"
        super().__init__(f"{message}; {last}")
        self.step, self.checkpoint = step, checkpoint


class CrossLayerTrainer(Trainer):
    """Trains any causal language model on packed sequences.

    `window_losses` holds the mean loss of every validation window (N,) of the last evaluation, by name in the log
    ("eval_loss", "eval_web_loss"); `interruption` tells whether Ctrl-C was pressed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | Mapping[str, Dataset],
        tokenizer: PreTrainedTokenizerBase | None = None,
        teacher: Teacher | None = None,
        probe: Callable[[PreTrainedModel], dict[str, float]] | None = None,
    ):
        """Prepare a run of an initialized model; `args` are from `training_arguments`.

        Rows of data are `input_ids`, `position_ids` and `labels` (T,): for training as many as all steps read, in that
        order; for evaluation also a mapping by domain, whose loss is that of the labels, also with a `teacher`. Each
        evaluation also logs what `probe` measures of the model.
        """
        # Trainer would start again at the first row
        needed = args.max_steps * step_sequences(args)
        items = len(train_dataset)  # type: ignore[arg-type]
        if items < needed:
            raise ValueError(f"training data must have {needed:,} rows for {args.max_steps:,} steps, got {items:,}")
        self.window_losses: dict[str, np.ndarray] = {}
        self.interruption = Interruption()
        self._log = Log()
        self._resumed: Resumed | None = None
        self._staging = False
        self._micro_batch = 0  # index within the current step
        self._clock: tuple[float, int] | None = None  # time and tokens of the last logged training loss
        self.teacher = teacher
        self._probe = probe
        assert args.output_dir is not None
        self._folder = Path(args.output_dir)
        use_cache = model.config.use_cache
        super().__init__(
            model,
            args,
            default_data_collator,
            train_dataset,
            eval_dataset if not isinstance(eval_dataset, Mapping) else dict(eval_dataset),
            tokenizer,
            compute_metrics=mean_loss,
            callbacks=[self._log, self.interruption],
        )
        # Trainer sets it to False, which a saved model would keep; here the inputs turn the cache off
        model.config.use_cache = use_cache
        # accelerate would train with DDP instead, without a word
        if args.fsdp and not self.is_fsdp_enabled:
            raise ValueError("train.fsdp: has no effect without a GPU; remove it")
        if args.fsdp and probe is not None:
            raise ValueError(
                "eval.snapshots: needs the whole model in each process, but train.fsdp shards it; remove one of the two"
            )
        self.remove_callback(PrinterCallback)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the last step, with `resume_from_checkpoint` from the last good checkpoint if there is one.

        At Ctrl-C a single process finishes and saves the current step before it raises KeyboardInterrupt.
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
        # a broken checkpoint can raise any type, until the first optimizer step; what fails later is another matter
        except Exception as error:
            ours = isinstance(error, TrainingStopped | MemoryError | torch.OutOfMemoryError)
            if ours or self._resumed is None or self.state.global_step > self._resumed.step:
                raise
            name = self._resumed.checkpoint.name
            if isinstance(error, ValueError) and str(error).startswith(name):
                raise
            message = " ".join(str(error).split())[:LONGEST]
            raise refused(self._resumed.checkpoint, f"{type(error).__name__}: {message}") from error
        finally:
            self._log.close()

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the parameters with weight decay: matrices of linear layers and embeddings.

        Norms, biases, other vectors, and the parameters that belong directly to a method's mixing modules (queries over
        depth, gains, mixing weights) have none. A linear layer inside such a module does.
        """
        mixing = {
            f"{path}.{name}"
            for path, module in model.named_modules()
            if isinstance(module, HeadMixer | Residual | StateReader)
            for name, _ in module.named_parameters(recurse=False)
        }
        decayed = set(super().get_decay_parameter_names(model)) - mixing
        return [name for name, parameter in model.named_parameters() if name in decayed and parameter.ndim > 1]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss; without a cache, since restarting positions separate documents only then.

        A teacher's is the mean over tokens with labels; accumulated batches are weighted by their tokens.
        """
        if self.teacher is not None:
            student = self.accelerator.unwrap_model(model)
            loss, count = self.teacher.loss(student, inputs, self.accelerator.autocast())
            return loss if num_items_in_batch is None else loss * (count / num_items_in_batch)
        skipping = without_logits(self.model.config, self.args, inputs["input_ids"].numel())  # type: ignore[union-attr]
        inputs = {**inputs, **skipping, "use_cache": False}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs on their device, with the boundaries of documents for FlashAttention."""
        prepared = super()._prepare_inputs(inputs)
        model: Any = self.model
        if model.config.get_text_config()._attn_implementation != FLASH:
            return prepared
        # transformers derives them from positions only for batches of a single row
        (queries, keys), (longest_query, longest_key) = prepare_fa_kwargs_from_position_ids(prepared["position_ids"])
        longest = {"max_length_q": int(longest_query), "max_length_k": int(longest_key)}
        return {**prepared, "cu_seq_lens_q": queries, "cu_seq_lens_k": keys, **longest}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of a batch and count its tokens."""
        if self._clock is None:
            self._clock = time.perf_counter(), self.state.num_input_tokens_seen
            # Trainer begins the sum at 0, but the next logged loss is the mean since the previous entry
            if self._resumed is not None:
                self._tr_loss += self._resumed.entry.loss
                self._globalstep_last_logged = self._resumed.entry.logged
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._check_finite("loss", loss.item(), self._micro_batch, self._micro_batch)
        self.state.num_input_tokens_seen += inputs["input_ids"].numel() * self.args.world_size
        self._micro_batch = 0 if self.accelerator.sync_gradients else self._micro_batch + 1
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the whole gradient."""
        norm: Any = super()._get_grad_norm(model, grad_norm)
        # of a sharded gradient each rank knows its part alone
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        # float16 overflows now and then: its scaler skips such a step and lowers the scale
        if not self.args.fp16:
            self._check_finite("gradient's norm", norm, 0, self.args.gradient_accumulation_steps - 1)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; training losses with the tokens so far and the tokens per second since the last time."""
        if "loss" in logs:
            assert self._clock is not None
            now = time.perf_counter()
            tokens = self.state.num_input_tokens_seen
            logs["tokens"] = tokens
            logs["tokens_per_second"] = (tokens - self._clock[1]) / (now - self._clock[0])
            self._clock = now, tokens
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as Trainer does, and probe the model; this does not count as training time."""
        with self._untimed():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            # with a dataset, this is a call by Trainer for a single domain
            if eval_dataset is None and self._probe is not None:
                self.log(self._probe(self.accelerator.unwrap_model(self.model)))  # type: ignore[bad-argument-type]
        return metrics

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Do not count the time of the block as training time."""
        started = time.perf_counter()
        clock = self._clock
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
        """Evaluate on a dataset, and store the loss of every window."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        # Trainer gathers what `prediction_step` returns as predictions and labels
        sums, counts = np.asarray(output.predictions), np.asarray(output.label_ids)  # (N,) each
        self.window_losses[f"{metric_key_prefix}_loss"] = sums / counts
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the batch's loss, and for each window (B,) the sum of its losses and its predicted tokens.

        Sums and counts, since a mean of means would depend on the batch size and on the number of ranks.
        """
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        counts = labels[:, 1:].ne(IGNORED).sum(dim=1)
        skipping = without_logits(self.model.config, self.args, labels.numel())  # type: ignore[union-attr]
        with torch.no_grad(), self.compute_loss_context_manager():
            if skipping and len(labels) == 1:
                # the sum over tokens (divided by 1), without the loss of routers
                text_alone = {"output_router_logits": False, "num_items_in_batch": 1}
                sums = model(**inputs, **skipping, **text_alone, use_cache=False).loss[None]
            else:
                rest = {name: value for name, value in inputs.items() if name != "labels"}
                logits = model(**rest, use_cache=False).logits  # (B, T, V)
                wide = torch.promote_types(logits.dtype, torch.float32)
                # row by row: float32 logits of the whole batch are never in memory at once
                losses = [
                    functional.cross_entropy(logits_of_row[:-1].to(wide), labels_of_row[1:], reduction="sum")
                    for logits_of_row, labels_of_row in zip(logits, labels, strict=True)
                ]
                sums = torch.stack(losses)
        return sums.sum() / counts.sum(), sums, counts

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint in the staging folder, and move it to its final name when it is complete."""
        with self._untimed():
            try:
                # other ranks must not write their part before the folder is there and empty
                if self.args.should_save:
                    stage(self._folder)
                self.accelerator.wait_for_everyone()
                self._staging = True

                # Trainer's state lacks these: without them the first loss after a resumption would be another
                loss = self.accelerator.reduce(self._tr_loss, "mean").item()  # type: ignore[union-attr]
                entry = RunEntry(
                    sequences=step_sequences(self.args), loss=loss, logged=self._globalstep_last_logged, order=ORDER
                )
                self.state.stateful_callbacks[ENTRY] = entry.model_dump()  # type: ignore[call-overload, index]
                super()._save_checkpoint(model, trial)

                # complete only when every rank has written its part
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    publish(self._folder, self.state.global_step, self.args.save_total_limit)
                self.accelerator.wait_for_everyone()
            except (OSError, SafetensorError, RuntimeError) as error:
                shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
                step = self.state.global_step
                # safetensors and torch wrap the error of a full disk in their own
                problem = disk_error(error) or error
                message = f"the checkpoint of step {step} could not be written into {str(self._folder)!r}: {problem}"
                raise TrainingStopped(message, step, last_good(self._folder)) from error
            finally:
                self._staging = False

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse missing weights and unknown ones, where Trainer would warn and train on with the initial ones."""
        assert self._resumed is not None and self.model is not None
        # tied weights are saved under one of their names
        named = dict(self.model.named_parameters(remove_duplicate=False))
        present = {id(parameter) for name, parameter in named.items() if name not in load_result.missing_keys}
        lacking = [name for name in load_result.missing_keys if name in named and id(named[name]) not in present]
        for name in (*lacking, *load_result.unexpected_keys):
            problem = f"its weights {'lack' if name in lacking else 'have unknown'} {name}"
            raise refused(self._resumed.checkpoint, problem)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both, and refuse states of another shape and a schedule of another step."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._resumed is None:
            return
        for parameter, state in self.optimizer.state.items():  # type: ignore[union-attr]
            for name, value in state.items():
                shape = value.shape if isinstance(value, Tensor) else ()
                # fused kernels would access memory out of bounds
                if name in SHAPED and shape != parameter.shape or name == "step" and math.prod(shape) != 1:
                    raise refused(self._resumed.checkpoint, f"its optimizer has {name} of shape {list(shape)}")
        # with float16 the scaler may have skipped steps, in which the rate does not move
        step = self.lr_scheduler.last_epoch  # type: ignore[union-attr]
        if step > self._resumed.step or not self.args.fp16 and step < self._resumed.step:
            raise refused(self._resumed.checkpoint, f"its learning rate is of step {step}")

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder that Trainer writes checkpoints into: while saving, the staging folder."""
        return str(self._folder / PARTIAL if self._staging else self._folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in the format that transformers loads, sharded or not; all ranks call it.

        Trainer does not save a sharded model if its checkpoints hold the shards; here only checkpoints are sharded.
        """
        if self.is_fsdp_enabled and not _internal_call:
            self._save(output_dir, self.accelerator.get_state_dict(self.model))
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save model and tokenizer, without the training arguments, which are a pickle."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self._folder)
            # whoever loads a pickle runs its code, and a folder may be passed on
            (folder / "training_args.bin").unlink(missing_ok=True)
            set_modes(folder)

    def _check_finite(self, name: str, value: float, first: int, last: int) -> None:
        """Stop if a value from the step's micro-batches `first` to `last` is not finite."""
        if math.isfinite(value):
            return
        step = self.state.global_step
        size = self.args.train_batch_size
        # ranks read batches in turn
        batches = [step * self.args.gradient_accumulation_steps + micro_batch for micro_batch in (first, last)]
        starts = [(batch * self.args.world_size + self.args.process_index) * size for batch in batches]
        raise TrainingStopped(
            f"the {name} is {value} at step {step + 1}, in rows {starts[0]} to {starts[1] + size - 1} of the training "
            "data; try a lower learning_rate or max_grad_norm",
            step + 1,
            last_good(self._folder),
        )


def mean_loss(windows: EvalPrediction) -> dict[str, float]:
    """Return the mean loss over all predicted tokens, from sums and counts of windows (N,)."""
    return {"loss": float(np.sum(windows.predictions, dtype=np.float64) / np.sum(windows.label_ids))}
