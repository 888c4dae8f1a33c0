"""What retrofits, evictions and quantized caches cost in quality, and save: the tables of docs/results.

    python benchmarks/quality.py --tasks TASKS_FOLDER --json FILE smollm2 smollm2@h2o:0.4 smollm2@bits:4
        NAME=FOLDER NAME=FOLDER@h2o:0.4+bits:4 [--names arc_easy,piqa] [--limit 200] [--windows 16] [--needles 8]
        [--lengths 256,512] [--text NAME=FILE …] [--no-cost] [--dtype bfloat16]

The first row is the baseline: every other is paired with it, item by item, window by window, needle by needle.
TASKS_FOLDER is what `python benchmarks/local_tasks.py` writes; an empty --names leaves tasks out.
Perplexity and KL are of windows of 512 tokens: of the embedded corpus, or of as many windows of each --text, which may
be an embedded domain. Needles are RULER's with a single key. What is measured stands in FILE after each row.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch.nn import functional
from transformers import DynamicCache

from crosslayer import evaluate, load_model, needles
from crosslayer.cache.kv_cache import SmallerKVCache, held_bytes
from crosslayer.cache.running import CacheOptions
from crosslayer.core.transformers_versions import CACHE
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.corpus.windows import packed
from crosslayer.environment import environment
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.clock import Load, random_ids
from crosslayer.judge.hidden import is_retrieved
from crosslayer.judge.judge import Judge
from crosslayer.judge.rows import cache_rows, retrieval_change, time_rows
from crosslayer.judge.tasks import summary
from crosslayer.probe.model import positions

LENGTH = 512  # tokens of a window of text
CONTEXT, NEW_TOKENS, PAIRS = 512, 16, 5  # at which caches are counted and steps are timed, in pairs of runs


@torch.no_grad()
def window_losses(model, baseline, windows, cache):
    """Return the mean loss of each window, and its KL to the baseline, in nats per token."""
    losses, divergences = [], []
    with cache.running(model):
        for ids in windows:
            log_p, log_q = (
                one(ids[None], use_cache=False).logits[0].float().log_softmax(-1) for one in (baseline, model)
            )
            losses.append(float(functional.nll_loss(log_q[:-1], ids[1:])))
            divergences.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    return np.array(losses), np.array(divergences)


def windows_of(tokenizer, options):
    """Return windows of text (N, T), as many of each domain."""
    if not options.text:
        return packed(load_documents(TextSource()), tokenizer, sequences=options.windows, length=LENGTH).ids
    embedded, domains = embedded_domains(), {}
    for text in options.text:
        name, _, file = text.partition("=")
        domains[name] = load_documents(TextSource(file)) if file else embedded[name]
    parts = {"windows": dict.fromkeys(domains, options.windows)}
    return split_domains(domains, tokenizer, parts=parts, length=LENGTH)["windows"].ids


def cache_of(text):
    """Return the cache that a row names, such as h2o:0.4, bits:4 or both."""
    named = dict(
        part.split(":", 1) if part.startswith("bits:") else ("evict", part) for part in text.split("+") if part
    )
    return CacheOptions(named.get("evict"), named.get("bits"))


def mean_interval(values):
    """Return a mean with its 95% interval over windows."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return [float(values.mean() + end) for end in (0, -half, half)]


def needles_found(model, tokenizer, cache, options):
    """Return whether each needle was found, by length."""
    lengths = [int(length) for length in options.lengths.split(",")]
    search = needles(
        model,
        tokenizer,
        lengths=lengths,
        depths=(0, 25, 50, 75, 100),
        keys=1,
        samples=options.needles,
        **cache._asdict(),
    )
    right = {length: [] for length in lengths}
    for question, answer in zip(search.questions, search.answers[0], strict=True):
        right[question.length].append(is_retrieved(answer, question.value))
    return right


