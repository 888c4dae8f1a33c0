"""The arguments of transformers' Trainer: some a recipe can set, others are fixed so that runs are comparable."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
from pydantic import AfterValidator, BeforeValidator, Field
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import OptimizerNames

from crosslayer.core.checkpointing import OLD_ARGUMENTS
from crosslayer.extras import check_extra
from crosslayer.training.recipe_file import WrongKey, nearest, one_of, only_keys, typed_keys

DEFAULTS: dict[str, Any] = {  # a recipe's `train` can override them
    "logging_steps": 10,
    "save_steps": 500,
    # if the newest one is damaged, the one before is used
    "save_total_limit": 2,
    "report_to": "none",
    # there are none: a layer that reads another's state has no parameters for it, so that no step has to search
    "ddp_find_unused_parameters": False,
}
BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}  # Trainer's own defaults
MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}  # integrations whose package has another name
# maximum number of data loading processes per core: a typo must not start a million
WORKERS = 16
SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}  # ranks write checkpoints in parallel
# Why a recipe cannot set keys, or what to set instead → the keys. Runs are compared step by step, so what decides their
# rows, steps, losses and checkpoints is either fixed, or set by one key of the recipe that is checked and recorded.
REASONS = {
    "use `--out`": "output_dir",
    "set seed at the top level of the recipe": "seed data_seed",
    # an epoch has no meaning for a mixture that repeats its domains unequally
    "set schedule.steps or schedule.tokens": "max_steps num_train_epochs",
    "set schedule.warmup": "warmup_steps warmup_ratio",
    "set schedule.kind and schedule.minimum": "lr_scheduler_type lr_scheduler_kwargs",
    # some of these would withhold the sums from which `mean_loss` is made, some write another model than the last
    "set eval.every and eval.windows": (
        "eval_strategy eval_steps eval_delay eval_on_start do_train do_eval do_predict prediction_loss_only"
        " eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics"
        " load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    # with some of these a resumed run would begin at the first row again, or rows would come out of order
    "data and seed determine the rows and their order": (
        "train_sampling_strategy remove_unused_columns label_names length_column_name ignore_data_skip"
        " dataloader_drop_last dataloader_in_order"
    ),
    # a model without optimizer and random states cannot be resumed bit for bit
    "checkpoints are complete; set save_steps and save_total_limit": (
        "save_strategy save_only_model save_on_each_node resume_from_checkpoint enable_jit_checkpoint"
        " restore_callback_states_from_checkpoint"
    ),
    "the batch size, and with it the data, would change during the run": "auto_find_batch_size",
    "it would hide a loss that is not finite, which ends the run": "logging_nan_inf_filter",
    "set logging_steps": "logging_strategy",
    "training uses no cache": "use_cache",
    "the command shows its own progress": "disable_tqdm",
    "upload the finished model with `hf upload`": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "set activation_checkpointing": "gradient_checkpointing",
    "set activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    # it shifts them only for classes of transformers' own list of causal models
    "Trainer would smooth labels without shifting them": "label_smoothing_factor",
    "`torchrun` or `accelerate launch` sets it": "local_rank parallelism_config",
}
OWNED = {key: reason for reason, keys in REASONS.items() for key in keys.split()}
LEAST = {  # minimum values, which `TrainingArguments` does not check
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
    "neftune_noise_alpha": 0,
}


def step_sequences(args: TrainingArguments) -> int:
    """Return the number of sequences per step, over all processes and accumulated batches."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def training_arguments(
    folder: Path, seed: int, schedule: Mapping[str, Any], train: Mapping[str, Any] | None = None
) -> TrainingArguments:
    """Return Trainer's arguments for a run that logs and saves checkpoints into `folder`.

    `schedule` holds steps and learning rate from `SchedulePart.schedule_arguments`, `train` any other field of
    `TrainingArguments`. The seed is for dropout; weights and data order have been drawn before.
    """
    fixed: dict[str, Any] = {
        "output_dir": str(folder),
        "seed": seed,
        "data_seed": seed,
        **schedule,
        "eval_strategy": "steps",
        "train_sampling_strategy": "sequential",  # the data set determines the order
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,  # a loss that is not finite ends the run
        "disable_tqdm": True,  # the command shows its own progress
    }
    accelerated = torch.accelerator.is_available()
    defaults: dict[str, Any] = DEFAULTS | {"dataloader_pin_memory": accelerated, "use_cpu": not accelerated}
    chosen = defaults | dict(train or {})
    # on CPUs bfloat16 is slower than float32 (1.6 to 1.9 times where it was measured); GPUs may only emulate it
    excluded = chosen["use_cpu"] or chosen.get("fp16", False) or not torch.cuda.is_available()
    chosen.setdefault("bf16", not excluded and torch.cuda.is_bf16_supported(including_emulation=False))
    # text names a file, which is used as it is
    if chosen.get("fsdp") and isinstance(chosen.get("fsdp_config", {}), dict):
        chosen["fsdp_config"] = {**SHARDED, **chosen.get("fsdp_config", {})}
    _check_choices(chosen)

    try:
        named = {OLD_ARGUMENTS.get(name, name): value for name, value in chosen.items()}
        arguments = TrainingArguments(**fixed, **named)
        # Trainer reads the level only after the text has been read; an unknown one fails here
        arguments.get_process_log_level()
    except (ImportError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"train: Trainer does not accept these arguments: {type(error).__name__}: {error}") from error
    workers = arguments.dataloader_num_workers
    cores = os.cpu_count() or 1
    if workers > WORKERS * cores:
        most = f"at most {WORKERS * cores} on this machine with {cores} cores"
        raise ValueError(f"train.dataloader_num_workers: must be {most}, got {workers:,}")
    # Trainer would use DataParallel, which reads more rows per step than the run has
    if arguments.n_gpu > 1:
        raise ValueError(
            f"a process must see one GPU, got {arguments.n_gpu}; start one process per GPU with torchrun "
            "--nproc-per-node, or set CUDA_VISIBLE_DEVICES"
        )
    return arguments


