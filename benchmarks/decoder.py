"""Our decoder without a method against LlamaForCausalLM of the same config, and what ResFormer adds.

    python benchmarks/decoder.py [--device cpu] [--dtype float32] [--pairs 30] [--json FILE]

Both models hold the same weights. One pair is one step of each, in an order that alternates; the ratio is taken pair
by pair, with a 95 % bootstrap interval of the median. Steps: training (forward, loss, backward) and decoding (one token
through a dynamic cache). Kernels: operators with work of their own, counted by the profiler, per layer.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from scipy.stats import bootstrap
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from crosslayer.decoder import CrossLayerConfig, CrossLayerForCausalLM

SHAPE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip


def wait(device):
    """Wait for the device, so that times are of the work and not of its launch."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def training_step(model, ids):
    """Run forward, loss and backward."""
    model.train()
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()


@torch.no_grad()
def decoding_steps(model, ids, steps=8):
    """Decode `steps` tokens after a prompt that is in the cache."""
    model.eval()
    cache = DynamicCache(config=model.config)
    model(ids[:1, :256], past_key_values=cache, use_cache=True)
    wait(ids.device)
    started = time.perf_counter()
    for step in range(steps):
        model(ids[:1, step : step + 1], past_key_values=cache, use_cache=True)
    wait(ids.device)
    return time.perf_counter() - started


def training_time(model, ids):
    """Return the seconds of one training step."""
    wait(ids.device)
    started = time.perf_counter()
    training_step(model, ids)
    wait(ids.device)
    return time.perf_counter() - started


def paired(ours, llama, ids, measure, pairs):
    """Return ratio ours / Llama: median, 95 % interval of the median, and the median seconds of both."""
    times = {"ours": [], "llama": []}
    for number in range(-2, pairs):
        order = [("ours", ours), ("llama", llama)]
        for name, model in order if number % 2 else order[::-1]:
            seconds = measure(model, ids)
            if number >= 0:
                times[name].append(seconds)
    ratios = [a / b for a, b in zip(times["ours"], times["llama"], strict=True)]
    interval = bootstrap((ratios,), statistics.median, n_resamples=2000, vectorized=False, rng=0).confidence_interval
    verdict = "holds" if interval.high <= 1.03 else "fails" if interval.low > 1.03 else "undecided"
    return {
        "ratio": statistics.median(ratios),
        "ci95": [float(interval.low), float(interval.high)],
        "at_most_1.03": verdict,
        "seconds": {name: statistics.median(found) for name, found in times.items()},
    }


VIEWS = {
    "view", "reshape", "transpose", "expand", "slice", "select", "unsqueeze", "permute", "detach", "empty",
    "as_strided", "alias", "t",
}  # fmt: skip


def kernels(model, ids):
    """Return how many operators do work in a forward pass: on a GPU its kernels, on a CPU leaf operators."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ids.device.type == "cuda" else [])
    model.eval()
    with torch.no_grad(), profile(activities=activities) as profiler:
        model(ids, use_cache=False)
    if ids.device.type == "cuda":
        return sum(1 for event in profiler.events() if str(event.device_type).endswith("CUDA"))
    leaves = [e for e in profiler.events() if e.name.startswith("aten::") and not e.cpu_children]
    return sum(1 for e in leaves if e.name.removeprefix("aten::").strip("_") not in VIEWS)


def build(device, dtype, cross_layer=None):
    """Return ours, with a method or without."""
    torch.manual_seed(0)
    return CrossLayerForCausalLM(CrossLayerConfig(**SHAPE, cross_layer=cross_layer)).to(device, dtype)


def main():
    """Run both comparisons and the count of kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "decoder.json")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(device, dtype)
    ours = build(device, dtype)
    ours.load_state_dict(llama.state_dict())
    ids = torch.randint(0, SHAPE["vocab_size"], (options.batch, options.tokens), device=device)
    rows = {
        "training step": paired(ours, llama, ids, training_time, options.pairs),
        "decoding, 8 tokens": paired(ours, llama, torch.cat([ids, ids], 1), decoding_steps, options.pairs),
    }
    print("| step | ours ÷ Llama, median of pairs (95 %) | at most 1.03 |\n|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['ratio']:.3f} ({row['ci95'][0]:.3f}-{row['ci95'][1]:.3f}) | {row['at_most_1.03']} |")
    plain, layers = kernels(build(device, dtype), ids), SHAPE["num_hidden_layers"]
    added = {
        mode: (kernels(build(device, dtype, [{"name": "resformer", "mode": mode}]), ids) - plain) / (layers - 1)
        for mode in ("learnable", "identity")
    }
    print("ResFormer adds per layer: " + ", ".join(f"{count:.1f} kernels ({mode})" for mode, count in added.items()))
    result = {
        "date": str(date.today()),
        "rows": rows,
        "kernels": {"plain": plain, "added_per_layer": added},
        "shape": SHAPE,
        "options": {
            "device": device.type,
            "dtype": options.dtype,
            "pairs": options.pairs,
            "batch": options.batch,
            "tokens": options.tokens,
        },
        "versions": {name: version(name) for name in ("crosslayer", "torch", "transformers")},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
    }
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
