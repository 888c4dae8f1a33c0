"""Activation checkpointing in the supported versions of transformers, which renamed it in 5.23."""

from typing import Any

from transformers import PreTrainedModel

CHECKPOINTING_IS_RENAMED = hasattr(PreTrainedModel, "activation_checkpointing_enable")
"""Whether models and `TrainingArguments` use the name `activation_checkpointing` (5.23)."""

_OLD_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
OLD_ARGUMENTS = {} if CHECKPOINTING_IS_RENAMED else _OLD_NAMES
"""Fields of `TrainingArguments` whose name differs from 5.23: its name in 5.23 → its name in this version."""


class _OldPreTrainedModel(PreTrainedModel):
    """The base class of models before 5.23, with 5.23's names for checkpointing."""

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        options = {"every_n_layers": every_n_layers, "offload": offload}
        super().gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    # Trainer before 5.23 calls the old name: it must reach the check of reentrant checkpointing, which has the new one
    def gradient_checkpointing_enable(  # type: ignore[override]
        self, gradient_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Turn on checkpointing by its old name, which calls the method of the new name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, every_n_layers, offload)

    def activation_checkpointing_disable(self) -> None:
        self.gradient_checkpointing_disable()


NewPreTrainedModel: type[PreTrainedModel] = PreTrainedModel if CHECKPOINTING_IS_RENAMED else _OldPreTrainedModel
"""The base class of models, with methods named `activation_checkpointing_…` (5.23)."""


def enable_checkpointing(model: PreTrainedModel, options: dict[str, Any] | None = None) -> None:
    """Turn on activation checkpointing of any model; see `CHECKPOINTING_IS_RENAMED`."""
    enable = model.activation_checkpointing_enable if CHECKPOINTING_IS_RENAMED else model.gradient_checkpointing_enable
    enable(options)


def disable_checkpointing(model: PreTrainedModel) -> None:
    """Turn off activation checkpointing of any model; see `CHECKPOINTING_IS_RENAMED`."""
    if CHECKPOINTING_IS_RENAMED:
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Return whether activation checkpointing is on; see `CHECKPOINTING_IS_RENAMED`."""
    return model.is_activation_checkpointing if CHECKPOINTING_IS_RENAMED else model.is_gradient_checkpointing
