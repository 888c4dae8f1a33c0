"""The settings of transformers' Trainer: those that a recipe may choose, and those that make runs comparable."""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
from pydantic import AfterValidator, BeforeValidator, Field
from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.training_args import OptimizerNames

from crosslayer.core.transformers_versions import OLD_ARGUMENTS
from crosslayer.verbs.train.recipe_file import nearest, one_of, only_keys, typed_keys

DEFAULTS: dict[str, Any] = {  # a recipe's `train` may say otherwise
    "logging_steps": 10,
    "save_steps": 500,
    "save_total_limit": 2,  # a damaged newest one can fall back to the one before
    "report_to": "none",
    "ddp_find_unused_parameters": False,  # a decoder has none: what is borrowed does not exist
}
BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}  # Trainer's own defaults
MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}  # where a package has another name
WORKERS = 16  # processes that read data, for each core, at the most
SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}  # checkpoints by torch.distributed.checkpoint, in parallel
REASONS = {  # why a recipe does not set keys, and what to write instead → the keys
    "a run writes into the folder that it is given": "output_dir",
    "write `seed` at the top of the recipe": "seed data_seed",
    "write schedule.steps or schedule.tokens": "max_steps num_train_epochs",
    "write schedule.warmup": "warmup_steps warmup_ratio",
    "write schedule.kind and schedule.minimum": "lr_scheduler_type lr_scheduler_kwargs",
    "write eval.every and eval.windows": (
        "eval_strategy eval_steps eval_delay eval_on_start do_train do_eval do_predict prediction_loss_only"
        " eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics"
        " load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    "what is read, and in which order, follows from data and seed": (
        "train_sampling_strategy remove_unused_columns label_names length_column_name ignore_data_skip"
        " dataloader_drop_last dataloader_in_order"
    ),
    "checkpoints are whole and come every save_steps steps, of which save_total_limit stay": (
        "save_strategy save_only_model save_on_each_node resume_from_checkpoint enable_jit_checkpoint"
        " restore_callback_states_from_checkpoint"
    ),
    "the batch would change under way, and with it the data": "auto_find_batch_size",
    "a loss that is not finite ends the run; it would hide it": "logging_nan_inf_filter",
    "losses are logged every logging_steps steps": "logging_strategy",
    "training keeps no cache": "use_cache",
    "progress is shown as by every command": "disable_tqdm",
    "a finished model is pushed from its own folder": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "write activation_checkpointing": "gradient_checkpointing",
    "write activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "Trainer would smooth labels without shifting them": "label_smoothing_factor",
    "`torchrun` or `accelerate launch` sets it": "local_rank parallelism_config",
}
OWNED = {key: reason for reason, keys in REASONS.items() for key in keys.split()}
LEAST = {  # what no run can have less of
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
    "neftune_noise_alpha": 0,
}


def has_bfloat16() -> bool:
    """Return whether the GPU computes in bfloat16; CPUs are slower by it."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def step_sequences(args: TrainingArguments) -> int:
    """Return how many sequences a step reads, over all processes and the batches that it accumulates."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def batch_sequences(train: Mapping[str, Any]) -> int:
    """Return how many sequences a step reads in each process, by a recipe's `train`."""
    return math.prod(train.get(key, default) for key, default in BATCH.items())


