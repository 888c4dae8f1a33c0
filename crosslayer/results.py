"""Any result, out of the folder that it was saved in."""

from pathlib import Path

from crosslayer.benchmark.result import Benchmark
from crosslayer.comparison.result import Comparison
from crosslayer.conversion.result import Receipt
from crosslayer.diagnosis.result import Diagnosis
from crosslayer.evaluation.result import Evaluation
from crosslayer.intervention.result import Effect
from crosslayer.needles.result import Needles
from crosslayer.output.result import load_as
from crosslayer.recovery.result import Recovery
from crosslayer.serving.result import ServingBenchmark
from crosslayer.training.result import TrainingRun
from crosslayer.verification.result import Verification

KINDS = (
    Diagnosis,
    Effect,
    Receipt,
    Verification,
    Benchmark,
    Evaluation,
    TrainingRun,
    Comparison,
    Recovery,
    ServingBenchmark,
    Needles,
)


def load_result(
    folder: str | Path,
) -> (
    Diagnosis
    | Effect
    | Receipt
    | Verification
    | Benchmark
    | Evaluation
    | TrainingRun
    | Comparison
    | Recovery
    | ServingBenchmark
    | Needles
):
    """Load the result that `save`, or the command line, wrote into a folder; it equals the result that was saved.

    The record may come from anyone: it is checked as a whole before anything of it is used.

    Args:
        folder: the folder of record.json.

    Raises:
        ValueError: there is no record, it is damaged, or this release reads another version of it.

    """
    return load_as(KINDS, Path(folder))
