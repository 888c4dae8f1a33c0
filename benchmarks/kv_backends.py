"""Quantized caches of this package and of transformers, on a stock model: damage, bytes, time of a decoding step.

    python benchmarks/kv_backends.py [--context 2048] [--steps 160] [--windows 6] [--json FILE]

transformers' own caches need optimum-quanto and hqq (`pip install optimum-quanto hqq`); missing ones are left out.
Damage: KL to the full cache in nats per token, of the last 128 tokens of windows of 512, read one by one after a prompt
of 384. Times: all sides decode the same tokens in turns, more than the 128 after which transformers quantizes again;
one ratio is of total times, another, with its 95% interval, the median over steps of ours with 4 bits to each other.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path

import torch
from transformers import DynamicCache, QuantizedCache

from crosslayer import load_model
from crosslayer.cache.running import smaller_cache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.environment import environment
from crosslayer.stats.times import paired_ratio

PROMPT, LENGTH = 384, 512
OTHERS = {
    "quanto int4": {"backend": "quanto", "nbits": 4, "axis_key": -1, "axis_value": -1},
    "hqq int4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "transformers fp8": {"backend": "fp8"},
}
OURS = {"int8": "8", "int4": "4", "int3": "3", "int2": "2", "fp8": "fp8"}


def sides(model):
    """Return by name: a context to run in, and what makes a cache from what the context gives."""
    found = {"full cache": (nullcontext, lambda _: DynamicCache(config=model.config))}
    for name, bits in OURS.items():
        found[name] = (lambda bits=bits: smaller_cache(model, bits=bits), lambda new_cache: new_cache())
    for name, options in OTHERS.items():
        try:
            QuantizedCache(config=model.config, **options)
        except ImportError as error:
            print(f"{name} is left out: {str(error).split('.')[0]}")
            continue
        found[name] = (nullcontext, lambda _, options=options: QuantizedCache(config=model.config, **options))
    return found


@torch.no_grad()
def log_probabilities(model, window, context, new_cache):
    """Return what a model says of the last tokens of a window, read one by one, (LENGTH - PROMPT, V)."""
    with context() as given:
        cache, rows = new_cache(given), []
        model(window[None, :PROMPT], **{CACHE: cache}, logits_to_keep=1)
        for at in range(PROMPT, LENGTH):
            rows.append(model(window[None, at : at + 1], **{CACHE: cache}).logits[0, -1].log_softmax(-1))
    return torch.stack(rows)


@torch.no_grad()
def step_times(model, chosen, context, steps):
    """Return the seconds of each decoding step of each side, in turns."""
    ids = torch.randint(3, model.config.vocab_size, (1, context + steps), generator=torch.Generator().manual_seed(0))
    caches, times = {}, {name: [] for name in chosen}
    for name, (enter, new_cache) in chosen.items():
        with enter() as given:
            caches[name] = new_cache(given)
            model(ids[:, :context], **{CACHE: caches[name]}, logits_to_keep=1)
    for at in range(context, context + steps):
        for name, (enter, _) in chosen.items():
            with enter():
                started = time.perf_counter()
                model(ids[:, at : at + 1], **{CACHE: caches[name]})
                times[name].append(time.perf_counter() - started)
    return {name: seconds[1:] for name, seconds in times.items()}  # the first step of some compiles code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "kv_backends.json")
    options = parser.parse_args()
    model, tokenizer = load_model("smollm2", dtype="float32")
    chosen, rows = sides(model), {}
    times = step_times(model, chosen, options.context, options.steps)
    for name, seconds in times.items():
        rows[name] = {"median": statistics.median(seconds), "total": sum(seconds), "steps": len(seconds)}
        ratio = paired_ratio(times["int4"], seconds)
        rows[name]["int4_to_this"] = {"ratio": ratio.value, "interval": ratio.interval}
    for row in rows.values():
        row["total_ratio"] = row["total"] / rows["full cache"]["total"]
    domains = embedded_domains()
    parts = {"windows": {name: -(-options.windows // len(domains)) for name in domains}}
    windows = split_domains(domains, tokenizer, parts=parts, length=LENGTH)["windows"].ids[: options.windows]
    divergences = {name: [] for name in chosen}
    for window in windows:
        exact = log_probabilities(model, window, *chosen["full cache"])
        for name, side in chosen.items():
            other = exact if name == "full cache" else log_probabilities(model, window, *side)
            divergences[name].append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    for name, row in rows.items():
        row["kl"] = statistics.mean(divergences[name])
        row["kl_by_window"] = divergences[name]
        own = "{ratio:.3f} ({interval[0]:.3f}-{interval[1]:.3f})".format(**row["int4_to_this"])
        step = f"{1e3 * row['median']:7.1f} ms  × {row['total_ratio']:.2f}"
        print(f"{name:18} {step}  int4 to it {own}  KL {row['kl']:.4f}", flush=True)
    record = {"date": str(date.today()), "context": options.context, "rows": rows}
    record["environment"] = environment().model_dump()
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
