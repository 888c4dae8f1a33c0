"""What `import crosslayer` offers; importing it loads torch and transformers."""

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
