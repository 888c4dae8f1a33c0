"""crosslayer: attention across depth."""

from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
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
    "Retrofit",
    "bench",
    "diagnose",
    "load_model",
    "retrofit",
    "verify",
    "what_if",
]
__version__ = "0.1.0"
