"""The cross-layer decoder; its config and its models register themselves with transformers' Auto classes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosslayer.core.decoder.configuration import CrossLayerConfig
    from crosslayer.core.decoder.modeling import (
        CrossLayerForCausalLM,
        CrossLayerForSequenceClassification,
        CrossLayerModel,
    )

__all__ = ["CrossLayerConfig", "CrossLayerForCausalLM", "CrossLayerForSequenceClassification", "CrossLayerModel"]


def __getattr__(name: str) -> Any:
    """Load a class when it is first used: a part of the package, such as the families, needs no model."""
    if name not in __all__:
        raise AttributeError(f"module 'crosslayer.core.decoder' has no attribute {name!r}")
    from importlib import import_module

    part = "configuration" if name == "CrossLayerConfig" else "modeling"
    return getattr(import_module(f"crosslayer.core.decoder.{part}"), name)
