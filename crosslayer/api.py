"""What `import crosslayer` offers; importing it loads torch and transformers."""

from crosslayer.benchmark.compare import bench
from crosslayer.conversion.rewire import Retrofit, retrofit
from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.diagnosis.result import Diagnosis
from crosslayer.diagnosis.scan import diagnose
from crosslayer.intervention.apply import (
    Ablate,
    Forbid,
    PositionSwap,
    ScaleValues,
    TokenSwap,
    Waiver,
    intervene,
    waiver,
)
from crosslayer.intervention.measure import Effect, effect
from crosslayer.methods import allow_methods
from crosslayer.models.load import load_model
from crosslayer.plan import DepthPlan
from crosslayer.probe.what_if import what_if
from crosslayer.verification.verify_model import verify