def training_arguments(
    folder: Path, seed: int, course: Mapping[str, Any], train: Mapping[str, Any] | None = None
) -> TrainingArguments:
    """Return Trainer's arguments for a run, whose log and checkpoints go into `folder`.

    `course` has steps and learning rate, as `SchedulePart.course` returns them; `train` any other field of
    `TrainingArguments`. The seed is dropout's: weights and data have been drawn before.
    """
    own = {
        "output_dir": str(folder),
        "seed": seed,
        "data_seed": seed,
        **course,
        "eval_strategy": "steps",
        "train_sampling_strategy": "sequential",  # the data have an order of their own
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,  # such a loss ends the run
        "disable_tqdm": True,  # progress goes the way of all commands
    }
    accelerated = torch.accelerator.is_available()
    chosen = {**DEFAULTS, "dataloader_pin_memory": accelerated, "use_cpu": not accelerated, **(train or {})}
    chosen.setdefault("bf16", not chosen["use_cpu"] and not chosen.get("fp16", False) and has_bfloat16())
    if chosen.get("fsdp") and isinstance(chosen.get("fsdp_config", {}), dict):  # else a file, which says all
        chosen["fsdp_config"] = {**SHARDED, **chosen.get("fsdp_config", {})}
    _check_choices(chosen)
    try:
        arguments = TrainingArguments(**own, **{OLD_ARGUMENTS.get(name, name): value for name, value in chosen.items()})
        arguments.get_process_log_level()  # fails for a level that is not known
    except (ImportError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"train cannot be used as it is: {type(error).__name__}: {error}") from error
    workers, cores = arguments.dataloader_num_workers, os.cpu_count() or 1
    if workers > WORKERS * cores:  # each is a process
        raise ValueError(
            f"train.dataloader_num_workers is {workers:,}; with the {cores} cores of this machine use at most "
            f"{WORKERS * cores}"
        )
    if arguments.n_gpu > 1:  # DataParallel, where a batch is another one
        raise ValueError(
            f"a single process sees {arguments.n_gpu} GPUs; start as many by torchrun --nproc-per-node, or choose one "
            "by CUDA_VISIBLE_DEVICES"
        )
    return arguments


def _check_choices(chosen: Mapping[str, Any]) -> None:
    """Refuse what needs a package that is not installed, and names that nobody knows, before anything is read."""
    needed = {f"deepspeed is {chosen.get('deepspeed')!r}": "deepspeed"} if chosen.get("deepspeed") else {}
    if chosen.get("use_liger_kernel"):
        needed["use_liger_kernel is true"] = "liger_kernel"
    asked = chosen["report_to"]
    for name in [asked] if isinstance(asked, str) else asked or ():
        if name not in ("none", "all", *INTEGRATION_TO_CALLBACK):
            raise ValueError(f"train.report_to is {name!r}; {nearest(name, ['none', 'all', *INTEGRATION_TO_CALLBACK])}")
        if name not in ("none", "all", *get_available_reporting_integrations()):
            needed[f"report_to is {name!r}"] = MODULES.get(name, name)
    for what, package in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"train.{what}, and the package {package} is not installed; install it")
    mode = chosen.get("torch_compile_mode")
    if mode is not None:
        from torch._inductor import list_mode_options  # takes a second to load

        if mode not in list_mode_options():
            raise ValueError(f"train.torch_compile_mode is {mode!r}; {nearest(mode, list(list_mode_options()))}")


def _not_reentrant(options: dict[str, Any] | None) -> dict[str, Any] | None:
    if options and options.get("use_reentrant"):
        raise ValueError("use_reentrant must not be true, which loses gradients of what layers lend")
    return options


def _kinds() -> dict[str, Any]:
    """Return the keys, by their names in all versions of transformers, and their types."""
    hints, names = get_type_hints(TrainingArguments), {old: name for name, old in OLD_ARGUMENTS.items()}
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    kinds = {names.get(name, name): hints[name] for name in fields}
    kinds |= {key: Annotated[kinds[key], Field(ge=least)] for key, least in LEAST.items()}
    kinds["optim"] = Annotated[str, one_of([choice.value for choice in OptimizerNames])]
    kinds["activation_checkpointing_kwargs"] = Annotated[dict[str, Any] | None, AfterValidator(_not_reentrant)]
    return {key: kind for key, kind in kinds.items() if key not in OWNED}


KINDS = _kinds()
Arguments = Annotated[dict[str, Any], typed_keys(KINDS), BeforeValidator(only_keys(KINDS, OWNED))]
"""Keys of `TrainingArguments` with values in their own types."""
