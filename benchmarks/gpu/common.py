"""What the scripts of this folder share: arguments, times of a device, records, models of a given shape."""

import argparse
import json
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.environment import environment
from crosslayer.stats.times import paired_ratio

TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    return parser


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the time of a call, the work on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(calls: dict[str, Callable[[], float]], pairs: int, warmup: int = 1) -> dict[str, dict]:
    """Run calls that return seconds in turns; return median, spread, and the ratio to the first with its interval."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-warmup, pairs):
        for name in list(calls) if number % 2 else list(calls)[::-1]:
            taken = calls[name]()
            if number >= 0:
                times[name].append(taken)
    first = times[next(iter(calls))]
    rows = {}
    for name, entries in times.items():
        ratio = paired_ratio(entries, first)
        median = sorted(entries)[len(entries) // 2]
        rows[name] = {"seconds": median, "spread": [min(entries), max(entries)]}
        rows[name] |= {"ratio": ratio.value, "interval": ratio.interval}
    return rows


def build(shape: dict, methods: list, device: str, dtype: torch.dtype, seed: int = 0) -> CrossLayerForCausalLM:
    """Return a model with random weights, made on the device in its type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(seed)
            model = CrossLayerForCausalLM(CrossLayerConfig(**shape, cross_layer=methods))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def peak_bytes(device: str) -> int | None:
    """Return the most memory that was allocated since the last call, None on a CPU."""
    if device != "cuda":
        return None
    used = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return used


def save(file: Path, record: dict) -> None:
    """Write a record with the date, versions and machine, replacing what an earlier call wrote."""
    everything = {"date": str(date.today()), **environment().model_dump(), **record}
    file.write_text(json.dumps(everything, indent=1) + "\n")
