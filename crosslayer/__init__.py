"""crosslayer: attention across depth."""

from crosslayer.models import load_model
from crosslayer.probe.scan import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose", "load_model"]
__version__ = "0.1.0"
