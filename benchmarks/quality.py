"""What retrofits and evictions cost in quality, and save: the tables of docs/results/evidence.md.

    python benchmarks/quality.py --tasks TASKS_FOLDER --json FILE smollm2 smollm2@h2o:0.4 NAME=FOLDER
        NAME=FOLDER@h2o:0.4 [--names arc_easy,piqa] [--limit 200] [--windows 16] [--needles 8]
        [--lengths 256,512] [--no-cost] [--dtype bfloat16]

The first row is the baseline: every other is paired with it, item by item, window by window, needle by needle.
TASKS_FOLDER is what `python -m crosslayer.verbs.evaluate.local_tasks` writes. Perplexity is of the embedded corpus,
windows of 512 tokens; needles are RULER's with a single key. What is measured stands in FILE after each row.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch.nn import functional

from crosslayer import evaluate, load_model, needles
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import packed
from crosslayer.environment import environment
from crosslayer.eviction.running import evicting_if
from crosslayer.output.progress import Progress
from crosslayer.verbs.evaluate import summary
from crosslayer.verbs.evaluate.run import measure_cost
from crosslayer.verbs.needles.record import difference, is_retrieved

LENGTH = 512  # tokens of a window of text


@torch.no_grad()
def window_losses(model, windows, evict):
    """Return the mean loss of each window, in nats a token."""
    losses = []
    with evicting_if(model, evict):
        for ids in windows.ids:
            logits = model(ids[None], use_cache=False).logits[0, :-1].float()
            losses.append(float(functional.cross_entropy(logits, ids[1:])))
    return np.array(losses)


def needles_found(model, tokenizer, evict, options):
    """Return whether each needle was found, by length."""
    lengths = [int(length) for length in options.lengths.split(",")]
    search = needles(
        model, tokenizer, lengths=lengths, depths=(0, 25, 50, 75, 100), keys=1, samples=options.needles, evict=evict
    )
    right = {length: [] for length in lengths}
    for question, answer in zip(search.questions, search.candidate.answers, strict=True):
        right[question.length].append(is_retrieved(answer, question.value))
    return right


def measure(row, baseline, options):
    """Return what is measured of a row, and what later rows are paired with."""
    named, _, evict = row.partition("@")
    name, _, folder = named.rpartition("=")
    evict = evict or None
    model, tokenizer = load_model(folder, dtype=options.dtype)
    tasks = [f"{task}_local" for task in options.names.split(",")]
    scored = evaluate(
        model, tokenizer, tasks=tasks, include_path=options.tasks, limit=options.limit, evict=evict, progress=Progress
    ).lm_eval_results["candidate"]
    windows = packed(load_documents(TextSource()), tokenizer, sequences=options.windows, length=LENGTH)
    raw = {"model": model, "tasks": scored, "losses": window_losses(model, windows, evict)}
    raw["needles"] = needles_found(model, tokenizer, evict, options) if options.needles else {}
    result = {"name": name or folder, "evict": evict}
    other = baseline or raw
    rows = summary.rows(scored, other["tasks"])
    result["tasks"] = [row.model_dump() for row in rows if row.metric == "acc"]
    gaps = raw["losses"] - other["losses"]
    half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
    result["perplexity"] = float(np.exp(raw["losses"].mean()))
    result["perplexity_ratio"] = [float(np.exp(gaps.mean() + end)) for end in (0, -half, half)]
    result["needles"] = [
        {"share": sum(right) / len(right), **difference(length, right, other["needles"][length]).model_dump()}
        for length, right in raw["needles"].items()
    ]
    if baseline is not None and options.cost:
        cost = measure_cost(model, baseline["model"], evict, Progress)
        result["cost"] = cost.model_dump(include={"context", "cache", "ttft", "tpot_dynamic"})
    return result, raw


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--names", default="arc_easy,piqa")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--needles", type=int, default=8, help="samples of each length and depth; 0 for none")
    parser.add_argument("--lengths", default="256,512", help="of texts with needles, in tokens")
    parser.add_argument("--cost", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name not in ("rows", "tasks", "json")}
    results, baseline = [], None
    for row in options.rows:
        result, raw = measure(row, baseline, options)
        baseline = baseline or raw
        results.append(result)
        record = {
            "date": str(date.today()),
            "settings": settings,
            "rows": results,
            "environment": environment().model_dump(),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shares = {task["name"]: task["candidate"]["value"] for task in result["tasks"]}
        cells = [round(cell["share"], 3) for cell in result["needles"]]
        print(row, shares, round(result["perplexity"], 3), cells, flush=True)


if __name__ == "__main__":
    main()
