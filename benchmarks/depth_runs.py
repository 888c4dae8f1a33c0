"""Trains the runs of docs/results/depth.md, one after the other; finished ones are kept.

    python benchmarks/depth_runs.py rates 64 [VARIANT ...]     # the learning rate of each variant, seed 100
    python benchmarks/depth_runs.py runs 64 [VARIANT ...]      # seeds 0 to 3, each variant at its rate
    python benchmarks/depth_runs.py runs 128 denseformer --rate 0.0015  # seeds at another rate, into WIDTH/other_rates
    python benchmarks/depth_runs.py budgets                    # runs whose rate decays, at three budgets

VARIANT is a name of `VARIANTS`; without one, all are trained. Processes with different variants can run side by side.
Runs are written to out/depth/, their records are copied to docs/evidence/depth_connections/. Afterwards `crosslayer
compare docs/evidence/depth_connections/WIDTH/runs/* --step-rounds 41` joins them, on a machine that does nothing else;
of each variant, the run that is timed is taken from out/depth/WIDTH/runs.
"""

import argparse
import json
import shutil
from pathlib import Path

import crosslayer

ROOT = Path(__file__).parent.parent
EVIDENCE, OUT = ROOT / "docs" / "evidence" / "depth_connections", ROOT / "out" / "depth"
# the method of each variant, and its best rate on a quarter of the tokens at width 64, where the search of rates begins
VARIANTS = {
    "vanilla": (None, 3e-3),
    "resformer-mode-identity": ({"name": "resformer", "mode": "identity"}, 1.5e-3),
    "resformer": ("resformer", 3e-3),
    "svformer": ("svformer", 1.5e-3),
    "denseformer": ("denseformer", 3e-3),
    "attnres": ("attnres", 1.2e-2),
    "attnres-block-2": ({"name": "attnres", "block": 2}, 6e-3),
    "hyper_connections": ("hyper_connections", 6e-3),
    "mudd": ("mudd", 3e-3),
}
SEARCH_SEED, SEEDS = 100, range(4)  # a seed that chooses a rate is never one that is reported
BUDGETS, DECAYING = (262_144, 524_288, 1_048_576), ("vanilla", "attnres-block-2")


def trained(width: int, folder: str, variant: str, settings: list[str]) -> crosslayer.TrainingRun:
    """Train a run unless its record is there, and return it."""
    record = EVIDENCE / str(width) / folder
    if not (record / "record.json").exists():
        out = OUT / str(width) / folder
        if not (out / "record.json").exists():
            method = json.dumps(VARIANTS[variant][0])
            crosslayer.train(f"depth-{width}", out, settings=[*settings, f"model.method={method}"], resume=out.exists())
        record.mkdir(parents=True, exist_ok=True)
        shutil.copy(out / "record.json", record)
    run = crosslayer.load_result(record)
    print(f"{width}/{folder} {run.final_loss:.4f}", flush=True)
    return run


def searched(width: int, variant: str, rate: float) -> float:
    """Return the loss of a run that only serves to choose a rate."""
    settings = [f"train.learning_rate={rate:g}", f"seed={SEARCH_SEED}"]
    return trained(width, f"rates/{rate:g}-{variant}", variant, settings).final_loss


def best_rate(width: int, variant: str) -> float:
    """Return the rate at which the loss of the whole run is lower than at half and at twice the rate.

    The search begins at the best rate of a quarter of the tokens, at width 128 at the one that width 64 took.
    """
    rate = VARIANTS[variant][1] if width == 64 else best_rate(64, variant)
    loss = first = searched(width, variant, rate)
    while (lower := searched(width, variant, rate / 2)) < loss:
        rate, loss = rate / 2, lower
    while loss == first and (higher := searched(width, variant, rate * 2)) < loss:
        rate, loss, first = rate * 2, higher, higher
    return rate


def decaying(variant: str, budget: int, seed: int) -> None:
    """Train a run whose rate falls to a tenth by a cosine, which `crosslayer compare` would not read before its end."""
    settings = ["train.learning_rate=0.003", f"seed={seed}", f"schedule.tokens={budget}", "schedule.minimum=0.1"]
    trained(64, f"budgets/{budget}-{variant}-{seed}", variant, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "runs", "budgets"])
    parser.add_argument("width", type=int, nargs="?", default=64, choices=[64, 128])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", default=list(VARIANTS))
    parser.add_argument("--rate", type=float, help="train the seeds at this learning rate, into WIDTH/other_rates")
    options = parser.parse_args()
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"VARIANT must be one of {', '.join(VARIANTS)}, got {', '.join(unknown)}")
    if options.what == "budgets":
        for budget in BUDGETS:
            for variant in DECAYING:
                for seed in SEEDS:
                    decaying(variant, budget, seed)
        return
    for variant in options.variants:
        rate = options.rate or best_rate(options.width, variant)
        folder = "other_rates" if options.rate else "runs"
        print(f"{variant}: {rate:g}", flush=True)
        for seed in SEEDS if options.what == "runs" else ():
            settings = [f"train.learning_rate={rate:g}", f"seed={seed}"]
            trained(options.width, f"{folder}/{rate:g}-{variant}-{seed}", variant, settings)


if __name__ == "__main__":
    main()
