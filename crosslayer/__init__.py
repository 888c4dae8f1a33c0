"""crosslayer: attention across depth."""

from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.effect import Effect, effect
from crosslayer.intervene import intervene, waiver
from crosslayer.models import load_model
from crosslayer.plan import DepthPlan
from crosslayer.probe.scan import Diagnosis, diagnose
from crosslayer.probe.what_if import what_if
from crosslayer.retrofit.run import Retrofit, retrofit
from crosslayer.runtime.bench import bench
from crosslayer.runtime.verify import verify

__all__ = [
    "CrossLayerConfig",
    "CrossLayerForCausalLM",
    "DepthPlan",
    "Diagnosis",
    "Effect",
    "Retrofit",
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