def measure(row, baseline, options):
    """Return what is measured of a row, and what later rows are paired with."""
    named, _, changes = row.partition("@")
    name, _, folder = named.rpartition("=")
    cache = cache_of(changes)
    model, tokenizer = load_model(folder, dtype=options.dtype)
    original = model if baseline is None else baseline["model"]
    raw = {"model": model, "tasks": {}, "needles": {}}
    raw["losses"], divergences = window_losses(model, original, windows_of(tokenizer, options), cache)
    if options.needles:
        raw["needles"] = needles_found(model, tokenizer, cache, options)
    result = {"name": name or folder, **cache._asdict()}
    other = baseline or raw
    if options.names:
        tasks = [f"{task}_local" for task in options.names.split(",")]
        raw["tasks"] = evaluate(
            model,
            tokenizer,
            tasks=tasks,
            include_path=options.tasks,
            allow_code=True,
            limit=options.limit,
            **cache._asdict(),
        ).lm_eval_results["candidate"]
        rows = summary.task_rows(result["name"], raw["tasks"], other["tasks"])
        result["tasks"] = [
            {"name": one.task, "candidate": {"value": one.row.value}, "row": one.row.model_dump()}
            for one in rows
            if one.metric == "acc"
        ]
    result["perplexity"] = float(np.exp(raw["losses"].mean()))
    result["perplexity_ratio"] = [float(np.exp(end)) for end in mean_interval(raw["losses"] - other["losses"])]
    result["kl"], result["kl_by_window"] = mean_interval(divergences), divergences.tolist()
    result["bytes"] = cache_bytes_of(model, cache)
    result["needles"] = [
        {"share": sum(right) / len(right), "n": len(right)}
        | {"length": length, "change": retrieval_change(right, other["needles"][length]).model_dump()}
        for length, right in raw["needles"].items()
    ]
    if baseline is not None and options.cost:
        result["cost"] = [row.model_dump() for row in measure_cost(result["name"], model, baseline["model"], cache)]
    return result, raw


def measure_cost(name, model, baseline, cache):
    """Return the rows of bytes and times of a candidate next to the baseline."""
    judged = Candidate(name, model, None if cache == CacheOptions() else cache.running)
    load = Load(min(CONTEXT, positions(model) - NEW_TOKENS, positions(baseline) - NEW_TOKENS), new_tokens=NEW_TOKENS)
    runs = Judge(baseline, catches=False).runs([judged], load, random_ids([model, baseline], load), PAIRS)
    first, *pairs = runs[name]
    facts = {"candidate": name, "scope": f"{load.context} tokens"}
    return [*cache_rows(*first, **facts), *time_rows(pairs, ("ttft", "tpot_dynamic"), **facts)]


@torch.no_grad()
def cache_bytes_of(model, cache):
    """Return the bytes that the cache of a text allocates, by length."""
    sizes = {}
    with cache.running(model) as new_cache:
        for length in (512, 2048):
            used = DynamicCache(config=model.config) if new_cache is None else new_cache()
            model(torch.arange(length)[None], **{CACHE: used}, logits_to_keep=1)
            overhead = used.overhead_bytes() if isinstance(used, SmallerKVCache) else 0
            sizes[length] = held_bytes(used).allocated - overhead
    return sizes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--names", default="arc_easy,piqa")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, or an embedded domain")
    parser.add_argument("--needles", type=int, default=8, help="samples of each length and depth; 0 for none")
    parser.add_argument("--lengths", default="256,512", help="of texts with needles, in tokens")
    parser.add_argument("--cost", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name not in ("rows", "tasks", "json")}
    settings["text"] = [text.partition("=")[0] for text in options.text]
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
        shares = {task["name"]: task["candidate"]["value"] for task in result.get("tasks", [])}
        cells = [round(cell["share"], 3) for cell in result["needles"]]
        print(row, shares, round(result["perplexity"], 3), [round(end, 4) for end in result["kl"]], cells, flush=True)


if __name__ == "__main__":
    main()
