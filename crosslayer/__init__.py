"""crosslayer: attention across depth."""

from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.models import load_model
from crosslayer.plan import DepthPlan
from crosslayer.probe.scan import Diagnosis, diagnose

__all__ = ["CrossLayerConfig", "CrossLayerForCausalLM", "DepthPlan", "Diagnosis", "diagnose", "load_model"]
__version__ = "0.1.0"
