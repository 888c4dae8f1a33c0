"""What a decoding step costs with half the cache evicted by H2O, against the full dynamic cache of transformers.

    python benchmarks/eviction.py [--settings 4096x1,8192x4] [--steps 16] [--pairs 7] [--json FILE]

SmolLM2-135M. Both caches are filled with random states of a text that has been read, so that no prompt must run; then
both decode `steps` tokens in turns, in an order that alternates, across the end of a block, where tokens go. The ratio
is taken pair by pair, its interval from order statistics.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache

from crosslayer import load_model
from crosslayer.cache.kv_cache import held_bytes
from crosslayer.cache.running import smaller_cache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import environment
from crosslayer.stats.times import coverage, paired_ratio


def random_states(model, batch, tokens):
    """Return keys, or values, (B, H_kv, tokens, D)."""
    config = model.config
    shape = (batch, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
    return torch.randn(shape, dtype=model.dtype)


def full_cache(model, batch, context):
    """Return a dynamic cache of a text that has been read."""
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(random_states(model, batch, context), random_states(model, batch, context), layer)
    return cache


def half_cache(model, batch, context, new_cache):
    """Return a cache from which the older half of the same text was evicted."""
    cache, kept = new_cache(), context // 2
    positions = torch.arange(context - kept, context, dtype=torch.int32)
    for layer in range(model.config.num_hidden_layers):
        keys = random_states(model, batch, kept)
        cache.update(keys, random_states(model, batch, kept), layer)
        cache.states[layer].seen = context
        group = cache.groups[layer]
        group.positions = positions.repeat(batch, keys.shape[1], 1)
        group.attention = torch.rand(keys.shape[:3])
        group.seen, group.held, group.evicted = [context] * batch, [kept] * batch, True
    return cache


def decode(model, cache, batch, steps):
    """Return seconds a step."""
    token = torch.randint(0, model.config.vocab_size, (batch, 1))
    started = time.perf_counter()
    for _ in range(steps):
        model(token, **{CACHE: cache}, use_cache=True)
    return (time.perf_counter() - started) / steps


def measure(models, context, batch, options):
    """Return the result of a setting."""
    evicts, stock = models
    times = [[], []]
    with torch.no_grad(), smaller_cache(evicts, "h2o:0.5") as new_cache:
        for pair in range(options.pairs + 1):
            caches = [half_cache(evicts, batch, context, new_cache), full_cache(stock, batch, context)]
            for side in (0, 1) if pair % 2 else (1, 0):
                seconds = decode(models[side], caches[side], batch, options.steps)
                if pair:  # the first is a warm-up
                    times[side].append(seconds)
            bytes_ = [held_bytes(cache).allocated for cache in caches]
    ratio = paired_ratio(*times)
    print(f"{context} x {batch}: a step takes {ratio.text()} of the full cache's")
    return {
        "context": context, "batch": batch, "ratio": ratio.value, "interval": ratio.interval,
        "seconds": [median(column) for column in times], "bytes": bytes_,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="4096x1,8192x4")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "eviction.json")
    options = parser.parse_args()
    models = [load_model("smollm2")[0] for _ in range(2)]
    rows = []
    for setting in options.settings.split(","):
        context, batch = map(int, setting.split("x"))
        rows.append(measure(models, context, batch, options))
    result = {
        "date": str(date.today()), "steps": options.steps, "pairs": options.pairs,
        "coverage": coverage(options.pairs), "rows": rows, "environment": environment().model_dump(),
    }  # fmt: skip
    options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
