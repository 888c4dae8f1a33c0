"""crosslayer: attention across depth. Importing it registers its model with transformers' Auto classes.

Only that model is loaded with the package; every verb is loaded when its name is first used.
"""

from crosslayer._path import IS_COMMAND  # before any other import
from crosslayer._start import hide_bars, interrupts, open_streams

TYPE_CHECKING = False  # as type checkers know it; typing itself is not needed

if TYPE_CHECKING:
    from crosslayer.benchmark.result import Benchmark
    from crosslayer.benchmark.run import bench
    from crosslayer.comparison.result import Comparison
    from crosslayer.comparison.run import compare
    from crosslayer.conversion.job import retrofit
    from crosslayer.conversion.result import Receipt
    from crosslayer.conversion.rewire import Rewired, rewire
    from crosslayer.corpus.documents import TextSource
    from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM
    from crosslayer.diagnosis.result import Diagnosis
    from crosslayer.diagnosis.scan import diagnose
    from crosslayer.evaluation.local_tasks import write_local_tasks
    from crosslayer.evaluation.result import Evaluation
    from crosslayer.evaluation.run import evaluate
    from crosslayer.eviction.running import evicting
    from crosslayer.formats.run import export
    from crosslayer.generation.run import generate
    from crosslayer.intervention.apply import intervene
    from crosslayer.intervention.kinds import Ablate, Forbid, PositionSwap, ScaleValues, TokenSwap, Waiver, waiver
    from crosslayer.intervention.measure import effect
    from crosslayer.intervention.result import Effect
    from crosslayer.method import HeadMixer, Method, Residual
    from crosslayer.methods import allow_methods
    from crosslayer.models.load import load_model
    from crosslayer.needles.result import Needles
    from crosslayer.needles.run import find_needles
    from crosslayer.plan import DepthPlan
    from crosslayer.probe.what_if import what_if
    from crosslayer.publication.run import push
    from crosslayer.recovery.result import Recovery
    from crosslayer.recovery.run import heal
    from crosslayer.results import load_result
    from crosslayer.serving.bench import bench_vllm
    from crosslayer.serving.result import ServingBenchmark
    from crosslayer.training.result import TrainingRun
    from crosslayer.training.run import train
    from crosslayer.verification.result import Verification
    from crosslayer.verification.run import verify
    from crosslayer.wiring.read import read_plan
    from crosslayer.wiring.result import ModelPlan

    __version__: str

# Where each public name is defined; the imports above say the same to type checkers and editors.
_HOMES = {
    "Ablate": "intervention.kinds",
    "Benchmark": "benchmark.result",
    "Comparison": "comparison.result",
    "CrossLayerConfig": "decoder",
    "CrossLayerForCausalLM": "decoder",
    "DepthPlan": "plan",
    "Diagnosis": "diagnosis.result",
    "Effect": "intervention.result",
    "Evaluation": "evaluation.result",
    "Forbid": "intervention.kinds",
    "HeadMixer": "method",
    "Method": "method",
    "ModelPlan": "wiring.result",
    "Needles": "needles.result",
    "PositionSwap": "intervention.kinds",
    "Receipt": "conversion.result",
    "Recovery": "recovery.result",
    "Residual": "method",
    "Rewired": "conversion.rewire",
    "ScaleValues": "intervention.kinds",
    "ServingBenchmark": "serving.result",
    "TextSource": "corpus.documents",
    "TokenSwap": "intervention.kinds",
    "TrainingRun": "training.result",
    "Verification": "verification.result",
    "Waiver": "intervention.kinds",
    "allow_methods": "methods",
    "bench": "benchmark.run",
    "bench_vllm": "serving.bench",
    "compare": "comparison.run",
    "diagnose": "diagnosis.scan",
    "effect": "intervention.measure",
    "evaluate": "evaluation.run",
    "evicting": "eviction.running",
    "export": "formats.run",
    "find_needles": "needles.run",
    "generate": "generation.run",
    "heal": "recovery.run",
    "intervene": "intervention.apply",
    "load_model": "models.load",
    "load_result": "results",
    "push": "publication.run",
    "read_plan": "wiring.read",
    "retrofit": "conversion.job",
    "rewire": "conversion.rewire",
    "train": "training.run",
    "verify": "verification.run",
    "waiver": "intervention.kinds",
    "what_if": "probe.what_if",
    "write_local_tasks": "evaluation.local_tasks",
}

__all__ = [
    "Ablate",
    "Benchmark",
    "Comparison",
    "CrossLayerConfig",
    "CrossLayerForCausalLM",
    "DepthPlan",
    "Diagnosis",
    "Effect",
    "Evaluation",
    "Forbid",
    "HeadMixer",
    "Method",
    "ModelPlan",
    "Needles",
    "PositionSwap",
    "Receipt",
    "Recovery",
    "Residual",
    "Rewired",
    "ScaleValues",
    "ServingBenchmark",
    "TextSource",
    "TokenSwap",
    "TrainingRun",
    "Verification",
    "Waiver",
    "allow_methods",
    "bench",
    "bench_vllm",
    "compare",
    "diagnose",
    "effect",
    "evaluate",
    "evicting",
    "export",
    "find_needles",
    "generate",
    "heal",
    "intervene",
    "load_model",
    "load_result",
    "push",
    "read_plan",
    "retrofit",
    "rewire",
    "train",
    "verify",
    "waiver",
    "what_if",
    "write_local_tasks",
]


def __getattr__(name: str):
    """Load a public name when it is first used (PEP 562), and keep it."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'crosslayer' has no attribute {name!r}")
    from importlib import import_module

    public = getattr(import_module(f"crosslayer.{_HOMES[name]}"), name)
    globals()[name] = public
    return public


def _version() -> str:
    """Return the version that is installed, or in a source tree that is not, that of pyproject.toml's fallback."""
    import importlib.metadata

    try:
        return importlib.metadata.version("crosslayer")
    except importlib.metadata.PackageNotFoundError:
        return "0.1.0.dev0"


def __dir__() -> list[str]:
    """Name also what is not loaded yet, for completion in editors and notebooks."""
    return sorted({*globals(), *__all__})


if IS_COMMAND:
    open_streams()
    interrupts.watch()
    hide_bars()  # a verb imports what it needs
else:
    import crosslayer.decoder  # noqa: F401  registers the model
