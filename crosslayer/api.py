"""What `import crosslayer` offers; importing it loads torch and transformers."""

from crosslayer.benchmark.run import bench
from crosslayer.conversion.rewire import Retrofit, retrofit
from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.diagnosis.scan import Diagnosis, diagnose
from crosslayer.generation.run import generate
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
from crosslayer.method import allow_methods
from crosslayer.models.load import load_model
from crosslayer.plan import DepthPlan
from crosslayer.probe.what_if import what_if
from crosslayer.verification.run import verify