def _check_choices(chosen: Mapping[str, Any]) -> None:
    """Refuse to train without the packages that arguments need, and unknown names, before any data is read."""
    check_extra("train", "training", "accelerate")
    needed = {"deepspeed": "deepspeed"} if chosen.get("deepspeed") else {}
    if chosen.get("use_liger_kernel"):
        needed["use_liger_kernel"] = "liger_kernel"
    report_to = chosen["report_to"]
    for name in [report_to] if isinstance(report_to, str) else report_to or ():
        if name not in ("none", "all", *INTEGRATION_TO_CALLBACK):
            hint = nearest(name, ["none", "all", *INTEGRATION_TO_CALLBACK])
            raise ValueError(f"train.report_to: must be a known integration, got {name!r}; {hint}")
        if name not in ("none", "all", *get_available_reporting_integrations()):
            needed.setdefault("report_to", MODULES.get(name, name))
    for key, package in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"train.{key}: {chosen[key]!r} needs the package {package}, which is not installed")
    mode = chosen.get("torch_compile_mode")
    if mode is not None:
        from torch._inductor import list_mode_options  # takes a second to load

        if mode not in list_mode_options():
            hint = nearest(mode, list(list_mode_options()))
            raise ValueError(f"train.torch_compile_mode: must be a known mode, got {mode!r}; {hint}")


def _not_reentrant(options: dict[str, Any] | None) -> dict[str, Any] | None:
    # no error, and the same loss: in Gemma 3n, whose layers share keys and values, 29 to 51 gradients were wrong
    if options and options.get("use_reentrant"):
        raise WrongKey("use_reentrant", "must be false: otherwise gradients of states shared between layers are lost")
    return options


# the type of each key that a recipe can set, by its current name, whatever the version of transformers
_NEW_NAMES = {old: name for name, old in OLD_ARGUMENTS.items()}
_HINTS = get_type_hints(TrainingArguments)
_FIELDS: dict[str, Any] = {
    _NEW_NAMES.get(field.name, field.name): _HINTS[field.name] for field in dataclasses.fields(TrainingArguments)
}
TYPES: dict[str, Any] = {
    **_FIELDS,
    **{key: Annotated[_FIELDS[key], Field(ge=least)] for key, least in LEAST.items()},
    "optim": Annotated[str, AfterValidator(partial(one_of, names=[choice.value for choice in OptimizerNames]))],
    "activation_checkpointing_kwargs": Annotated[dict[str, Any] | None, AfterValidator(_not_reentrant)],
}
TYPES = {key: type_ for key, type_ in TYPES.items() if key not in OWNED}
Arguments = Annotated[
    dict[str, Any], typed_keys(TYPES), BeforeValidator(partial(only_keys, known=TYPES, elsewhere=OWNED))
]
"""Keys of `TrainingArguments` with values in their own types."""
