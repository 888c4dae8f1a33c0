"""What the scripts of this folder share: arguments, times of a device, records, models and their shapes."""

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.environment import environment
from crosslayer.stats.times import paired_ratio

SHAPE_7B = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPE_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
}  # fmt: skip
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


def freed(device: str) -> None:
    """Give back the memory of models that are no longer named."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


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


def resumed(file: Path, **facts: object) -> dict:
    """Return the record that a stopped run with the same facts left in a file, otherwise one without rows."""
    facts = json.loads(json.dumps(facts))  # as a file has them
    with contextlib.suppress(OSError, ValueError):
        earlier = json.loads(file.read_text())
        if all(earlier.get(name) == value for name, value in facts.items()):
            rows = {name: row for name, row in earlier["rows"].items() if "error" not in row}
            return {**earlier, "rows": rows}
    return {**facts, "rows": {}}


def save(file: Path, record: dict) -> None:
    """Write a record with the date, versions and machine, replacing what an earlier call wrote."""
    everything = {**record, "date": str(date.today()), **environment().model_dump()}
    partial = file.with_suffix(".part")  # if the process is killed here, the old file stays
    partial.write_text(json.dumps(everything, indent=1) + "\n")
    partial.replace(file)
