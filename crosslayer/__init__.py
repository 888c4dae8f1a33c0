"""crosslayer: attention across depth. Importing it registers its model with transformers' Auto classes."""

from crosslayer._path import IS_COMMAND  # before any other import
from crosslayer._start import hide_bars, interrupts

TYPE_CHECKING = False  # as type checkers know it; typing itself is not needed

if IS_COMMAND and not TYPE_CHECKING:
    interrupts.watch()
    hide_bars()  # the verbs import what they need

    def __getattr__(name: str):
        """Load what the package offers when a module asks for it, as a user's own method may."""
        if name not in __all__:
            raise AttributeError(f"module 'crosslayer' has no attribute {name!r}")
        from crosslayer import api

        return vars(api)[name]
else:
    from crosslayer.api import *

__all__ = [
    "Ablate",
    "CrossLayerConfig",
    "CrossLayerForCausalLM",
    "DepthPlan",
    "Diagnosis",
    "Effect",
    "Forbid",
    "PositionSwap",
    "Retrofit",
    "ScaleValues",
    "TokenSwap",
    "Waiver",
    "allow_methods",
    "bench",
    "diagnose",
    "effect",
    "generate",
    "intervene",
    "load_model",
    "retrofit",
    "verify",
    "waiver",
    "what_if",
]
__version__ = "0.1.0"
