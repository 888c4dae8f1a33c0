"""Times prefill, saving and loading of stored prompts in turns, over lengths and models, and writes JSON.

    python benchmarks/stored_prompts.py smollm2=codec qwen=codec-qwen --lengths 512,2048 --out benchmarks/results/stored_prompts.json

A codec is a folder that `crosslayer fit-codec MODEL --out FOLDER` wrote. Saving is cache → files, loading files → cache,
on the local disk, SHA-256 and all.
"""  # noqa: E501

import argparse
import json
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import crosslayer
from crosslayer.cache.running import prefill
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.environment import environment
from crosslayer.machine import seconds
from crosslayer.stats.times import paired_ratio

WHAT = ("prefill", "save", "load")


def measure(name: str, folder: str, lengths: list[int], repeats: int) -> list[dict]:
    model, tokenizer = crosslayer.load_model(name)
    codec = crosslayer.load_codec(folder, model, tokenizer)
    parts = {"text": {"speeches": 1}}
    windows = split_domains(embedded_domains(["speeches"]), tokenizer, parts=parts, length=max(lengths) + 1)["text"]
    rows = []
    for length in lengths:
        ids = windows.ids[:, : length + 1].to(model.device)
        prompt, times, size = ids[:, :length], {what: [] for what in WHAT}, 0
        for turn in range(repeats + 1):  # the first is not counted
            url = tempfile.mkdtemp()
            store = crosslayer.PromptStore(url, codec)
            cache = prefill(model, prompt)
            calls = {
                "prefill": partial(prefill, model, prompt),
                "save": partial(store.save, prompt, cache),
                "load": partial(store.load, ids, model),
            }
            took = {what: seconds(call, model.device) for what, call in calls.items()}
            assert store.load(ids, model)[1] == length
            size = sum(path.stat().st_size for path in Path(url).rglob("*.kv"))
            shutil.rmtree(url)
            for what in WHAT if turn else ():
                times[what].append(took[what])
        row = {"model": name, "tokens": length, "share": size / (length * 2 * sum(codec.widths)), "repeats": repeats}
        for what in WHAT:
            row[what] = {"median": float(np.median(times[what])), "low": min(times[what]), "high": max(times[what])}
        for what in WHAT[1:]:
            row[f"{what}_over_prefill"] = paired_ratio(times[what], times["prefill"]).model_dump()
        rows.append(row)
        shown = {what: f"{1e3 * row[what]['median'] / length:.3f} ms/token" for what in WHAT}
        ratios = {what: f"1/{1 / row[f'{what}_over_prefill']['value']:.1f}" for what in WHAT[1:]}
        print(name, length, f"{row['share']:.3f}", shown, ratios, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="+", metavar="MODEL=FOLDER")
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    started, rows = time.time(), []
    for pair in given.codecs:
        name, _, folder = pair.partition("=")
        rows += measure(name, folder, [int(length) for length in given.lengths.split(",")], given.repeats)
    record = {"rows": rows, "seconds": round(time.time() - started, 1), "environment": environment().model_dump()}
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
