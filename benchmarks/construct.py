"""What building costs: a config of 80 layers with methods, and its model on the meta device against Llama's.

    python benchmarks/construct.py [--layers 80] [--pairs 15] [--json FILE]

Times are of the processor, not of the clock, so that other programs count little. A pair is a model of each, in an
order that alternates, after a collection of garbage; the ratio is taken pair by pair, with a 95 % bootstrap interval of
the median. Methods bring modules that Llama lacks: weights of ResFormer, queries and gains of Attention Residuals, W_c.
"""

import argparse
import gc
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from scipy.stats import bootstrap
from transformers import LlamaConfig, LlamaForCausalLM

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.environment import environment

WIDTHS = {
    "vocab_size": 32_000, "hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip


def wirings(layers):
    """Return the lists of methods that are timed, by name."""
    pairs = tuple((layer, layer + 1) for layer in range(layers // 2, layers - 1, 2))
    uniattn = {"name": "uniattn", "superblocks": pairs}
    gone = {"name": "drop", "attention": (1, 3), "compensation": "attention"}
    return {
        "no method": [],
        "resformer + uniattn + drop, both compensated": ["resformer", uniattn, gone],
        "resformer + uniattn compensated + attnres": ["resformer", uniattn, "attnres"],
    }


def seconds(build):
    """Return the processor's seconds that a call takes."""
    gc.collect()
    started = time.process_time()
    build()
    return time.process_time() - started


def on_meta(cls, config):
    """Build a model without memory."""
    with torch.device("meta"):
        return cls(config)


def measure(shape, methods, pairs):
    """Return the milliseconds of a config, and the ratio of its model to Llama's."""
    configs = [1000 * seconds(lambda: CrossLayerConfig(**shape, cross_layer=methods)) for _ in range(pairs)]
    ours, llama = CrossLayerConfig(**shape, cross_layer=methods), LlamaConfig(**shape)
    models = {"ours": (CrossLayerForCausalLM, ours), "llama": (LlamaForCausalLM, llama)}
    times = {"ours": [], "llama": []}
    for number in range(-1, pairs):
        for name in sorted(models, reverse=number % 2 == 0):
            took = 1000 * seconds(lambda name=name: on_meta(*models[name]))
            if number >= 0:
                times[name].append(took)
    ratios = [a / b for a, b in zip(times["ours"], times["llama"], strict=True)]
    interval = bootstrap((ratios,), statistics.median, n_resamples=2000, vectorized=False, rng=0).confidence_interval
    return {
        "config_ms": {"first": configs[0], "best": min(configs), "median": statistics.median(configs)},
        "model_ms": {name: statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
        "ci95": [float(interval.low), float(interval.high)],
    }


def main():
    """Time every wiring, print a table, write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "construct.json")
    options = parser.parse_args()
    shape = {**WIDTHS, "num_hidden_layers": options.layers}
    rows = {name: measure(shape, methods, options.pairs) for name, methods in wirings(options.layers).items()}
    print("| methods | config, ms | model ÷ Llama's, median of pairs (95%) |\n|---|---|---|")
    for name, row in rows.items():
        low, high = row["ci95"]
        print(f"| {name} | {row['config_ms']['median']:.1f} | {row['ratio']:.3f} ({low:.3f}-{high:.3f}) |")
    result = {
        "date": str(date.today()),
        "rows": rows,
        "shape": shape,
        "options": {"pairs": options.pairs},
        **environment().model_dump(),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
