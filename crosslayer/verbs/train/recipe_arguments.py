"""The keys of `train`: those of transformers' `TrainingArguments`, but for what a run sets by itself."""

import dataclasses
import enum
import functools
import operator
import reprlib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import TypeAdapter, ValidationError

from crosslayer.core.transformers_versions import OLD_ARGUMENTS
from crosslayer.verbs.train.recipe_file import Keys, nearest

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
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "keys and values"}


class Misplaced(ValueError):
    """What is wrong below the value that is being checked: `keys` lead there, the message goes on from them."""

    def __init__(self, message: str, *keys: str | int):
        super().__init__(message)
        self.keys: Keys = keys


def read_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in their own types; refuse keys that are none, or that a run sets, and values of other types.

    Raises:
        Misplaced: a key or value is refused; the message says what would be right.

    """
    kinds, read = argument_kinds(), {}
    for key, value in arguments.items():
        if key in OWNED:
            raise Misplaced(f"is not set here: {OWNED[key]}", key)
        if key not in kinds:
            raise Misplaced(f"is not known; {nearest(key, [k for k in kinds if k not in OWNED])}", key)
        read[key] = read_value(value, kinds[key], key)
        if key in LEAST and read[key] is not None and read[key] < LEAST[key]:
            raise Misplaced(f"is {value}; it must be at least {LEAST[key]}", key)
    checkpointing = read.get("activation_checkpointing_kwargs")
    if isinstance(checkpointing, str) or isinstance(checkpointing, dict) and checkpointing.get("use_reentrant"):
        raise Misplaced(
            "must be keys and values without use_reentrant: true, which loses gradients of what layers lend",
            "activation_checkpointing_kwargs",
        )
    return read


@functools.cache
def argument_kinds() -> dict[str, Any]:
    """Return the fields of `TrainingArguments`, by their names in all versions, and their types."""
    from transformers import TrainingArguments

    hints, names = get_type_hints(TrainingArguments), {old: name for name, old in OLD_ARGUMENTS.items()}
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    return {names.get(name, name): hints[name] for name in fields}


def read_value(value: Any, kind: Any, *keys: str | int) -> Any:
    """Return a value in the very type, a whole number as a float; refuse others, and what is none of its choices.

    Raises:
        Misplaced: at `keys`.

    """
    choices = [choice.value for part in _parts(kind) if _is_choice(part) for choice in part]
    if choices and isinstance(value, str):
        if value not in choices:
            raise Misplaced(f"is {value!r}; {nearest(value, choices)}", *keys)
        return value
    plain = tuple(dict if is_typeddict(part) else part for part in _parts(kind))
    try:
        return TypeAdapter(functools.reduce(operator.or_, plain)).validate_python(value, strict=True)
    except ValidationError:
        words = " or ".join(dict.fromkeys(_words(part) for part in plain))
        raise Misplaced(f"is {reprlib.repr(value)}; it must be {words}", *keys) from None


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _words(kind: Any) -> str:
    if kind is NoneType:
        return "null"
    if _is_choice(kind):
        return "text"
    if get_origin(kind) is list:
        return f"a list of {_words(get_args(kind)[0])}"
    return WORDS.get(get_origin(kind) or kind, str(kind))
