"""How long a prompt takes where layers share a softmax map: with eager attention, which builds it, and with SDPA.

    python benchmarks/shared_maps.py [--tokens 1024] [--rounds 21] [--threads 1] [--json FILE]

Random models of Llama's proportions (8 layers, width 256) with the share of readers of UniAttn's paper (arXiv
2502.00439): the upper half is a superblock of four layers, so that three of eight use the map of another. Sides, which
take turns: the plain model, UniAttn, and UniAttn whose readers compute the map again, each with eager attention, then
plain and UniAttn with SDPA. A ratio is the median over rounds, with its interval.
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.environment import environment
from crosslayer.stats.times import coverage, paired_ratio

SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
UNIATTN = [{"name": "uniattn", "superblocks": [[4, 5, 6, 7]]}]
PAIRS = {  # ratio -> numerator, denominator
    "eager, map handed on": ("UniAttn, eager", "plain, eager"),
    "eager, map computed again": ("UniAttn, eager, computed again", "plain, eager"),
    "sdpa": ("UniAttn, sdpa", "plain, sdpa"),
    "plain: sdpa over eager": ("plain, sdpa", "plain, eager"),
}


def sides(tokens):
    """Return the models by side."""
    models = {}
    for name, methods in {"plain": [], "UniAttn": UNIATTN}.items():
        for attention in ("eager", "sdpa"):
            torch.manual_seed(0)
            config = CrossLayerConfig(**SHAPE, max_position_embeddings=tokens, cross_layer=methods)
            models[f"{name}, {attention}"] = CrossLayerForCausalLM(config).eval()
            models[f"{name}, {attention}"].set_attn_implementation(attention)
    torch.manual_seed(0)
    config = CrossLayerConfig(**SHAPE, max_position_embeddings=tokens, cross_layer=UNIATTN)
    again = CrossLayerForCausalLM(config).eval()
    again.set_attn_implementation("eager")
    for layer in again.model.layers:
        layer.self_attn.shares_map = False
    models["UniAttn, eager, computed again"] = again
    return models


@torch.no_grad()
def measured(tokens, rounds):
    """Return the seconds of each side by round, after one round that is not counted."""
    models = sides(tokens)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    logits = {name: model(ids, use_cache=False).logits for name, model in models.items() if "UniAttn" in name}
    first, *others = logits.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-4)
    seconds = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            started = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def main():
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "shared_maps.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = measured(options.tokens, options.rounds)
    ratios = {}
    print("| ratio | median (interval) |\n|---|---|")
    for name, (side, other) in PAIRS.items():
        ratio = paired_ratio(seconds[side], seconds[other])
        ratios[name] = {"median": ratio.value, "interval": ratio.interval}
        print(f"| {name} | {ratio.text()} |")
    record = {
        "date": str(date.today()),
        "tokens": options.tokens,
        "rounds": options.rounds,
        "threads": options.threads,
        "interval_coverage": coverage(options.rounds),
        "medians": {name: statistics.median(times) for name, times in seconds.items()},
        "quartiles": {name: statistics.quantiles(times, n=4)[::2] for name, times in seconds.items()},
        "ratios": ratios,
        **environment().model_dump(),
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
