"""The keys of `train`: those of transformers' `TrainingArguments`, but for what a run sets by itself."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, GetPydanticSchema, with_config
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
from typing_extensions import TypedDict  # that of Python 3.11 is not known to pydantic

from crosslayer.core.transformers_versions import OLD_ARGUMENTS
from crosslayer.verbs.train.recipe_file import WrongKey, nearest

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


def one_of(names: Collection[str]) -> AfterValidator:
    """Refuse other text than these names; say which is nearest."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"{name!r} is not known; {nearest(name, list(names))}")
        return name

    return AfterValidator(check)


def only_keys(known: Collection[str], elsewhere: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return what refuses other keys of a mapping; of those that are set elsewhere it says why."""

    def check(values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key in elsewhere:
                raise WrongKey(key, f"{key} is not set here: {elsewhere[key]}")
            if key not in known:
                name = key if key.isprintable() else ascii(key)
                raise WrongKey(key, f"{name} is not known; {nearest(key, list(known))}")
        return values

    return check


def typed_keys(kinds: Mapping[str, Any]) -> GetPydanticSchema:
    """Have a mapping checked as one of these keys with values of these types, all of which may be missing."""
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    kind = with_config(config)(TypedDict("Keys", kinds, total=False))  # type: ignore[operator, misc]
    return GetPydanticSchema(lambda source, handler: handler(kind))


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
