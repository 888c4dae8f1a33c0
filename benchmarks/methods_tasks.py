"""What the runs of a comparison score on tasks, beside those of the baseline: the table of docs/papers/resformer.md.

    python benchmarks/methods_tasks.py RUNS_FOLDER --tasks TASKS_FOLDER --json FILE
        [--names hellaswag,openbookqa,winogrande,arc_easy,arc_challenge,piqa] [--limit 2000] [--baseline vanilla]

RUNS_FOLDER holds folders ARM-SEED as `crosslayer compare` leaves them, TASKS_FOLDER is what `python
benchmarks/local_tasks.py` writes. An item's difference is the mean over the seeds that both variants have; intervals
are over items. Differences seed by seed stand beside them.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import numpy as np
from scipy import stats

from crosslayer import evaluate, load_model
from crosslayer.environment import environment
from crosslayer.judge.tasks.summary import samples_of

POSITIONS = 1024  # rotary ones go on; a few answers of PIQA are longer than the 256 that the runs were trained on
SIX = "hellaswag,openbookqa,winogrande,arc_easy,arc_challenge,piqa"


def right_answers(folder, tasks, options):
    """Return for each task which items a run answers rightly, (items,) of 0 and 1."""
    model, tokenizer = load_model(str(folder / "model"))
    model.config.max_position_embeddings = POSITIONS
    results = evaluate(
        model,
        tokenizer,
        tasks=tasks,
        include_path=options.tasks,
        allow_code=True,
        limit=options.limit,
        batch=options.batch,
    ).lm_eval_results["candidate"]
    return {
        task: np.array([sample["acc"] for sample in samples_of(results["samples"][task], "acc", "none")])
        for task in tasks
    }


def difference(gaps):
    """Return mean and 95 % interval, in points, of the mean over tasks of differences (seeds, items) each."""
    by_item = [task.mean(0) for task in gaps]
    mean = np.mean([values.mean() for values in by_item])
    error = np.sqrt(sum(values.var(ddof=1) / len(values) for values in by_item)) / len(by_item)
    half = stats.norm.ppf(0.975) * error
    seeds = np.mean([task.mean(1) for task in gaps], axis=0)
    points = {"points": mean, "interval": [mean - half, mean + half], "by_seed": seeds}
    return {name: np.round(100 * np.array(value), 4).tolist() for name, value in points.items()}


def summary(right, variant, baseline, tasks):
    """Return a variant's accuracies and differences to the baseline, by task and over all tasks."""
    seeds = sorted(set(right[variant]) & set(right[baseline]))
    gaps = [np.stack([right[variant][seed][task] - right[baseline][seed][task] for seed in seeds]) for task in tasks]
    accuracy = {task: float(np.mean([right[variant][seed][task] for seed in seeds])) for task in tasks}
    return {
        "variant": variant, "seeds": seeds, "accuracy": accuracy, "mean": float(np.mean(list(accuracy.values()))),
        "differences": {task: difference([gap]) for task, gap in zip(tasks, gaps, strict=True)},
        "difference": difference(gaps),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--names", default=SIX)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--baseline", default="vanilla")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    tasks = [f"{name}_local" for name in options.names.split(",")]
    right = {}
    for folder in sorted(path.parent for path in options.runs.glob("*/record.json")):
        variant, _, seed = folder.name.rpartition("-")
        right.setdefault(variant, {})[int(seed)] = right_answers(folder, tasks, options)
        print(
            folder.name,
            {task: round(float(hits.mean()), 4) for task, hits in right[variant][int(seed)].items()},
            flush=True,
        )
    rows = [summary(right, variant, options.baseline, tasks) for variant in right]
    items = {task: len(hits) for task, hits in next(iter(right[options.baseline].values())).items()}
    record = {
        "date": str(date.today()), "limit": options.limit, "batch": options.batch, "baseline": options.baseline,
        "items": items, "rows": rows, "environment": environment().model_dump(),
    }  # fmt: skip
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
