"""What our evaluation costs beside lm-eval's own `hf` model: the same tasks, batch and files, in turns.

    python benchmarks/eval.py MODEL TASKS_FOLDER [--tasks a,b] [--limit 200] [--batch 16] [--pairs 10] [--out FILE]

Each side evaluates a model that it has loaded, tasks loaded anew; a pair runs in an order that alternates. Printed are
medians, quartiles, and the ratio of times, ours / lm-eval's, with an interval whose ends are pairs.
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import numpy as np

import crosslayer
from crosslayer.environment import environment
from crosslayer.judge.tasks import harness
from crosslayer.models.load import load_model, model_source
from crosslayer.stats.times import coverage, paired_ratio

TARGET = 1.03  # the upper end of the interval


def by_us(model, tokenizer, options):
    started = time.perf_counter()
    evaluation = crosslayer.evaluate(
        model,
        tokenizer,
        tasks=options.tasks,
        include_path=options.folder,
        allow_code=True,
        limit=options.limit,
        batch=options.batch,
    )
    return time.perf_counter() - started, evaluation.lm_eval_results["candidate"]["results"]


def by_lm_eval(lm, options):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    with harness.quiet():
        started = time.perf_counter()
        manager = TaskManager(include_path=str(options.folder), include_defaults=False)
        names = options.tasks.split(",")
        results = simple_evaluate(
            model=lm, tasks=names, task_manager=manager, limit=options.limit, batch_size=options.batch
        )
        return time.perf_counter() - started, results["results"]


def measure(options):
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = load_model(options.model, device=options.device)
    with harness.quiet():
        lm = HFLM(
            pretrained=model_source(options.model),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            batch_size=options.batch,
        )
    sides = {"ours": lambda: by_us(model, tokenizer, options), "lm-eval": lambda: by_lm_eval(lm, options)}
    times = {name: [] for name in sides}
    for pair in range(-1, options.pairs):
        order = list(sides) if pair % 2 else list(sides)[::-1]
        measured = {name: sides[name]() for name in order}  # seconds and scores
        assert measured["ours"][1] == measured["lm-eval"][1], "the scores differ"
        if pair >= 0:  # the first is a warm-up
            for name in sides:
                times[name].append(measured[name][0])
            print(pair + 1, *(f"{name} {times[name][-1]:.2f} s" for name in sides), flush=True)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", default="arc_easy_local,piqa_local")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    times = measure(options)
    ratio = paired_ratio(times["ours"], times["lm-eval"])
    for name, values in times.items():
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        print(f"{name}: median {median:.2f} s, quartiles {low:.2f} to {high:.2f}")
    if ratio.high is not None:
        met = "met" if ratio.high <= TARGET else "missed"
        print(f"ratio {ratio.text(4)}, covers {coverage(options.pairs):.1%}")
        print(f"target, an upper end of at most {TARGET}: {met}")
    record = {
        "date": str(date.today()),
        "model": options.model,
        "tasks": options.tasks,
        "limit": options.limit,
        "batch": options.batch,
        "seconds": times,
        "medians": {name: statistics.median(values) for name, values in times.items()},
        "ratio": ratio.value,
        "interval": ratio.interval,
        "coverage": coverage(options.pairs),
        "lm_eval": harness.check_installed(),
        "environment": environment().model_dump(),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
