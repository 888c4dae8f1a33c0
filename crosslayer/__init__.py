"""crosslayer: attention across depth. Importing it registers its model with transformers' Auto classes."""

from crosslayer._path import IS_COMMAND  # before any other import
from crosslayer._start import hide_bars, interrupts

TYPE_CHECKING = False  # as type checkers know it; typing itself is not needed

if IS_COMMAND and not TYPE_CHECKING:
    interrupts.watch()
    hide_bars()  # the verbs import what they need
else:
    from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
    from crosslayer.effect import Effect, effect
    from crosslayer.intervene import (
        Ablate,
        Forbid,
        PositionSwap,
        ScaleValues,
        TokenSwap,
        Waiver,
        intervene,
        waiver,
    )
    from crosslayer.method import allow_methods
    from crosslayer.models import load_model
    from crosslayer.plan import DepthPlan
    from crosslayer.probe.scan import Diagnosis, diagnose
    from crosslayer.probe.what_if import what_if
    from crosslayer.retrofit.run import Retrofit, retrofit
    from crosslayer.runtime.bench import bench
    from crosslayer.runtime.verify import verify

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
    "intervene",
    "load_model",
    "retrofit",
    "verify",
    "waiver",
    "what_if",
]
__version__ = "0.1.0"
