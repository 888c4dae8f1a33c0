"""crosslayer: attention across depth."""

from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.models import load_model
from crosslayer.plan import DepthPlan
from crosslayer.probe.scan import Diagnosis, diagnose
from crosslayer.probe.what_if import what_if
from crosslayer.retrofit.run import Retrofit, retrofit

__all__ = [
    "CrossLayerConfig",
    "CrossLayerForCausalLM",
    "DepthPlan",
    "Diagnosis",
    "Retrofit",
    "diagnose",
    "load_model",
    "retrofit",
    "what_if",
]
__version__ = "0.1.0"
